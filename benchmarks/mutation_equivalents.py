"""Mutants that change nothing which a test could see: (file, function, line before, line after, reason)."""

EQUIVALENT: tuple[tuple[str, str, str, str, str], ...] = ()
