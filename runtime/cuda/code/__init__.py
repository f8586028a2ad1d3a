"""Code generation for CUDA kernels."""
