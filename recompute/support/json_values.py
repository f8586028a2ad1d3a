"""Checks of JSON from a file."""

from __future__ import annotations

import math
from typing import Any

_NAMES: dict[Any, str] = {
    str: "a text", int: "a whole number", float: "a finite number", bool: "true or false", None: "null",
}  # fmt: skip


def unfit(value: Any, wanted: Any, where: str) -> str:
    """Why a value read from JSON is not what is wanted; "" if it is.

    `wanted`: str, int, float (finite; also a whole number), bool or None; a tuple of alternatives; a list with what
    each entry must be; a dictionary with what each key must have (further keys are ignored), or under the key `...`
    what every value must be.
    """
    if isinstance(wanted, tuple):
        whys = [unfit(value, w, where) for w in wanted]
        inside = next((y for y, w in zip(whys, wanted, strict=True) if isinstance(w, type(value))), "")
        return "" if "" in whys else inside or f"{where} must be {_said(wanted)}, not {repr_short(value)}"
    if isinstance(wanted, list):
        if not isinstance(value, list):
            return f"{where} must be a list"
        return next((why for i, v in enumerate(value) if (why := unfit(v, wanted[0], f"{where}[{i}]"))), "")
    if isinstance(wanted, dict):
        if not isinstance(value, dict):
            return f"{where} must be an object with names"
        each = wanted.get(...)
        pairs = [(n, w) for n, w in wanted.items() if n is not ...] + ([(n, each) for n in value] if each else [])
        missing = next((n for n, _ in pairs if n not in value), None)
        if missing is not None:
            return f"{where} lacks '{missing}'"
        return next((why for n, w in pairs if (why := unfit(value[n], w, f"{where}.{n}"))), "")
    return "" if _is(value, wanted) else f"{where} must be {_said((wanted,))}, not {repr_short(value)}"


def repr_short(value: Any) -> str:
    """A value in an error."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is(value: Any, wanted: Any) -> bool:
    if wanted is None:
        return value is None
    if wanted is float and type(value) in (int, float):
        return abs(value) <= 1e300 and math.isfinite(value)
    return type(value) is wanted


def _said(wanted: tuple) -> str:
    kinds: dict[type, str] = {list: "a list", dict: "an object with names"}
    return " or ".join(kinds[type(w)] if type(w) in kinds else _NAMES[w] for w in wanted)
