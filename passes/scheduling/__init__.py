"""Scheduling: reordering of operators to lower the peak."""
