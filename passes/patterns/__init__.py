"""Compositions in the forward pass that become one operator, whose gradient keeps less."""
