"""Approximations that a user permits: sketches, few-bit slopes and compressed values in place of what waits."""
