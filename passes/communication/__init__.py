"""Passes for communication between ranks."""
