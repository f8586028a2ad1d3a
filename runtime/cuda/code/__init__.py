"""Parts that kernels are generated from."""
