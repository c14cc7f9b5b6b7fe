"""Images in the parts in which large sets are kept: tar files, and the parts of a streamed dataset."""
