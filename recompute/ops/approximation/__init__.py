"""Operators that approximate what a backward pass reads, in fewer bytes; only by a user's permission."""
