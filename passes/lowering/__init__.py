"""Lowering: layouts, fused operators, and the kernels that run them."""
