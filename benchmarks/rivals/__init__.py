"""Whole training runs side by side with those of others: `python -m benchmarks.rivals`."""
