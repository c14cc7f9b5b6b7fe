"""Files, optional packages, fingerprints, memory, processes, YAML, plots: what every part of the package uses."""
