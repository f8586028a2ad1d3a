"""A training step as a library in C: object code, a header, a file of weights."""
