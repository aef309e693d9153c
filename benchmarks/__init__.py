"""Benchmarks: each headline figure beside a reference, both measured in one run. `python -m benchmarks`."""
