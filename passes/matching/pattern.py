"""Patterns: expressions over operators, as a formula is written.

    op.Div(op.Exp("x"), op.ReduceSum(op.Exp("x"), axes="axes"))

A text names a value (or an attribute), the same one wherever it stands; a number is a constant all of whose elements
are that number; None is an operand that is absent, `...` any.  Operands of Add, Mul and the like are tried both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, TypeAlias

from ...language.builder import Builder
from ...language.ir import Operator, Value
from .graph import COMMUTATIVE, Graph

Captures: TypeAlias = "dict[str, Any]"


class Pattern:
    """What a value may be."""

    def matches(self, graph: Graph, v: Value, names: Captures) -> Iterator[Captures]:
        """All ways to match a value, given what names stand for; each with what they stand for then."""
        raise NotImplementedError

    def named(self, name: str) -> Pattern:
        """The same pattern; the value gets a name."""
        return _Named(self, name)


Term: TypeAlias = "Pattern | str | float | EllipsisType | None"


def matches(term: Term, graph: Graph, v: Value | None, names: Captures) -> Iterator[Captures]:
    """All ways to match an operand."""
    if term is ... or (term is None and v is None):
        yield names
    elif v is None or term is None:
        return
    elif isinstance(term, str):
        yield from _bound(names, term, v)
    elif isinstance(term, Pattern):
        yield from term.matches(graph, v, names)
    elif graph.number(v) == term:
        yield names


def _bound(names: Captures, name: str, what: Any) -> Iterator[Captures]:
    if name not in names:
        yield {**names, name: what}
    elif names[name] == what:
        yield names


@dataclass(frozen=True)
class _Named(Pattern):
    inner: Term
    name: str

    def matches(self, graph: Graph, v: Value, names: Captures) -> Iterator[Captures]:
        for found in matches(self.inner, graph, v, names):
            yield from _bound(found, self.name, v)


@dataclass(frozen=True)
class AnyOf(Pattern):
    """One of several patterns, the first that fits."""

    options: tuple[Term, ...]

    def matches(self, graph: Graph, v: Value, names: Captures) -> Iterator[Captures]:
        for option in self.options:
            yield from matches(option, graph, v, names)


@dataclass(frozen=True)
class _Number(Pattern):
    name: str
    fits: Callable[[float], bool]

    def matches(self, graph: Graph, v: Value, names: Captures) -> Iterator[Captures]:
        found = graph.number(v)
        if found is not None and self.fits(found):
            yield from _bound(names, self.name, found)


@dataclass(frozen=True)
class _Through(Pattern):
    kinds: tuple[str, ...]
    inner: Term

    def matches(self, graph: Graph, v: Value, names: Captures) -> Iterator[Captures]:
        yield from matches(self.inner, graph, v, names)
        op = graph.producer(v, *self.kinds)
        if op is not None and op.inputs[0] is not None and all(graph.number(r) is not None for r in op.inputs[1:]):
            yield from self.matches(graph, op.inputs[0], names)


@dataclass(frozen=True)
class Operation(Pattern):
    """The first result of an operator of some kinds; attributes are equal, or named."""

    kinds: tuple[str, ...]
    inputs: tuple[Term, ...]
    attributes: dict[str, Any] = field(hash=False)

    def matches(self, graph: Graph, v: Value, names: Captures) -> Iterator[Captures]:
        op = graph.producer(v, *self.kinds)
        if op is not None and op.outputs[0] == v:
            yield from self.matches_operator(graph, op, names)

    def matches_operator(self, graph: Graph, op: Operator, names: Captures) -> Iterator[Captures]:
        """All ways to match an operator."""
        names = {**names}
        for key, wanted in self.attributes.items():
            there = getattr(op.op, key)
            if there != (names.setdefault(wanted, there) if isinstance(wanted, str) else wanted):
                return
        given = [*op.inputs, *[None] * (len(self.inputs) - len(op.inputs))]
        wanted = [*self.inputs, *[None] * (len(given) - len(self.inputs))]
        yield from _each(wanted, graph, given, names)
        if op.op.name in COMMUTATIVE and len(given) == 2 and given[0] != given[1]:
            yield from _each(wanted, graph, given[::-1], names)


def _each(terms: list[Term], graph: Graph, given: list[Value | None], names: Captures) -> Iterator[Captures]:
    if not terms:
        yield names
        return
    for found in matches(terms[0], graph, given[0], names):
        yield from _each(terms[1:], graph, given[1:], found)


class _Operations:
    """`op.Exp("x")` is a pattern; `op["Log", "Log1p"]("x")` of several kinds."""

    def __getitem__(self, kinds: tuple[str, ...]) -> Callable[..., Operation]:
        return lambda *inputs, **attributes: Operation(kinds, inputs, attributes)

    def __getattr__(self, kind: str) -> Callable[..., Operation]:
        return self[(kind,)]


op = _Operations()


def any_of(*options: Term) -> Pattern:
    """The first of these that fits."""
    return AnyOf(options)


def number(name: str, fits: Callable[[float], bool] = lambda c: True) -> Pattern:
    """A constant of one number, which gets a name."""
    return _Number(name, fits)


def through(kinds: tuple[str, ...], inner: Term) -> Pattern:
    """A pattern behind any number of operators of these kinds, whose other operands are numbers."""
    return _Through(kinds, inner)


@dataclass(frozen=True)
class Match:
    """An operator that a pattern fits; names of the pattern are attributes.  `b` takes what replaces it."""

    graph: Graph
    b: Builder
    op: Operator
    names: Captures

    def __getattr__(self, name: str) -> Any:
        try:
            return self.names[name]
        except KeyError:
            raise AttributeError(name) from None


def match(pattern: Term, graph: Graph, v: Value | None, **names: Any) -> Captures | None:
    """What the names of a pattern stand for, where a value fits; None where it does not.  `names`: known before."""
    return next(matches(pattern, graph, v, names), None)
