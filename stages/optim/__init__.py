"""Optimizer updates of one parameter, or a piece of one, for profiling and training alike."""
