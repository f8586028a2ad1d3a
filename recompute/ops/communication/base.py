"""Communication between the ranks of a mesh, begun by one operator and awaited by another.

    communicate %g.sum: f32[8] = AllReduce(%g) {axis="dp", ranks=4, number=3}    begins: g may be read, not freed
    ...                                                                          g.sum is not to be read yet
    communicate %g.all: f32[8] = CommWait(%g.sum, %g)                            done: g.all is g.sum's buffer
    free %g, %g.sum

Every rank runs a program of its own, and all of them may be the same text: nothing in it says which rank runs it.  The
ranks are the points of a mesh (communication/mesh.py); those that differ in their coordinate along `axis` alone form a
group of `ranks` members, and communicate.  A wait reads both ends, so that liveness keeps both buffers until then, as
for copies to the host.

* `channel` is a queue between the same ranks (by default it has the axis's name), and `number` the communication's name
  on it.  Every member begins the communications of a channel in the same order, each one once, and they are done in
  this order; those of different channels may overtake each other.
* `order` says how sums are added.  "tree": a fixed binary tree over the coordinates (`tree_sum`), each addition rounded
  to the element type, so that a number of ranks that is a power of two gives the bits of the same tree in one process.
  "library": as the library likes, for fabrics that add by themselves; then the bits depend on it.

A group of one has a meaning in one process: every collective is the identity there (a copy), and an executor runs it.
Operators over more ranks are run by all ranks together: `together` defines their numerics on the arrays of all members,
which the lock-step interpreter (communication/lockstep.py) runs.  There are no samples for the tests of the registry,
which apply one operator alone: the begin and the wait are two (tests/communication has them).

Gradients are those of the sum of all ranks' losses: what a rank's result contributes to another rank's loss is sent
back on the channel CHANNEL.grad under the same number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import UsageError
from ...language.factors import Factor, in_step
from ...language.ir import Operator
from ...language.op import Cost, FunctionWriter, Op, OperatorBuilder
from ...language.types import Operands, TensorType, Types, Value

#: how sums may be added
ORDERS = ("tree", "library")
#: more ranks than any cluster has
MAX_RANKS = 1 << 24
_NAME = re.compile(r"[A-Za-z0-9_.\-]+\Z")


@dataclass(frozen=True)
class Traffic:
    """A rank's traffic in one communication: bytes sent, and the number of messages that follow one another."""

    bytes: int
    steps: int


class Communication(Op, abstract=True):
    """Begins to communicate along `axis`.  `CommWait(result, input)` must follow before anything reads the result."""

    communicates = "begin"
    moves_data = True
    #: whether its result is a sum
    sums: ClassVar[bool] = False

    axis: str
    ranks: int
    number: int
    channel: str = ""
    order: str = "tree"

    @property
    def queue(self) -> str:
        """The channel's name."""
        return self.channel or self.axis

    def check(self, *inputs: TensorType | None) -> None:
        """TypeRuleError for attributes that cannot be, and for values in host memory."""
        if not _NAME.match(self.axis) or not _NAME.match(self.queue):
            raise self.fail("axis and channel are names of letters, digits, '_', '-' and '.'", *inputs)
        if not 1 <= self.ranks <= MAX_RANKS:
            raise self.fail(f"ranks must be from 1 to {MAX_RANKS:,}, not {self.ranks}", *inputs)
        if self.number < 0:
            raise self.fail(f"number must not be negative, but is {self.number}", *inputs)
        if self.order not in ORDERS:
            raise self.fail(f"order must be one of {', '.join(ORDERS)}, not '{self.order}'", *inputs)
        if any(t is not None and t.host for t in inputs):
            raise self.fail("a value in host memory cannot be sent: prefetch it first", *inputs)
        if self.sums and any(t is not None and t.dtype == "bool" for t in inputs):
            raise self.fail("booleans cannot be added: cast them first", *inputs)

    def blocks(self, x: TensorType) -> tuple[int, ...]:
        """The shape of one rank's part of x.  TypeRuleError if axis 0 cannot be divided by the number of ranks."""
        if not x.shape or x.shape[0] % self.ranks:
            raise self.fail(f"axis 0 cannot be divided among {self.ranks} ranks", x)
        return (x.shape[0] // self.ranks, *x.shape[1:])

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        if self.ranks != 1:
            raise UsageError(
                f"{self.name} number {self.number} on channel '{self.queue}' needs {self.ranks} ranks, and one program "
                "runs alone here: give the Executor an engine, or run all ranks together (docs/distribution.md)"
            )
        outs[0][...] = ins[0]

    def together(self, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        """The numerics: input and output of each member, in the order of their coordinates."""
        raise NotImplementedError(f"{self.name} has no numerics")

    def traffic(self, x: TensorType | None, y: TensorType) -> Traffic:
        """The traffic of a rank (of the busiest one, if they differ)."""
        raise NotImplementedError(f"{self.name} has no traffic")

    def cost(self, ins: Types, outs: Types) -> Cost:
        """Nothing: what it takes is a matter of the link and of what runs beside it (`traffic`)."""
        return Cost(0, 0)

    def axis_factors(self, ins: Any, outs: Any) -> tuple[Any, ...]:
        """Axis 0 is divided among ranks, or may be; each element along the others goes its own way."""
        return _all_but_the_first(ins, outs)

    def export(self, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
        """The identity in a group of one; ONNX has no communication."""
        if self.ranks != 1:
            raise UsageError(f"{self.name} over {self.ranks} ranks cannot be exported: ONNX has no communication")
        g.node("Identity", ins[:1], outs)
        return True

    def backward(self, b: OperatorBuilder, kind: type[Communication], grad: Value, **attributes: Any) -> Value:
        """Sends a gradient back: begins a communication of the class `kind` and waits for it."""
        op = kind(self.axis, self.ranks, self.number, f"{self.queue}.grad", self.order, **attributes)
        return b.CommWait(b.emit(op, grad), grad)


class CommWait(Op):
    """Waits for the communication that writes its first input and reads its second one (`Recv` reads none); gives the
    first, ready to be read."""

    communicates = "wait"
    moves_data = True

    def infer(self, target, source=None):
        return (target,)

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """The target's elements, if they do not lie there already."""
        if outs[0] is not ins[0]:
            outs[0][...] = ins[0]

    def views(self, ins: Sequence[TensorType], outs: Sequence[TensorType]) -> tuple[int | None, ...]:
        return (0,)

    def gradient(self, b, ins, outs, grads):
        """The gradient of the target, which the operator that began the communication sends back."""
        return [grads[0], None]

    def cost(self, ins: Any, outs: Any) -> Cost:
        return Cost(0, 0)

    def axis_factors(self, ins: Any, outs: Any) -> tuple[Any, ...]:
        """Axis 0 is divided among ranks, or may be; each element along the others goes its own way."""
        return _all_but_the_first(ins, outs)

    def export(self, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
        g.node("Identity", ins[:1], outs)
        return True


def _all_but_the_first(ins: Types, outs: Types) -> tuple[Factor, ...]:
    """Factors of a communication, and of the wait for it: alike, so that both run in the same slices."""
    if not ins or any(t is None or t.ndim < 2 or t.shape[1:] != outs[0].shape[1:] for t in ins):  # type: ignore[union-attr]
        return ()
    return in_step(ins, outs, range(1, outs[0].ndim))  # type: ignore[union-attr]


def communicated(b: OperatorBuilder, op: Communication, x: Value) -> Value:
    """The result of a communication of x, which `op` begins, after the wait for it; in a group of one x itself."""
    return x if op.ranks == 1 else b.CommWait(b.emit(op, x), x)


class Numbers:
    """The numbers of communications that are added to a program: behind those that each channel has."""

    def __init__(self, operators: Iterable[Operator]) -> None:
        self.next: dict[str, int] = {}
        for o in operators:
            if isinstance(o.op, Communication):
                self.next[o.op.queue] = max(self.next.get(o.op.queue, 0), o.op.number + 1)

    def take(self, channel: str) -> int:
        """The next number of a channel."""
        number = self.next.get(channel, 0)
        self.next[channel] = number + 1
        return number


def tree_sum(parts: Sequence[Any]) -> Any:
    """The sum of arrays of one type in a fixed binary tree: neighbours first, then neighbouring sums, and so on; each
    addition is rounded to the element type.  One array is returned as it is."""
    level = list(parts)
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def tree_sums(*parts: Any) -> tuple[Any, ...]:
    """The same as a formula with one output."""
    return (tree_sum(parts),)


def doublings(ranks: int) -> int:
    """The height of a binary tree over that many ranks."""
    return (ranks - 1).bit_length()
