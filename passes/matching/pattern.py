"""Patterns: expressions over operators, as a formula is written.

    op.Div(op.Exp("x"), op.ReduceSum(op.Exp("x"), axes="axes"))

A text names a value (or an attribute), the same one wherever it stands; a number is a constant all of whose elements
are that number; None is an operand that is absent, `...` any.  Operands of Add, Mul and the like are tried both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

from ...language.builder import Builder
from ...language.ir import Operator, Value
from ...language.types import Values
from .graph import COMMUTATIVE, Graph

Captures: TypeAlias = "dict[str, Any]"
Term: TypeAlias = "Pattern | str | float | EllipsisType | None"


@dataclass(frozen=True)
class Pattern:
    """A pattern of a value: all ways to match one under given captures, each with the captures that follow.

    `kinds`: the operators that make such a value.
    """

    ways: Callable[[Graph, Value, Captures], Iterator[Captures]]
    kinds: tuple[str, ...] = ()

    def named(self, name: str) -> Pattern:
        """The same pattern; the value gets a name."""
        return Pattern(lambda g, v, names: _each((self, name), g, (v, v), names), self.kinds)


def _ways(term: Term, graph: Graph, v: Value | None, names: Captures) -> Iterator[Captures]:
    if isinstance(term, Pattern):
        yield from term.ways(graph, v, names) if v is not None else ()
    elif isinstance(term, str) and v is not None:
        if names.get(term, v) == v:
            yield {**names, term: v}
    elif term is ... or (term is None and v is None) or (isinstance(term, (int, float)) and graph.number(v) == term):
        yield names


def _each(terms: Sequence[Term], graph: Graph, operands: Values, names: Captures) -> Iterator[Captures]:
    if not terms:
        yield names
        return
    for captures in _ways(terms[0], graph, operands[0], names):
        yield from _each(terms[1:], graph, operands[1:], captures)


class _Operations:
    """`op.Exp("x")` is a pattern, the first result of an Exp; `op["Log", "Log1p"]("x")` of several kinds."""

    def __getitem__(self, kinds: tuple[str, ...]) -> Callable[..., Pattern]:
        def pattern(*inputs: Term, **attributes: Any) -> Pattern:
            def ways(graph: Graph, v: Value, names: Captures) -> Iterator[Captures]:
                op = graph.producer(v, *kinds)
                if op is None or op.outputs[0] != v:
                    return
                names = {**names}
                for key, wanted in attributes.items():
                    there = getattr(op.op, key)
                    if there != (names.setdefault(wanted, there) if isinstance(wanted, str) else wanted):
                        return
                operands = (*op.inputs, *[None] * (len(inputs) - len(op.inputs)))
                terms = (*inputs, *[None] * (len(operands) - len(inputs)))
                yield from _each(terms, graph, operands, names)
                if op.op.name in COMMUTATIVE and operands[0] != operands[1]:
                    yield from _each(terms, graph, operands[::-1], names)

            return Pattern(ways, kinds)

        return pattern

    def __getattr__(self, kind: str) -> Callable[..., Pattern]:
        return self[(kind,)]


op = _Operations()


def any_of(*options: Term) -> Pattern:
    """The first of these that fits."""
    kinds = tuple(kind for o in options if isinstance(o, Pattern) for kind in o.kinds)
    return Pattern(lambda graph, v, names: (n for o in options for n in _ways(o, graph, v, names)), kinds)


def number(name: str, fits: Callable[[float], bool] = lambda c: True) -> Pattern:
    """A constant of one number, which gets a name."""

    def ways(graph: Graph, v: Value, names: Captures) -> Iterator[Captures]:
        c = graph.number(v)
        if c is not None and fits(c) and names.get(name, c) == c:
            yield {**names, name: c}

    return Pattern(ways)


def through(kinds: tuple[str, ...], inner: Term) -> Pattern:
    """A pattern behind any number of operators of these kinds, whose other operands are numbers."""

    def ways(graph: Graph, v: Value, names: Captures) -> Iterator[Captures]:
        yield from _ways(inner, graph, v, names)
        op = graph.producer(v, *kinds)
        if op is not None and op.inputs[0] is not None and all(graph.number(r) is not None for r in op.inputs[1:]):
            yield from ways(graph, op.inputs[0], names)

    return Pattern(ways)


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
    """The captures of a pattern if a value matches it, else None.  `names`: captures known before."""
    return next(_ways(pattern, graph, v, names), None)
