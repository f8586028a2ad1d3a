"""Which cases of a test are left out where nobody asks for the slow ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from recompute import models

#: networks of the zoo that, narrowed, are a deeper or wider sister of one that is tested
SISTERS = ("gpt3-22b", "gpt3-175b", "gpt3-530b", "gpt3-1t")
SISTERS += ("llama-13b", "llama-70b", "llama3-8b", "llama3-70b", "llama-405b", "moe-8x7b")
SISTERS += ("vit-small", "vit-base", "vit-large")
#: networks that came after cases had their turns: they are added behind the others
LATER = ("moe-tiny", "vit-tiny")


def zoo() -> list[str]:
    """The names of the networks that tests go through: without sisters, later ones last."""
    return [n for n in models.names() if n not in (*SISTERS, *LATER)] + list(LATER)


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
