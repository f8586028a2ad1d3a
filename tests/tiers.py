"""Which cases of a test are left out where nobody asks for the slow ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def but_slow(
    values: Iterable[Any], slow: Callable[[Any], bool], by_hand: Callable[[Any], bool] = lambda v: False
) -> list[Any]:
    """Parameters of a test; those for which `slow` is true are marked `slow`, which CI runs besides, those for which
    `by_hand` is true `hours`.

    A case of several parameters is a tuple.
    """

    def marked(v: Any) -> Any:
        mark = pytest.mark.hours if by_hand(v) else pytest.mark.slow if slow(v) else None
        return v if mark is None else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=mark)

    return [marked(v) for v in values]
