"""Builds an atlas from a model, a layer and images, one stage after the other."""
