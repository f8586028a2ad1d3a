"""A user's own passes in a step: before or after one of the list's, by name.

rc.Target(inserted=("after:autodiff=drop-double-negations",))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import UsageError, nearest
from .base import Pass, check_order, pipeline

PLACES = ("before", "after")


@dataclass(frozen=True)
class Insertion:
    """Passes at a place of the list: `where` ("before" or "after") the first pass called `at` of its phase."""

    where: str
    at: str
    passes: tuple[Pass, ...]

    def __str__(self) -> str:
        return f"{self.where}:{self.at}={','.join(map(str, self.passes))}"


def insertion(given: str | Insertion) -> Insertion:
    """An insertion from its text, such as "after:autodiff=my-pass{n=2},dead-code".  UsageError for other texts."""
    if isinstance(given, Insertion):
        return given
    place, equals, text = given.partition("=") if isinstance(given, str) else ("", "", "")
    where, _, at = place.partition(":")
    if where not in PLACES or not at or not equals or not text:
        raise UsageError(f"a pass is inserted as after:NAME=PASS or before:NAME=PASS, not {given!r}")
    return Insertion(where, at, tuple(pipeline(text)))


def with_inserted(passes: Sequence[Pass], inserted: Iterable[Insertion]) -> list[Pass]:
    """A list of passes with those that are inserted at its own; others are left out."""
    result = list(passes)
    for one in inserted:
        names = [p.name for p in result]
        if one.at in names:
            at = names.index(one.at) + (one.where == "after")
            result[at:at] = one.passes
    return result


def check_places(inserted: Iterable[Insertion], passes: Sequence[Pass]) -> None:
    """UsageError for insertions at a pass that is none of `passes`, and for an order that they do not allow."""
    names = list(dict.fromkeys(p.name for p in passes))
    for one in inserted:
        if one.at not in names:
            raise UsageError(
                f"{one}: this step has no pass '{one.at}' where others can be inserted{nearest(one.at, names)}; it has "
                f"{', '.join(names)}"
            )
    check_order(passes)
