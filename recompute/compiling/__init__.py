"""A training step made for a target: planned within a budget, compiled, at any batch."""
