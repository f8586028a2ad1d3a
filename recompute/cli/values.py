"""How values are written on the command line, and in its report."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from ..passes.target import Target


def finite(x: Any) -> Any:
    """The same with None for numbers that JSON has no way to write: a loss that is no number any more."""
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {k: finite(v) for k, v in x.items()}
    return [finite(v) for v in x] if isinstance(x, (list, tuple)) else x


def target_of(args: argparse.Namespace) -> Target:
    """What the command line compiles for."""
    from ..passes.target import Target
    from ..places import named_place

    return Target(
        named_place(args.place),
        args.providers,
        args.cost,
        args.precision,
        schedule=not args.no_schedule,
        rebuild=not args.no_rebuild,
    )


def split(text: str) -> list[str]:
    """Parts between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def input_shapes(items: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`x:[1,2]` (several in one, or the option repeated) as a dictionary."""
    shapes: dict[str, tuple[int, ...]] = {}
    for item in items:
        for part in item.replace("],", "];").split(";"):
            name, _, dims = part.rpartition(":")
            try:
                if not name or not dims.strip().startswith("["):
                    raise ValueError
                shapes[name.strip()] = tuple(int(d) for d in dims.strip(" []").split(",") if d.strip())
                if any(d < 0 for d in shapes[name.strip()]):
                    raise ValueError
            except ValueError:
                raise UsageError(f"--input-shapes: cannot read '{part}' (expected e.g. x:[64,3,224,224])") from None
    return shapes


def zoo_option(text: str) -> tuple[str, Any]:
    """`key=value`; numbers, lists of numbers and truth values as such.  UsageError without a sign."""
    key, sign, value = text.partition("=")
    if not sign:
        raise UsageError(f"--option: cannot read '{text}' (expected key=value)")
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    if all(part.isdecimal() for part in value.split(",")):
        return key, tuple(int(part) for part in value.split(","))
    return key, {"true": True, "false": False}.get(value.lower(), value)
