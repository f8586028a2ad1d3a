"""The command line: `recompute-compile`."""

from .command import main

__all__ = ["main"]
