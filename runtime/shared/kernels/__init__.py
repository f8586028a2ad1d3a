"""Kernel families that serve every place.  Every module here is imported."""
