"""Which waiting values a permission can replace, with what, and what that saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import UsageError, nearest
from ...language.ir import Block, Operator, Value
from ...language.types import TensorType
from .base import Approximation, parse_approximation
from .edits import Edits
from .step import Leaf, Step

#: a value that is smaller waits as it is
_SMALL = 4 << 10
#: the separator between the kinds of a choice
_AND = "+"


@dataclass(frozen=True)
class Choice:
    """Approximations that let one value go: text VALUE=KIND:SETTINGS, several kinds joined by "+"."""

    value: str
    kinds: tuple[Approximation, ...]

    def __str__(self) -> str:
        return f"{self.value}={_AND.join(map(str, self.kinds))}"


def parse_choice(text: str) -> Choice:
    """The opposite of `str`.  UsageError for other texts."""
    value, equals, kinds = text.rpartition("=")
    if not equals or not value:
        raise UsageError(f"'{text}' is no approximation of a value: give VALUE=KIND:SETTINGS, such as x=store:8")
    return Choice(value, tuple(parse_approximation(k) for k in kinds.split(_AND)))


@dataclass(frozen=True)
class Candidate:
    """A choice for a waiting value; `saved`: bytes that need not wait."""

    choice: Choice
    value: Value
    leaves: tuple[Leaf, ...]
    saved: int

    def added(self, step: Step) -> tuple[list[Operator], list[Operator]]:
        """The operators that it adds, and those whose place they take."""
        edits = Edits(step)
        write(step, self, edits)
        return edits.changes()


def candidates(step: Step, permitted: Sequence[Approximation]) -> Iterator[Candidate]:
    """The ways to let each waiting value go, in order of production."""
    for value in step.waiting():
        if value.nbytes < _SMALL:
            continue
        leaves = tuple(step.leaves(value))
        for kinds in _ways(step, value, leaves, permitted):
            saved = value.nbytes - _kept_bytes(step, value, leaves, kinds)
            if saved > 0:
                yield Candidate(Choice(value.name, kinds), value, leaves, saved)


def _ways(
    step: Step, value: Value, leaves: Sequence[Leaf], permitted: Sequence[Approximation]
) -> Iterator[tuple[Approximation, ...]]:
    """Sets of kinds that serve all readers: one for each reader, or one that keeps the whole value in another form."""
    if not leaves:
        return
    needed: dict[Approximation, None] = {}
    for leaf in leaves:
        operators = _serving(step, leaf, permitted)
        if operators is None:
            needed.clear()
            break
        needed[operators[0]] = None
    if needed:
        yield tuple(needed)
    for a in permitted:
        if a.whole and step.is_activation(value) and a.form(value) is not None:
            yield (a,)


def _serving(step: Step, leaf: Leaf, kinds: Sequence[Approximation]) -> tuple[Approximation, TensorType] | None:
    """The first kind that serves a reader, and what it keeps; None where none does."""
    return next(((a, t) for a in kinds if not a.whole and (t := a.keeps(step, leaf)) is not None), None)


def _kept_bytes(step: Step, value: Value, leaves: Sequence[Leaf], kinds: Sequence[Approximation]) -> int:
    if kinds[0].whole:
        return sum(t.nbytes for t in kinds[0].form(value) or ())
    sizes: dict[tuple[str, str], int] = {}
    for leaf in leaves:
        if (serving := _serving(step, leaf, kinds)) is not None:
            sizes[leaf.origin.name, serving[0].name] = serving[1].nbytes
    return sum(sizes.values())


def write(step: Step, candidate: Candidate, edits: Edits) -> None:
    """Carries a candidate out.  UsageError where another one has replaced one of its readers."""
    if any(leaf.at in edits.replaced for leaf in candidate.leaves):
        raise UsageError(f"'{candidate.choice}': another approximation has replaced an operator that reads this value")
    kinds = candidate.choice.kinds
    if kinds[0].whole:
        kinds[0].store(step, candidate.value, edits)
        return
    for leaf in candidate.leaves:
        serving = _serving(step, leaf, kinds)
        assert serving is not None, "a candidate serves all of its readers"
        serving[0].replace(step, leaf, edits)


def best(step: Step, permitted: Sequence[Approximation], worth: Callable[[Candidate], float]) -> list[Candidate]:
    """For each waiting value the candidate of most worth; those that can be made together."""
    result: dict[str, tuple[float, Candidate]] = {}
    for c in candidates(step, permitted):
        w = worth(c)
        if c.value.name not in result or w > result[c.value.name][0]:
            result[c.value.name] = w, c
    return compatible([c for _, c in result.values()])


def compatible(found: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that can be made together, of those for different values; earlier ones come before later ones."""
    replaced: set[int] = set()
    reading: set[int] = set()
    together: list[Candidate] = []
    for c in found:
        at = {leaf.at for leaf in c.leaves}
        if replaced.isdisjoint(at) and (c.choice.kinds[0].whole or reading.isdisjoint(at)):
            (reading if c.choice.kinds[0].whole else replaced).update(at)
            together.append(c)
    return together


def named(step: Step, choices: Sequence[Choice]) -> Iterator[Candidate]:
    """The candidates that choices name.  UsageError for names and kinds that do not fit the step."""
    values = step.block.values()
    for choice in choices:
        if choice.value not in values:
            raise UsageError(f"there is no value '{choice.value}' to approximate{nearest(choice.value, values)}")
        value = values[choice.value]
        leaves = tuple(step.leaves(value))
        if choice.kinds not in list(_ways(step, value, leaves, choice.kinds)):
            raise UsageError(
                f"'{choice}': no such value waits for the backward pass, or not all of its readers can do with this"
            )
        saved = value.nbytes - _kept_bytes(step, value, leaves, choice.kinds)
        yield Candidate(choice, value, leaves, saved)


def step_of(block: Block) -> Step:
    """A block's step, for choices.  UsageError where it is no training step."""
    step = Step(block)
    if step.counter is None:
        raise UsageError("approximations are for training steps: call minimize first")
    return step
