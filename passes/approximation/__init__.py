"""Passes that keep approximations of values, where the user permits it."""
