"""Gradient passes: the backward pass, rewrites that keep fewer values for it, mixed precision."""
