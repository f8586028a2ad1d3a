"""Engines: what carries the communication between ranks that run together."""
