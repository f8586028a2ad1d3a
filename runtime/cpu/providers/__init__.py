"""Kernel providers of the CPU, one file each, by the provider's name."""
