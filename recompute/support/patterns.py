"""Names and globs by which users choose values."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence

_GLOB = frozenset("*?[")


class Patterns:
    """Names, which are looked up, and globs, which are tried one after the other."""

    def __init__(self, patterns: str | Sequence[str]) -> None:
        self._all = [patterns] if isinstance(patterns, str) else list(patterns)
        self._names = set(self._all)
        self._globs = [p for p in self._names if not _GLOB.isdisjoint(p)]

    def fit(self, name: str) -> bool:
        """Whether one of them fits a name."""
        return name in self._names or any(fnmatch.fnmatchcase(name, p) for p in self._globs)

    def useless(self, names: Collection[str]) -> str | None:
        """The first of them that fits none of `names`, None where each fits one."""
        for p in self._all:
            if p not in names and (_GLOB.isdisjoint(p) or not any(fnmatch.fnmatchcase(n, p) for n in names)):
                return p
        return None
