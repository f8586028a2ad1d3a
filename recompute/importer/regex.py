"""Regular expressions in time linear in the text, by simulation of all states of a finite automaton.

ONNX's RegexFullMatch has RE2's syntax, without back-references and look-around: such a pattern is a finite automaton.
Python's parser parses it; Python's matcher is not used, as it may take exponential time.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from ..errors import ModelError

sre_parse: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

#: most states of a pattern: `(a{1000}){1000}` would have a million
MAX_STATES = 20_000
_IGNORE_CASE = int(sre_parse.SRE_FLAG_IGNORECASE)
_DOT_ALL = int(sre_parse.SRE_FLAG_DOTALL)
_MULTILINE = int(sre_parse.SRE_FLAG_MULTILINE)
_ASCII = int(sre_parse.SRE_FLAG_ASCII)

_Test = Callable[[str], bool]
_Assertion = Callable[[str, int], bool]


class Automaton:
    """A pattern as states: `steps[s]` is (test of a character, next state), `ways[s]` (assertion or None, state)."""

    def __init__(self, pattern: str) -> None:
        try:
            tree = sre_parse.parse(pattern)
        except RecursionError:
            raise ModelError("its pattern is nested too deeply") from None
        except Exception as e:
            raise ModelError(f"its pattern is not a regular expression: {e}") from None
        self.flags = int(tree.state.flags)
        self.steps: list[tuple[_Test, int] | None] = []
        self.ways: list[list[tuple[_Assertion | None, int]]] = []
        self.start = self._state()
        try:
            self.end = self._sequence(tree, self.start, self.flags)
        except RecursionError:
            raise ModelError("its pattern is nested too deeply") from None

    def _state(self) -> int:
        if len(self.steps) >= MAX_STATES:
            raise ModelError(f"its pattern has more than {MAX_STATES:,} states: repeat less in it")
        self.steps.append(None)
        self.ways.append([])
        return len(self.steps) - 1

    def _way(self, a: int, b: int, assertion: _Assertion | None = None) -> None:
        self.ways[a].append((assertion, b))

    def _sequence(self, items: Any, at: int, flags: int) -> int:
        for op, argument in items:
            at = self._item(str(op), argument, at, flags)
        return at

    def _item(self, op: str, argument: Any, at: int, flags: int) -> int:
        """Adds one item of a pattern behind state `at`; the state after it."""
        test = _test(op, argument, flags)
        if test is not None:
            end = self._state()
            self.steps[at] = (test, end)
            following = self._state()  # a state has either one step or several ways
            self._way(end, following)
            return following
        if op == "SUBPATTERN":
            _, add, remove, inner = argument
            return self._sequence(inner, at, (flags | add) & ~remove)
        if op == "BRANCH":
            end = self._state()
            for inner in argument[1]:
                begin = self._state()
                self._way(at, begin)
                self._way(self._sequence(inner, begin, flags), end)
            return end
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = argument
            return self._repeat((least, most), inner, at, flags)
        if op == "AT":
            end = self._state()
            self._way(at, end, _assertion(str(argument), flags))
            return end
        raise ModelError(f"its pattern uses {op.lower().replace('_', ' ')}, which RE2's syntax does not have")

    def _repeat(self, times: tuple[int, Any], inner: Any, at: int, flags: int) -> int:
        least, most = times
        for _ in range(least):
            before, at = at, self._sequence(inner, at, flags)
            if at == before:  # nothing inside, however often
                break
        if most == sre_parse.MAXREPEAT:
            begin, end = self._state(), self._state()
            self._way(at, begin)
            self._way(self._sequence(inner, begin, flags), begin)
            self._way(begin, end)
            return end
        end = self._state()
        for _ in range(int(most) - least):
            self._way(at, end)
            begin = self._state()
            self._way(at, begin)
            at = self._sequence(inner, begin, flags)
        self._way(at, end)
        return end

    def matches(self, text: str) -> bool:
        """Whether the whole text matches."""
        alive = self._reached([self.start], text, 0)
        for i, character in enumerate(text):
            after = [step[1] for s in alive if (step := self.steps[s]) is not None and step[0](character)]
            if not after:
                return False
            alive = self._reached(after, text, i + 1)
        return self.end in alive

    def _reached(self, states: list[int], text: str, at: int) -> set[int]:
        seen, todo = set(states), list(states)
        while todo:
            for assertion, to in self.ways[todo.pop()]:
                if to not in seen and (assertion is None or assertion(text, at)):
                    seen.add(to)
                    todo.append(to)
        return seen


@functools.lru_cache(maxsize=16)
def automaton(pattern: str) -> Automaton:
    """The automaton of a pattern.  ModelError if it is not a regular expression of RE2's syntax."""
    return Automaton(pattern)


def _test(op: str, argument: Any, flags: int) -> _Test | None:
    """A test whether a character matches an item of a pattern; None for items that match no single character."""
    if op == "ANY":
        return (lambda c: True) if flags & _DOT_ALL else (lambda c: c != "\n")
    if op == "LITERAL":
        return _any_case(lambda c: ord(c) == argument, flags)
    if op == "NOT_LITERAL":
        inside = _any_case(lambda c: ord(c) == argument, flags)
        return lambda c: not inside(c)
    if op != "IN":
        return None
    members = list(argument)
    negated = str(members[0][0]) == "NEGATE"
    tests = [_member(str(kind), value, flags) for kind, value in members[negated:]]
    inside = _any_case(lambda c: any(t(c) for t in tests), flags)
    return (lambda c: not inside(c)) if negated else inside


def _any_case(test: _Test, flags: int) -> _Test:
    if not flags & _IGNORE_CASE:
        return test
    return lambda c: any(test(d) for d in {c, c.lower(), c.upper()} if len(d) == 1)


def _member(kind: str, value: Any, flags: int) -> _Test:
    if kind == "LITERAL":
        return lambda c: ord(c) == value
    if kind == "RANGE":
        return lambda c: value[0] <= ord(c) <= value[1]
    classes: dict[str, _Test] = {"DIGIT": str.isdecimal, "SPACE": str.isspace, "WORD": _is_word}
    name = str(value).removeprefix("CATEGORY_")
    plain = classes.get(name.removeprefix("NOT_"))
    if plain is None:
        raise ModelError(f"its pattern uses the class {name.lower()}, which is not supported")
    test = (lambda c: c.isascii() and plain(c)) if flags & _ASCII else plain
    return (lambda c: not test(c)) if name.startswith("NOT_") else test


def _is_word(c: str) -> bool:
    return c.isalnum() or c == "_"


def _assertion(where: str, flags: int) -> _Assertion:
    """A test whether an anchor matches at a position of a text."""
    if where in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        lines = flags & _MULTILINE and where == "AT_BEGINNING"
        return lambda text, at: at == 0 or bool(lines and text[at - 1] == "\n")
    if where == "AT_END_STRING":
        return lambda text, at: at == len(text)
    if where == "AT_END":
        if flags & _MULTILINE:
            return lambda text, at: at == len(text) or text[at] == "\n"
        return lambda text, at: at == len(text) or (at == len(text) - 1 and text[at] == "\n")
    word = (lambda c: c.isascii() and _is_word(c)) if flags & _ASCII else _is_word

    def at_boundary(text: str, at: int) -> bool:
        return (at > 0 and word(text[at - 1])) != (at < len(text) and word(text[at]))

    return at_boundary if where == "AT_BOUNDARY" else lambda text, at: not at_boundary(text, at)
