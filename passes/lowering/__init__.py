"""Lowering passes: layouts, fusion, choice of kernels."""
