"""Generated kernels of element-wise loops."""
