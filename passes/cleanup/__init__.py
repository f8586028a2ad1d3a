"""Cleanup passes: dead code, early updates, updates after all checks."""
