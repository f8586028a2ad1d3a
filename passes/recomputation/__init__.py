"""Recomputation: forward operators inserted again before the backward operators that need their outputs."""
