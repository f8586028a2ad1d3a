"""Kernels for the processor: providers, each optional, and the lowering that chooses among them."""
