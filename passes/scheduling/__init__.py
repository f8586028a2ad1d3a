"""Scheduling: an order of the operators that needs less memory."""
