"""The comparison of ELUDe with its baselines on toyland."""
