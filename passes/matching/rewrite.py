"""Rewriting of a block: what a search finds takes the place of operators, and what nothing reads any more goes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ..cleanup.dead_code import prune
from .graph import Graph, NoMatchError, result
from .pattern import Match, Pattern, match


class Found(NamedTuple):
    """An operator, and those that take its place."""

    op: Operator
    operators: Sequence[Operator]


class Search:
    """Goes through the operators of some kinds and roles, in order; a subclass says what each is part of."""

    kinds: ClassVar[Collection[str]] = ()
    roles: ClassVar[tuple[Role, ...]] = (Role.FORWARD,)

    def __init__(self, graph: Graph) -> None:
        self.graph, self.block = graph, graph.block
        #: by the names of the results of the operators that they replace
        self.found: dict[str, Sequence[Operator]] = {}
        #: notes on operators
        self.notes: list[str] = []

    @cached_property
    def b(self) -> Builder:
        """Takes what replaces operators."""
        return Builder.on(self.block)

    def at(self, op: Operator) -> Found:
        """The match around an operator, and its replacement.  NoMatchError, with the reason, without a match."""
        raise NotImplementedError

    def note(self, op: Operator, found: Found | NoMatchError) -> str:
        """A note on an operator for users; "": none."""
        return ""

    def run(self) -> bool:
        """Looks at all; whether anything was found."""
        for op in self.block.operators:
            if op.op.name not in self.kinds or op.role not in self.roles:
                continue
            self.b.operators = []
            rewrite: Found | NoMatchError
            try:
                rewrite = self.at(op)
                self.found[result(rewrite.op).name] = rewrite.operators
            except NoMatchError as e:
                rewrite = e
            self.notes.append(self.note(op, rewrite))
        return bool(self.found)

    def emitted(self, op: Operator, made: Value, role: Role | None = None) -> Found:
        """The emitted operators in place of `op`; their last value, `made`, gets the name of its result."""
        out = result(op)
        if made.type != out.type:
            raise NoMatchError(f"it would be {made.type}, not {out.type}")
        return Found(op, [replace(o, role=role or op.role).renamed({made.name: out.name}) for o in self.b.operators])

    def operators(self) -> list[Operator]:
        """The block's operators with those found in their places."""
        return [n for o in self.block.operators for n in self.found.get(next((v.name for v in o.writes()), ""), (o,))]

    def rewritten(self) -> Block:
        """The block with what was found, without what is of no use then; itself where nothing was."""
        if not self.run():
            return self.block
        operators = prune(self.operators(), self.block.outputs, self.roles)
        return self.block.with_operators(operators, constants=(*self.block.constants, *self.b.constants))


@dataclass(frozen=True)
class Rule:
    """A pattern, and what emits its replacement: the last value, or None where it is to stay."""

    pattern: Pattern
    make: Callable[[Match], Value | None]


class _Rules(Search):
    """Takes the first rule that fits an operator; later ones see what took its place."""

    def __init__(self, block: Block, rules: Sequence[Rule]) -> None:
        super().__init__(Graph(block))
        self.rules: dict[str, list[Rule]] = {}
        for rule in rules:
            for kind in dict.fromkeys(rule.pattern.kinds):
                self.rules.setdefault(kind, []).append(rule)
        self.kinds = self.rules.keys()  # type: ignore[misc]

    def at(self, op: Operator) -> Found:
        out = result(op)
        for rule in self.rules[op.op.name]:
            names = match(rule.pattern, self.graph, out)
            if names is None:
                continue
            self.b.operators, self.b.prefix = [], out.name
            output = rule.make(Match(self.graph, self.b, op, names))
            if output is not None and output.type == out.type:
                rewrite = self.emitted(op, output)
                self.graph.replace(rewrite.operators)
                return rewrite
        raise NoMatchError


def rewritten(block: Block, rules: Sequence[Rule]) -> Block:
    """The block with the first rule that fits applied to each operator of the forward pass, in order.

    Every value keeps its name, and what is not read any more stays for `dead-code`; the block itself if nothing fits.
    """
    search = _Rules(block, rules)
    if not search.run():
        return block
    return block.with_operators(search.operators(), constants=(*block.constants, *search.b.constants))
