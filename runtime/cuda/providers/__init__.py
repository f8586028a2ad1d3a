"""Kernel providers of CUDA devices, one file each, by the provider's name."""
