"""Shared parts of the CPU and CUDA runtimes."""
