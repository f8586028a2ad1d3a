"""Operators of the domain com.microsoft."""
