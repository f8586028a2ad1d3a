"""The planners, one file a method.  Every module here is imported."""
