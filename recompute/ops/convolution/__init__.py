"""Convolutions and their windows."""
