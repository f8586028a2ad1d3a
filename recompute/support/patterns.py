"""Name patterns: names and globs with which users select values."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence

from ..errors import expect

_GLOB = frozenset("*?[")


class Patterns:
    """A list of names and globs."""

    def __init__(self, patterns: str | Sequence[str], what: str = "patterns") -> None:
        wanted = "a name or glob, or a list of such"
        given = [patterns] if isinstance(patterns, str) else expect(what, patterns, Iterable, wanted)
        self._all = [expect(what, p, str, wanted) for p in given]
        self._names = set(self._all)
        self._globs = [p for p in self._names if not _GLOB.isdisjoint(p)]

    def fit(self, name: str) -> bool:
        """Whether one of the patterns matches a name."""
        return name in self._names or any(fnmatch.fnmatchcase(name, p) for p in self._globs)

    def useless(self, names: Collection[str]) -> str | None:
        """The first pattern that matches none of `names`; None if each matches one."""
        for p in self._all:
            if p not in names and (_GLOB.isdisjoint(p) or not any(fnmatch.fnmatchcase(n, p) for n in names)):
                return p
        return None
