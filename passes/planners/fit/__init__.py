"""A compiled step within a budget: plans are compiled, measured and searched."""
