"""From a placement to the program that carries it out; see `lower`."""
