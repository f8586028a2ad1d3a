"""Code generation for CPU kernels."""
