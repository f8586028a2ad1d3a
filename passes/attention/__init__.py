"""Attention: found in what exporters write."""
