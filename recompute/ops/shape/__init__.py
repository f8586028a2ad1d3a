"""Operators that move or select elements."""
