"""Compilation of training steps for a target, within a budget, at any batch."""
