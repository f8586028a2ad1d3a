"""Offloading of values to host memory."""
