"""Measures of a dictionary of sub-units or latents, one file for each."""
