"""Parameters and optimizer state divided among ranks, and norms that are the same on any number of them."""
