"""Losses: the head of a language model, found in what exporters write."""
