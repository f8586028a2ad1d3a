"""Verification of memory plans: every read must see the bytes that were last written to its value."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping

from ..errors import VerifyError
from .ir import Block, Free, Operator, Value
from .text import show_name
from .types import MAX_BYTES

#: alignment of values in the arena in bytes: a cache line, and the widest vector register
ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """Bytes rounded up to the arena's alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def check_addresses(block: Block) -> tuple[int, str] | None:
    """(operator's index, description) of the first fault of a planned block; None if there is none.

    Every value of a step has an address, a non-negative multiple of ALIGNMENT; persistent values, which are arrays of
    the program, have none.

    The arena is a map from ranges of bytes to the value that wrote them last.  A view (`Op.views`) at its offset in its
    input's buffer writes nothing, nor does a Concat whose inputs are in place (`Op.joins`); other operators may overlap
    an input only as `Op.inplace` permits.  Values in host memory have addresses in a separate arena.
    """
    spaces = (False, True) if any(op.op.copies for op in block.operators) else (False,)
    try:
        _check_places(block)
        for host in spaces:
            _Walk(block, host).run()
    except _Fault as e:
        return e.at, str(e)
    return None


class _Fault(VerifyError):
    def __init__(self, at: int, why: str) -> None:
        super().__init__(why)
        self.at = at


def _check_places(block: Block) -> None:
    """_Fault if a value lacks an address, or has one that it must not have."""
    places, persistent = block.addresses, {v.name for v in block.persistent()}
    for v in block.inputs:
        _check_place(v, places, -1)
    for at, op in enumerate(block.operators):
        for value in (*op.writes(), *op.scratch):
            if value.name not in persistent:
                _check_place(value, places, at)
    for name in places:
        if name in persistent:
            raise _Fault(-1, f"{show_name(name)} is persistent: it is an array of the program, without an address")
    if len(places) > len(block.values()) - len(persistent):
        unknown = sorted(set(places) - set(block.values()))
        raise _Fault(-1, f"there is an address for {show_name(unknown[0])}, but no such value")


def _check_place(v: Value, places: Mapping[str, int], at: int) -> None:
    place = places.get(v.name)
    if place is None:
        raise _Fault(at, f"{show_name(v.name)} has no address in a program whose memory is planned")
    if type(place) is not int or not 0 <= place < MAX_BYTES or place % ALIGNMENT:
        raise _Fault(at, f"{show_name(v.name)} lies at {place}: addresses are multiples of {ALIGNMENT} from 0 on")


class _Walk:
    def __init__(self, block: Block, host: bool) -> None:
        self.block, self.host = block, host
        self.at = -1
        self.starts: list[int] = []  # disjoint ranges, sorted
        self.ends: list[int] = []
        self.writers: list[str] = []
        self.ranges: dict[str, tuple[int, int] | None] = {}
        #: value → its ranges, with the name that wrote each
        self.holds: dict[str, list[tuple[int, int, str]]] = {}

    def range_of(self, v: Value | None) -> tuple[int, int] | None:
        """The range of a value in the arena; None for persistent, absent and empty ones, and those of another arena."""
        if v is None:
            return None
        name = v.name
        if name not in self.ranges:
            size, at = v.nbytes, self.block.addresses.get(name)
            self.ranges[name] = (at, at + size) if at is not None and size and v.type.host is self.host else None
        return self.ranges[name]

    def run(self) -> None:
        for v in self.block.inputs:
            self.write(v)
        for self.at, op in enumerate(self.block.operators):  # noqa: B020
            if not isinstance(op.op, Free):
                self.step(op)
        self.at = -1
        for name in self.block.outputs:
            self.read(name)

    def step(self, op: Operator) -> None:
        for x in op.inputs:
            if x is not None:
                self.read(x.name)
        if self.is_joined(op):
            return
        views = op.views()
        given = [self.range_of(x) for x in op.inputs]
        written: list[Value] = []
        for i, v in enumerate(op.outputs):
            if v is None or (i < len(views) and self.is_view(op, v, views[i])):
                continue
            if views and op.op.copies and self.range_of(v) is not None:
                raise _Fault(self.at, f"{op.op.name} moves nothing: {show_name(v.name)} must lie where its input does")
            self.check_overlap(op, i, v, given)
            written.append(v)
        self.check_apart([*written, *op.scratch], op)
        for value in (*op.scratch, *written):
            self.write(value)

    def is_view(self, op: Operator, v: Value, offset: int | None) -> bool:
        """Whether an output is at the address where its elements already are."""
        base, here = self.range_of(op.inputs[0] if op.inputs else None), self.range_of(v)
        if offset is None or base is None or here is None or here[0] != base[0] + offset:
            return False
        assert op.inputs[0] is not None
        held = self.holds[op.inputs[0].name]
        self.holds[v.name] = [(max(a, here[0]), min(b, here[1]), w) for a, b, w in held if a < here[1] and here[0] < b]
        return True

    def is_joined(self, op: Operator) -> bool:
        """Whether all inputs are already in place in the first output."""
        offsets = op.joins()
        whole = self.range_of(op.outputs[0] if op.outputs else None)
        if not offsets or whole is None:
            return False
        held: list[tuple[int, int, str]] = []
        for v, offset in zip(op.inputs, offsets, strict=True):
            here = self.range_of(v)
            if v is None or offset is None or (here is None and v.nbytes):
                return False
            if here is not None and here[0] != whole[0] + offset:
                return False
            held += self.holds.get(v.name, [])
        assert op.outputs[0] is not None
        self.holds[op.outputs[0].name] = held
        return True

    def check_overlap(self, op: Operator, i: int, v: Value, given: list[tuple[int, int] | None]) -> None:
        """Checks that an output overlaps only an input (their ranges: `given`) as the operator permits, exactly."""
        here = self.range_of(v)
        if here is None:
            return
        updated = op.op.updates[i] if i < len(op.op.updates) else -1
        for k, (x, there) in enumerate(zip(op.inputs, given, strict=True)):
            in_place = updated == k
            if in_place and x is not None and there != here:
                raise _Fault(self.at, f"{show_name(v.name)} is not where {show_name(x.name)} is, which it updates")
            if x is None or there is None or there[1] <= here[0] or here[1] <= there[0] or in_place:
                continue
            allowed = k in op.op.overwrites(i) and there == here and x.type == v.type
            if not allowed:
                names = f"{show_name(v.name)} at {here[0]}..{here[1]} overlaps its input {show_name(x.name)}"
                raise _Fault(self.at, names)

    def check_apart(self, written: list[Value], op: Operator) -> None:
        """Checks that outputs and scratch do not overlap each other, and scratch no input."""
        if len(written) < 2 and not op.scratch:
            return
        placed = sorted((r, v.name) for v in written if (r := self.range_of(v)) is not None)
        for (a, one), (b, other) in itertools.pairwise(placed):
            if b[0] < a[1]:
                raise _Fault(self.at, f"{show_name(other)} at {b[0]}..{b[1]} overlaps {show_name(one)}")
        for s in op.scratch:
            here = self.range_of(s)
            for x in op.reads():
                there = self.range_of(x)
                if here and there and here[0] < there[1] and there[0] < here[1]:
                    raise _Fault(self.at, f"scratch {show_name(s.name)} overlaps input {show_name(x.name)}")

    def overlapping(self, start: int, end: int) -> Iterator[int]:
        i = max(bisect.bisect_right(self.starts, start) - 1, 0)
        while i < len(self.starts) and self.starts[i] < end:
            if self.ends[i] > start:
                yield i
            i += 1

    def write(self, v: Value) -> None:
        """Records that `v` has written its bytes."""
        here = self.range_of(v)
        if here is None:
            return
        start, end = here
        hit = list(self.overlapping(start, end))
        pieces = [(start, end, v.name)]
        if hit:
            first, last = hit[0], hit[-1]
            if self.starts[first] < start:
                pieces.insert(0, (self.starts[first], start, self.writers[first]))
            if self.ends[last] > end:
                pieces.append((end, self.ends[last], self.writers[last]))
            cut = slice(first, last + 1)
        else:
            i = bisect.bisect(self.starts, start)
            cut = slice(i, i)
        self.starts[cut], self.ends[cut], self.writers[cut] = (list(x) for x in zip(*pieces, strict=True))
        self.holds[v.name] = [(start, end, v.name)]

    def read(self, name: str) -> None:
        """Checks that every range of a value still holds what was written for it."""
        for start, end, writer in self.holds.get(name, ()):
            at = bisect.bisect_right(self.starts, start) - 1
            if at >= 0 and self.ends[at] >= end and self.writers[at] == writer:
                continue  # as of nearly all
            for i in self.overlapping(start, end):
                if self.writers[i] != writer:
                    other = show_name(self.writers[i])
                    where = f"its bytes at {start}..{end} were overwritten by {other}"
                    raise _Fault(self.at, f"{show_name(name)} is read, but {where}")
