"""Recomputation passes: clones of forward operators before the backward operators that need their outputs."""
