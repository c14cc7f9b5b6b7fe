"""What all parts of the package use: files, optional packages, keys, memory, processes, YAML, HTML, plots."""
