"""Losses on class labels, and loss scaling."""
