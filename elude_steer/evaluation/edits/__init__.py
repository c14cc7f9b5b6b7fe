"""The benchmark of edits: worlds, sweeps over settings, tuning."""
