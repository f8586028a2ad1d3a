"""The planners, one file per method.  Every module here is imported."""
