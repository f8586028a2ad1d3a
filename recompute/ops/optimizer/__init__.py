"""Updates of parameters and state."""
