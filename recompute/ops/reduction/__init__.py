"""Sums, extremes, softmax: what runs over axes."""
