"""Patterns of names and texts: names and globs with which users select values, and regular expressions of files."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..errors import ModelError, expect, load_extra

_GLOB = frozenset("*?[")


class Patterns:
    """A list of names and globs."""

    def __init__(self, patterns: str | Sequence[str], what: str = "patterns") -> None:
        wanted = "a name or glob, or a list of such"
        listed = [patterns] if isinstance(patterns, str) else expect(what, patterns, Iterable, wanted)
        self._all = [expect(what, p, str, wanted) for p in listed]
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


@functools.lru_cache(maxsize=16)
def regular_expression(pattern: str) -> Any:
    """A compiled expression of RE2's syntax: `fullmatch(text)` takes time linear in the text, as Python's may not.

    `programsize`: its states.  ModelError for other syntax and for too many states, MissingExtraError without
    google-re2 (extra `regex`).
    """
    re2 = load_extra("re2", "regex", "matching a regular expression of a file", "google-re2")
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as e:
        why = e.args[0].decode("utf-8", "replace") if e.args and isinstance(e.args[0], bytes) else str(e)
        raise ModelError(f"its pattern is not a regular expression of RE2's syntax: {why}") from None
