"""Speed, as ratios measured in one run with the sides alternating: `python -m benchmarks NAME [--json]`."""
