"""Injected faults over all points of a run: `python -m benchmarks.faults`."""
