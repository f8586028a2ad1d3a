"""Parts of convolution kernels."""
