"""Evaluation of atlases and methods: measures, the benchmark of edits, baselines, comparisons."""
