"""Benchmarks of jamp beside its peers: `python -m benchmarks --help`."""
