"""Quantisation-aware training: values rounded to what 8-bit integers hold, and the ranges that they are rounded in."""
