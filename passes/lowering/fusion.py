"""Fusion of element-wise operators that follow each other, or read the same values, into loops."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import UsageError
from ...language.ir import Block, Free, Operator, Role, Value
from ...ops.fused.loop import Loop, Member, iteration, loops, show_body
from ...ops.reduction.sums import Reduce
from ..base import Pass
from ..memory.liveness import Liveness
from ..memory.memory_plan import live_profile

#: operands that a loop reads and writes at most (more streams slow each other down), and operators in it
_INPUTS, _OUTPUTS, _MEMBERS = 14, 6, 48
#: how many operators are looked at while loops that take too much go one by one; then such loops go together
_LOOKS = 1 << 17


class Fusion(Pass):
    """Fuse element-wise operators over one shape, and the column sums behind them, into loops.

    An operator joins those whose results it reads, and those that read the same values, if no operator in between needs
    their results: all of them then run at the position of the last one.  Values without other readers disappear.
    `distance`: most operators between two neighbours of a loop.  A loop that would raise the peak of live bytes is not
    made.  Whether an operator can be in a loop depends on it and its types only (`ops.elementwise.loop`), so that its
    results do not depend on its neighbours.  `device`: the loops are for a GPU.
    """

    distance: int = 64
    device: bool = False

    def run(self, block: Block) -> Block:
        if any(isinstance(op.op, Free) for op in block.operators):
            raise UsageError("'fusion' must come before 'liveness'")
        while True:  # loops that move may leave two operators beside each other that were not
            before, block = block, self.once(block)
            if block is before:
                return block

    def once(self, block: Block) -> Block:
        """The block with loops that do not raise its peak; the same block if there are none."""
        walk = _Walk(block, self.distance, device=self.device)
        groups = [g for g in walk.run() if len(g.members) > 1 and walk.yielded(g)]
        n = len(block.operators)
        profile = _profile(block, range(n)) if groups else []
        most = max((live for live, _ in profile), default=0)
        looks = 0
        while groups and looks <= 4 * _LOOKS:
            fused, places = _fused(walk, groups)
            profile = _profile(fused, places)
            highest, at = max(profile, default=(0, -1))
            if highest <= most:
                return fused
            few = looks < _LOOKS  # where it does not take long, no more loops go than must
            full = [at] if few else sorted({place for live, place in profile if live > most})
            apart = [g for g in groups if not _any_between(full, g.members[0], g.members[-1])]
            groups = apart if len(apart) < len(groups) else []
            looks += n
        return block


@dataclass(eq=False)
class _Group:
    """Operators, by position, that will be one loop over `shape`."""

    shape: tuple[int, ...]
    role: Role
    members: list[int]
    #: values from outside, and results of members (by name); sums must not be read inside
    inputs: dict[str, Value]
    made: dict[str, Value]
    sums: set[str] = field(default_factory=set)


class _Walk:
    """Visits a block once; a group is open as long as no operator outside reads its results."""

    def __init__(self, block: Block, distance: int, *, device: bool = False) -> None:
        self.block, self.distance, self.device = block, distance, device
        self.readers = block.consumers()
        self.kept = set(block.outputs)
        self.persistent = {v.name for v in block.persistent()}
        #: value → the open group that makes it; value → open groups that read it
        self.maker: dict[str, _Group] = {}
        self.reading: dict[str, dict[int, _Group]] = {}
        self.done: list[_Group] = []
        self.open: dict[int, _Group] = {}

    def run(self) -> list[_Group]:
        """All groups, single operators too, in order of their last members."""
        for i, op in enumerate(self.block.operators):
            self.close_before(i - self.distance - 1)
            group = self.alone(i, op)
            makers = self.makers_of(op)
            if group is not None:
                for other in self.candidates(group, makers):
                    group = self.joined(group, other, i)
            for other in makers:
                if id(other) in self.open:
                    self.close(other)
            if op.op.updates:
                for v in op.writes():
                    for other in list(self.reading.get(v.name, {}).values()):
                        self.close(other)
            if group is not None:
                self.add(group)
        for other in list(self.open.values()):
            self.close(other)
        return sorted(self.done, key=lambda g: g.members[-1])

    def alone(self, i: int, op: Operator) -> _Group | None:
        """The operator as a group; None where it cannot be in one."""
        out = op.outputs[0] if len(op.outputs) == 1 else None
        if out is None or op.op.updates or isinstance(op.op, Loop) or op.kernel:
            return None
        if not loops(op, device=self.device):
            return None
        if out.name not in self.readers and out.name not in self.kept:
            return None
        shape = iteration(op.op, [None if v is None else v.type for v in op.inputs], [out.type])
        role = Role.BACKWARD if op.role is Role.RECOMPUTE else op.role
        members, sums = {out.name: out}, {out.name} if isinstance(op.op, Reduce) else set()
        return _Group(shape, role, [i], {v.name: v for v in op.reads()}, members, sums)

    def makers_of(self, op: Operator) -> list[_Group]:
        """Open groups whose results an operator reads."""
        groups = {id(g): g for v in op.reads() if (g := self.maker.get(v.name)) is not None}
        return list(groups.values())

    def candidates(self, group: _Group, makers: Sequence[_Group]) -> list[_Group]:
        """Open groups that a single operator might join: makers of its inputs, then other readers of large ones."""
        groups = {id(g): g for g in makers}
        for v in group.inputs.values():
            if v.shape == group.shape:
                groups.update(self.reading.get(v.name, {}))
        return list(groups.values())

    def joined(self, group: _Group, other: _Group, at: int) -> _Group:
        """Both as one, if they fit; else `group` as it is."""
        if other.shape != group.shape or other.role is not group.role or at - other.members[-1] > self.distance + 1:
            return group
        if not other.sums.isdisjoint(group.inputs) or not group.sums.isdisjoint(other.inputs):
            return group
        values = {**other.made, **group.made}
        inputs = {n: v for n, v in {**other.inputs, **group.inputs}.items() if n not in values}
        members = sorted((*other.members, *group.members))
        both = _Group(group.shape, group.role, members, inputs, values, other.sums | group.sums)
        if len(inputs) > _INPUTS or len(members) > _MEMBERS or len(self.yielded(both)) > _OUTPUTS:
            return group
        if at - other.members[-1] > 1 and not self.pays(other, at, {*group.members, *other.members}):
            return group
        self.close(other)
        self.done.pop()
        return both

    def pays(self, group: _Group, at: int, members: set[int]) -> bool:
        """Whether a group that runs at a later position keeps no more alive until then than it does not make yet."""
        between = range(group.members[-1] + 1, at)
        if all(i in members or any(o is not None for o in self.block.operators[i].views()) for i in between):
            return True
        late = sum(v.nbytes for n, v in group.made.items() if n in self.kept or self.last(n) >= at)
        held = sum(
            v.nbytes
            for n, v in group.inputs.items()
            if n not in self.persistent and n not in self.kept and self.last(n) < at
        )
        return held <= late

    def last(self, name: str) -> int:
        """The position of a value's last reader."""
        positions = self.readers.get(name)
        return positions[-1] if positions else -1

    def yielded(self, group: _Group) -> list[str]:
        """Values that operators outside of a group read, in the order of execution."""
        members = set(group.members)
        values = []
        for i in group.members:
            for v in self.block.operators[i].writes():
                if v.name in self.kept or any(r not in members for r in self.readers.get(v.name, ())):
                    values.append(v.name)
        return values

    def add(self, group: _Group) -> None:
        self.open[id(group)] = group
        self.maker.update((n, group) for n in group.made)
        for n in group.inputs:
            self.reading.setdefault(n, {})[id(group)] = group

    def close_before(self, at: int) -> None:
        """Closes groups that end before a position: nothing joins them from so far; `open` is sorted by their ends."""
        while self.open and (first := next(iter(self.open.values()))).members[-1] < at:
            self.close(first)

    def close(self, group: _Group) -> None:
        if id(group) not in self.open:
            return
        del self.open[id(group)]
        for n in group.made:
            self.maker.pop(n, None)
        for n in group.inputs:
            del self.reading[n][id(group)]
        self.done.append(group)


def _fused(walk: _Walk, groups: Sequence[_Group]) -> tuple[Block, list[int]]:
    """The block with each group at the place of its last member; for each operator the position that it came from."""
    operators = walk.block.operators
    gone = {i for g in groups for i in g.members}
    loop_at = {g.members[-1]: g for g in groups}
    result, places = [], []
    for i, op in enumerate(operators):
        if i in loop_at:
            result.append(_loop(walk, loop_at[i]))
        elif i not in gone:
            result.append(op)
        else:
            continue
        places.append(i)
    return walk.block.with_operators(result), places


def _loop(walk: _Walk, group: _Group) -> Operator:
    members = [walk.block.operators[i] for i in group.members]
    inputs = {v.name: v for op in members for v in op.reads() if v.name not in group.made}
    number = {name: i for i, name in enumerate(inputs)}
    body = []
    for op in members:
        (out,) = op.writes()
        number[out.name] = len(number)
        body.append(Member(op.op, tuple(None if v is None else number[v.name] for v in op.inputs), number[out.name]))
    names = walk.yielded(group)
    loop = Loop(body=show_body(body), yields=tuple(number[n] for n in names))
    return Operator(loop, tuple(inputs.values()), tuple(group.made[n] for n in names), group.role)


def _profile(block: Block, places: Sequence[int]) -> list[tuple[int, int]]:
    """(bytes alive while it runs, workspaces aside; the operator's place) for each operator."""
    freed = Liveness().run(block)
    bare = [dataclasses.replace(op, scratch=()) if op.scratch else op for op in freed.operators]
    live = live_profile(freed.with_operators(bare), align=64)
    return [(now, place) for (_, now), place in zip(live, places, strict=True)]


def _any_between(sorted_places: Sequence[int], first: int, last: int) -> bool:
    i = bisect.bisect_left(sorted_places, first)
    return i < len(sorted_places) and sorted_places[i] <= last
