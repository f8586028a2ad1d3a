"""Kernel providers of the processor, one file each, by the provider's name."""
