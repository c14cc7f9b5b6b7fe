"""Measures of what a split is worth: one file a measure."""
