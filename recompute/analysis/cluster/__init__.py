"""Closed formulas for steps of many ranks: they prune meshes; programs that are compiled decide."""
