"""Operators that lowering makes of several others."""
