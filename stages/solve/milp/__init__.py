"""The step as a mixed-integer linear program: a lower bound, and a placement near it."""
