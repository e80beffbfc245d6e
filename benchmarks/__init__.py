"""Speed, as ratios within one run. Not tests: run by hand, `python -m benchmarks.ratios --help`."""
