"""Which cases of a test are left out where nobody asks for the slow ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def but_slow(values: Iterable[Any], slow: Callable[[Any], bool]) -> list[Any]:
    """Parameters of a test; those for which `slow` is true are marked `slow`, which CI runs besides.

    A case of several parameters is a tuple.
    """
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow) if slow(v) else v for v in values
    ]
