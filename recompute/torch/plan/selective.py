"""Selective checkpoints of a module's blocks: what each saves, chosen by a knapsack and counted by steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import BudgetError, ModelWarning, UsageError
from .eager_step import RANDOM_STATE, Copied, Step, Watched, priced, storages_of, written
from .joint import is_mutable, is_random
from .scratch import Call

if TYPE_CHECKING:
    from torch.nn import Module

#: how often a choice is corrected by the peak that its step has
_ROUNDS = 8
#: a choice whose peak is above this share of the budget is not improved
_CLOSE = 0.995


@dataclass(frozen=True)
class Operator:
    """An operator of a block, in the order in which it runs: `bytes` that saving it keeps, `seconds` it takes again.

    `why`: the reason why it is never saved ("" where it may be).  `kept`: its result leaves the
    block, and is there anyway.
    """

    name: str
    bytes: int
    seconds: float
    why: str = ""
    kept: bool = False


@dataclass(frozen=True)
class Region:
    """A block: `operators` as they run in its forward pass, and numbers of those that are `saved`.

    `wrapped`: whether it is checkpointed at all.
    """

    name: str
    operators: tuple[Operator, ...]
    saved: frozenset[int] = frozenset()
    wrapped: bool = True

    @property
    def again(self) -> float:
        """Seconds that its checkpoint runs again."""
        return sum(o.seconds for i, o in enumerate(self.operators) if i not in self.saved) if self.wrapped else 0.0


def contexts(region: Region, warned: set[str]) -> tuple[Any, Any]:
    """The contexts of one call of a block: PyTorch's, which save the operators that the region names.

    A ModelWarning says once (by `warned`) that operators or sizes are others than those that were planned.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    at = -1

    def warn(kind: str, text: str) -> None:
        if kind not in warned:
            warned.add(kind)
            text = f"policy: block '{region.name}': {text}: the peak that was said does not hold"
            warnings.warn(text, ModelWarning, stacklevel=4)

    def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal at
        at += 1
        if at >= len(region.operators) or region.operators[at].name != str(op):
            warn("operators", f"operator {at} is {op}, not the one that was planned")
            return CheckpointPolicy.PREFER_RECOMPUTE
        if at not in region.saved:
            return CheckpointPolicy.PREFER_RECOMPUTE
        size = sum(s.nbytes() for s in storages_of(ctx.op_output))
        if size > region.operators[at].bytes:
            warn("sizes", f"{op} has {size:,} bytes, not {region.operators[at].bytes:,} as planned")
        return CheckpointPolicy.MUST_SAVE

    return asked_once(choose)


class _Again:
    """The context of a run again, which starts from the first operator each time that it is entered."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.at = inner, 0

    def __enter__(self) -> Any:
        self.at = 0
        return self.inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self.inner.__exit__(*error)


def asked_once(choose: Callable[..., Any]) -> tuple[Any, Any]:
    """PyTorch's contexts for a policy that answers in the first run only.

    Until 2.12 PyTorch asks again when operators run again: then it gets the answers of the first run, in their order.
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    answers: list[Any] = []

    def answer(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if not ctx.is_recompute:
            answers.append(choose(ctx, op, *args, **kwargs))
            return answers[-1]
        again.at += 1
        return answers[again.at - 1] if again.at <= len(answers) else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(answer)
    again = _Again(second)
    return first, again


def wrap(module: Module, name: str, context_fn: Callable) -> None:
    """Puts a block into PyTorch's checkpoint wrapper, in place."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    parent, _, attribute = name.rpartition(".")
    owner = module.get_submodule(parent)
    setattr(
        owner,
        attribute,
        checkpoint_wrapper(owner.get_submodule(attribute), context_fn=context_fn, preserve_rng_state=True),
    )


@contextlib.contextmanager
def wrapped(module: Module, blocks: dict[str, Callable]) -> Iterator[None]:
    """Within it, the named blocks are checkpointed with contexts of these functions."""
    before = {name: module.get_submodule(name) for name in blocks}
    for name, context_fn in blocks.items():
        wrap(module, name, context_fn)
    try:
        yield
    finally:
        for name, block in before.items():
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, block)


@dataclass
class Read:
    """Measurements of a block while it runs: its operators, and bytes that it leaves behind, plain and wrapped."""

    name: str
    operators: list[Operator] = field(default_factory=list)
    owner: dict[int, int] = field(default_factory=dict)
    runs: int = 0
    again: int = 0
    plain: int = 0
    wrapped: int = 0


@dataclass
class Search:
    """Steps of a copied module with some of its blocks checkpointed, and the choice of what these save."""

    copied: Copied
    loss: Callable[[Any], Any]
    names: tuple[str, ...]
    measure: bool
    blocks: dict[str, Read] = field(default_factory=dict)

    def plain(self) -> Step:
        """The step without checkpoints.  UsageError for blocks that do not run once, and for what cannot run."""
        self.blocks = {name: Read(name) for name in self.names}
        step = self._run({}, "plain")
        for b in self.blocks.values():
            if b.runs != 1:
                raise UsageError(f"policy: block '{b.name}' runs {b.runs} times in a step; once is needed")
        return step

    def read(self) -> tuple[tuple[Region, ...], Step]:
        """The blocks in the order in which they run, and the step in which each is checkpointed and saves nothing."""
        order: list[str] = []

        def begun(name: str) -> tuple[Any, Any]:
            order.append(name)
            return self._recording(name)

        makers: dict[str, Callable] = {n: functools.partial(begun, n) for n in self.names}
        step = self._run(makers, "wrapped")
        return tuple(Region(n, tuple(self._final(self.blocks[n]))) for n in order), step

    def within(
        self, regions: tuple[Region, ...], empty: Step, limit: int, every: bool
    ) -> tuple[tuple[Region, ...], int]:
        """Regions with what they save, and the step's peak, at most `limit`.  BudgetError if there are none."""
        phases = empty.peaks(self.measure)
        target, best, lowest = limit, None, max(phases.values())
        if lowest <= limit:
            best = regions, lowest
        for _ in range(_ROUNDS):
            chosen = self._choose(regions, phases, target, every)
            if chosen is None:
                break
            peak = max(self.judged(chosen).values())
            lowest = min(lowest, peak)
            if peak <= limit and (best is None or _again(chosen) < _again(best[0])):
                best = chosen, peak
            if _CLOSE * limit <= peak <= limit:
                break
            target += limit - peak
        if best is None:
            raise BudgetError(
                f"policy: no choice of operators was found within {limit:,} bytes: the lowest peak found is "
                f"{lowest:,}. Give a larger budget, or a smaller batch"
            )
        return best

    def judged(self, regions: Sequence[Region]) -> dict[str, int]:
        """Peaks of the step's phases when the regions save what they say."""
        makers = {r.name: lambda r=r: self._watching(r.name, contexts(r, set())) for r in regions if r.wrapped}
        return self._run(makers).peaks(self.measure)

    def _choose(
        self, regions: tuple[Region, ...], phases: dict[str, int], target: int, every: bool
    ) -> tuple[Region, ...] | None:
        """The choice with the least seconds, by the peaks of the phases of the step that saves nothing."""
        choices = [
            chosen
            for count in ([0] if every else range(len(regions) + 1))
            if (chosen := self._filled(regions, phases, target, len(regions) - count))
        ]
        return min(choices, key=_again, default=None)

    def _filled(
        self, regions: tuple[Region, ...], phases: dict[str, int], target: int, first_open: int
    ) -> tuple[Region, ...] | None:
        """Blocks from `first_open` on are left as they are; those before save what wins the most seconds per byte."""
        slack = [target - phases[""], *(target - phases.get(r.name, 0) for r in regions)]

        def room(i: int) -> int:
            later = slack[i + 2 : first_open + 1]
            return min(slack[0], *later) if later else slack[0]

        def take(i: int, size: int) -> None:
            for j in (0, *range(i + 2, first_open + 1)):
                slack[j] -= size

        for i in range(first_open, len(regions)):
            block = self.blocks[regions[i].name]
            take(i, block.plain - block.wrapped)
        if min(slack[: first_open + 1]) < 0:
            return None
        saved: list[set[int]] = [set() for _ in regions]
        items = [
            (o.seconds / max(1, 0 if o.kept else o.bytes), i, j)
            for i, r in enumerate(regions[:first_open])
            for j, o in enumerate(r.operators)
            if not o.why and o.seconds
        ]
        for _, i, j in sorted(items, key=lambda item: (-item[0], -item[1], item[2])):
            o = regions[i].operators[j]
            size = 0 if o.kept else o.bytes
            if size <= room(i):
                take(i, size)
                saved[i].add(j)
        return tuple(
            dataclasses.replace(r, saved=frozenset(saved[i]), wrapped=i < first_open) for i, r in enumerate(regions)
        )

    def _run(self, makers: dict[str, Callable], watch: str = "") -> Step:
        @contextlib.contextmanager
        def before(watched: Watched) -> Iterator[None]:
            self.watched = watched
            watched.step.beside = RANDOM_STATE * (len(makers) + 1)
            module = self.copied.module
            hooks = [h for n in self.names for h in self._hooks(module.get_submodule(n), n, watch)]
            try:
                with wrapped(module, makers):
                    yield
            finally:
                for h in hooks:
                    h.remove()

        try:
            return self.copied.step(self.loss, before)
        except RuntimeError as e:
            raise UsageError(f"policy: the step does not run with checkpoints: {e}") from e

    def _hooks(self, block: Module, name: str, watch: str) -> list[Any]:
        """Counts runs of a block in the plain step, and what it leaves behind."""
        read = self.blocks[name]
        if not watch:
            return []

        def begin(*_: Any) -> None:
            if not self.watched.phase:
                setattr(read, watch, getattr(read, watch) - self.watched.alive)

        def end(module: Any, args: Any, out: Any) -> None:
            if not self.watched.phase:
                setattr(read, watch, getattr(read, watch) + self.watched.alive)
            read.runs += watch == "plain"
            for storage in storages_of(out):
                at = read.owner.get(storage._cdata)
                if at is not None and not self.watched.phase:
                    read.operators[at] = dataclasses.replace(read.operators[at], kept=True)

        return [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]

    def _recording(self, name: str) -> tuple[Any, Any]:
        from torch.utils.checkpoint import CheckpointPolicy

        def record(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            self._record(self.blocks[name], Call(op, args, kwargs, ctx.op_output))
            return CheckpointPolicy.PREFER_RECOMPUTE

        return self._watching(name, asked_once(record))

    def _watching(self, name: str, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """The pair of contexts; the second one begins a phase, and counts operators that run again."""

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            self.watched.phase = name
            before = self.watched.ran
            try:
                with pair[1]:
                    yield
            finally:
                self.blocks[name].again = self.watched.ran - before

        return pair[0], again()

    def _record(self, block: Read, call: Call) -> None:
        """Takes up an operator of a block.  UsageError for one that changes what the block does not own."""
        for storage in written(call):
            at = block.owner.get(storage._cdata)
            if at is None:
                raise UsageError(
                    f"policy: block '{block.name}' changes something from outside of it in place ({call.target}; batch "
                    "normalisation updates running statistics): it cannot run twice. Leave it out: blocks=[...]"
                )
            block.operators[at] = dataclasses.replace(block.operators[at], why="is changed in place")
        there = {s._cdata for s in storages_of((call.args, call.kwargs))}
        fresh = {s._cdata: s.nbytes() for s in storages_of(call.result) if s._cdata not in there}
        why = ""
        if is_random(call):
            why = "draws random numbers"
        elif is_mutable(call) or not fresh:
            why = "is a view, or in place"
        elif getattr(call.target, "_opname", "") == "_to_copy":
            why = "is a cast, which autocast may do in one run only"
        block.owner.update(dict.fromkeys(fresh, len(block.operators)))
        seconds = priced(call, self.copied.machine)
        block.operators.append(Operator(str(call.target), sum(fresh.values()), seconds, why))

    def _final(self, block: Read) -> list[Operator]:
        """Operators after the last one that runs again need no time."""
        return [o if i < block.again else dataclasses.replace(o, seconds=0.0) for i, o in enumerate(block.operators)]


def _again(regions: Sequence[Region]) -> float:
    return sum(r.again for r in regions)
