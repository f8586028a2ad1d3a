"""Operators that keep less than the exact value."""
