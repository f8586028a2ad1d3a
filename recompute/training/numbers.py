"""Checks of options that are numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import UsageError


def number(name: str, value: Any) -> float:
    """The value if it is finite and not negative, else UsageError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise UsageError(f"{name} must be a number, not {value!r}")
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name} must be finite and not negative, but it is {value}")
    return float(value)


def fraction(name: str, value: Any) -> float:
    """A number of at least 0 and below 1.  UsageError for others."""
    if not 0 <= number(name, value) < 1:
        raise UsageError(f"{name} must be at least 0 and below 1, but it is {value}")
    return float(value)
