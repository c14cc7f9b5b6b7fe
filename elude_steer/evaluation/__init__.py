"""What an atlas or a method is worth: measures, benchmarks, baselines, comparisons."""
