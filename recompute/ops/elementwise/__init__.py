"""Element-wise operators: arithmetic, comparisons, activations."""
