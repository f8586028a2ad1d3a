"""Kernel families, by operator.  Every module here is imported."""
