"""Operators without kernels of their own: their NumPy numerics, recorded as launches."""
