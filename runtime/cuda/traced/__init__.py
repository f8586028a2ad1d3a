"""Traced operators: NumPy numerics of operators without a kernel, recorded as launches."""
