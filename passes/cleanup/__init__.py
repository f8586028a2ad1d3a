"""Tidying: operators that nothing needs, updates as early as they can be, updates after all checks."""
