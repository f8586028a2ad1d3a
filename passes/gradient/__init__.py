"""Gradients: the backward pass, and what makes it lean; element types of mixed precision."""
