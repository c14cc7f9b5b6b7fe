"""The lists of concepts that come with the package, and how they were made."""
