"""Planners as published, for comparison: `auto` never asks them."""
