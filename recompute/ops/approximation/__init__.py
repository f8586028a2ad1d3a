"""Approximations: operators that keep less of a value than it has."""
