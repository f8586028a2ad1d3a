"""Offloading: values that wait in host memory."""
