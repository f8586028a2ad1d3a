"""Helpers for all parts: atomic file writes, caches, locks, printed tables."""
