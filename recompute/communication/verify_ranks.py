"""The verifier of all ranks' programs: collectives match on all members, and there is no deadlock.

Only communications and waits count (events.py).  Ranks whose programs have the same events, and whose groups are made
up of such ranks in the same order, go through the same at the same time: they are one class, and one rank stands for
all.  So 1,024 ranks of data parallelism are one class, and a pipeline has one class a stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from ..errors import UsageError, VerifyError
from ..language.ir import Block
from ..language.verify import verify
from ..ops.communication.messages import Message
from .events import Event, check_mesh, digest, events
from .matching import Begun, Matcher, Places, run_together
from .mesh import Mesh


def verify_ranks(blocks: Sequence[Block], mesh: Mesh) -> int:
    """Checks the programs of all ranks, `blocks[rank]`; returns the number of classes of ranks that were found.

    Each block is verified.  VerifyError with ranks, operators and reason if communications do not match (operator,
    axis, number, order, root, peer, type and shape), or if ranks would wait for each other for ever.
    """
    if len(blocks) != mesh.ranks:
        raise UsageError(f"the mesh {mesh} has {mesh.ranks} ranks, but there are {len(blocks)} programs")
    return verify_events(_programs(blocks, mesh), mesh)


def verify_events(programs: Sequence[tuple[str, Sequence[Event]]], mesh: Mesh) -> int:
    """`verify_ranks` for what other ranks see of the programs: the digest and the events of each rank."""
    _check_channels(programs)
    classes = classes_of(programs, mesh)
    matcher = Matcher(places_of(classes, mesh))
    first = first_of(classes)
    run_together(matcher, {c: _steps(matcher, c, programs[rank][1]) for c, rank in enumerate(first)})
    return len(first)


def first_of(classes: Sequence[int]) -> list[int]:
    """The first rank of each class, given the class of each rank (classes are numbered in order of appearance)."""
    first: dict[int, int] = {}
    for rank, c in enumerate(classes):
        first.setdefault(c, rank)
    return list(first.values())


def places_of(classes: Sequence[int], mesh: Mesh) -> Places:
    """Where classes are, by the first rank of each."""
    first = first_of(classes)
    groups: dict[tuple[int, str], tuple[int, ...]] = {}

    def group(c: int, axis: str) -> tuple[int, ...]:
        if (c, axis) not in groups:
            groups[c, axis] = tuple(classes[r] for r in mesh.group(first[c], axis))
        return groups[c, axis]

    return Places(group, lambda c, axis: mesh.coordinate(first[c], axis), first.__getitem__)


def _programs(blocks: Sequence[Block], mesh: Mesh) -> list[tuple[str, tuple[Event, ...]]]:
    """The digest and the events of each rank's program; those of the same block are made once."""
    traces: dict[int, tuple[str, tuple[Event, ...]]] = {}
    for rank, block in enumerate(blocks):
        if id(block) not in traces:
            trace = events(verify(block))
            check_mesh(trace, mesh, rank)
            traces[id(block)] = digest(trace), trace
    return [traces[id(block)] for block in blocks]


def _check_channels(programs: Sequence[tuple[str, Sequence[Event]]]) -> None:
    """VerifyError if a channel has both collectives and messages, or is along different axes on different ranks."""
    channels: dict[str, tuple[str, bool, int, Event]] = {}
    checked: set[str] = set()
    for rank, (name, trace) in enumerate(programs):
        for e in () if name in checked else trace:
            if e.op is None:
                continue
            use = e.op.axis, isinstance(e.op, Message), rank, e
            other = channels.setdefault(e.op.queue, use)
            if other[:2] != use[:2] and other[3].op is not None:
                raise VerifyError(
                    f"channel '{e.op.queue}': rank {other[2]} has {other[3].op.name} along axis '{other[0]}' "
                    f"(operator {other[3].at}), rank {rank} has {e.op.name} along '{e.op.axis}' (operator {e.at}); a "
                    "channel has one axis, and either messages or collectives: give one of them another channel"
                )
        checked.add(name)


def classes_of(programs: Sequence[tuple[str, Sequence[Event]]], mesh: Mesh) -> list[int]:
    """The class of each rank, refined until the ranks of a class have groups of the same classes in the same order.

    Along an axis with messages, which name a coordinate, ranks of a class have the same coordinate.
    """
    distinct = dict(programs).values()
    ops = [e.op for classes in distinct for e in classes if e.op is not None]
    axes = sorted({op.axis for op in ops})
    messages = sorted({op.axis for op in ops if isinstance(op, Message)})
    keys: list[Hashable] = [
        (name, *(mesh.coordinate(rank, axis) for axis in messages)) for rank, (name, _) in enumerate(programs)
    ]
    classes, count = _numbered(keys)
    groups = {axis: mesh.groups(axis) for axis in axes}
    while True:
        rows: list[list[Hashable]] = [[c] for c in classes]
        for axis in axes:
            numbers: dict[tuple[int, ...], int] = {}
            for members in groups[axis]:
                of_group = numbers.setdefault(tuple(classes[r] for r in members), len(numbers))
                for r in members:
                    rows[r].append(of_group)
        classes, more = _numbered([tuple(row) for row in rows])
        if more == count:
            return classes
        count = more


def _numbered(keys: Sequence[Hashable]) -> tuple[list[int], int]:
    """Numbers for keys, in order of appearance, and how many there are."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys], len(numbers)


def _steps(matcher: Matcher, actor: int, found: Sequence[Event]) -> Iterator[Begun]:
    """Runs a class's events: begins its communications, and yields those that it waits for."""
    begun: dict[int, Begun] = {}
    for place, e in enumerate(found):
        if e.op is None:
            yield begun[e.waits]
        else:
            begun[place] = Begun(actor, e.op, e.at, e.types)
            matcher.begin(begun[place])
