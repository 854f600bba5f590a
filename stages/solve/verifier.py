"""Checks a program; written next."""
def verify(*a, **k): pass
