"""What proofs note of operators: their numbers, what they say of sizes, and how they look with their axes turned."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

from ..language.layouts import to_first, to_last
from ..language.op import Op
from ..language.types import Types, Value, need
from ..ops.channels_last import Laid
from ..ops.common import Elementwise
from ..ops.fused.loop import Loop
from ..ops.norm.batch_norm import ChannelNorm
from ..ops.norm.batch_norm_parts import BatchNormSlope
from ..ops.norm.batch_norm_train import BatchNormStatistics
from ..ops.norm.fused import LayerNormalization, RMSNormalization
from ..ops.reduction.sums import Reduce
from ..ops.shape.reshape import Transpose

#: operators that say nothing of sizes, which are functions of elements, sums and counts
ANY_SIZE = (Elementwise, Reduce, Transpose, ChannelNorm, BatchNormStatistics, LayerNormalization, RMSNormalization)
#: sizes that stand for any: only equal products of primes are equal, and counts are other numbers than all others
SIZES = (11, 13, 17, 19, 23)
#: more elements than there are at these sizes, so that single precision rounds no count
MOST = 1 << 23
#: most operators, and windows, that are remembered
KNOWN = 1 << 14
#: operators, and their numbers
_KNOWN: dict[Op, Known] = {}
_NUMBERS = itertools.count()


class Known:
    """What proofs note of an operator, which equal ones share."""

    def __init__(self, op: Op) -> None:
        self.op, self.number = op, next(_NUMBERS)

    @functools.cached_property
    def sizes(self) -> Sizes | None:
        """What it says of sizes; None if it is not the same function of elements, sums and counts at any sizes."""
        op = self.op
        members = op.members if isinstance(op, Loop) else ()
        plain = [m.op for m in members] or [op.plain if isinstance(op, Laid) else op]
        if not all(isinstance(p, ANY_SIZE) and not p.random and _has_no_size(p) for p in plain):
            return None
        if isinstance(op, BatchNormSlope):
            slopes = {(op.count, 0, 1)}
        else:  # of the inputs x and dy, which have one shape, one may be a result of the loop
            slopes = {(m.op.count, min(need(m.inputs[0]), need(m.inputs[6])), need(m.inputs[1])) for m in members
                      if isinstance(m.op, BatchNormSlope)}  # fmt: skip
        if not slopes:
            return Sizes(self.number)
        (count, x, mean), *others = slopes
        if others or not count or (members and max(x, mean) >= members[0].result):
            return None
        return Sizes(known(with_count(op, 0)).number, count, x, mean)


@dataclass(frozen=True)
class Sizes:
    """`number`: that of the operator, or of the same one with another count.

    `count`: the elements of a channel, of which input `mean` has one each, and input `x` all.
    """

    number: int
    count: int | None = None
    x: int = 0
    mean: int = 0

    def counted(self, ins: Types) -> int:
        """The count that these inputs' sizes say."""
        size, channels = need(ins[self.x]).size, need(ins[self.mean]).size
        return -1 if size % channels else size // channels


def form_of(op: Op, plain: Op, ins: Types, outs: Types) -> Any:
    """Which inputs and outputs have their axes turned if `op` is such a form of another operator, and how, or None."""
    if isinstance(op, Laid):
        if op.plain != plain:
            return None
        counts = ((op.activations, len(ins)), (op.results, len(outs)))
        return (*([i in some for i in range(count)] for some, count in counts), op.laid, op.unlaid)
    values, results = ([None if t is None else Value("x", t) for t in types] for types in (ins, outs))
    rank = max(v.ndim for v in (*values, *results) if v is not None)
    form = plain.channels_last(values, results, rank) if rank > 2 else None
    return (form.inputs, form.outputs, to_last, to_first) if form is not None and form.op == op else None


def known(op: Op) -> Known:
    """The record of an operator."""
    record = getattr(op, "_known", None)
    if record is None:
        record = _KNOWN.get(op)
        if record is None:
            if len(_KNOWN) >= KNOWN:
                _KNOWN.clear()
            record = _KNOWN[op] = Known(op)
        object.__setattr__(op, "_known", record)
    return record


def with_count(op: Op, count: int) -> Op:
    """The operator for another number of elements of a channel."""
    if isinstance(op, Loop):
        return dataclasses.replace(op, body=re.sub(r"\bcount=\d+", f"count={count}", op.body))
    return dataclasses.replace(op, count=count)  # type: ignore[call-arg]


def _has_no_size(op: Op) -> bool:
    """Whether no number of an operator's but its count is one that sizes which stand for any may come to."""
    fields = [getattr(op, f.name) for f in dataclasses.fields(op) if f.name != "count"]
    flat = itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in fields)
    return not any(isinstance(x, (int, float)) and is_product(x) for x in flat)


def is_product(x: Any) -> bool:
    """Whether a number is a product of SIZES, or the reciprocal of one, up to rounding."""
    size = abs(float(x))
    size = 1 / size if 0 < size < 1 else size
    if not 1.5 < size < MOST:
        return False
    near = range(math.ceil(size * (1 - 1e-6)), math.floor(size * (1 + 1e-6)) + 1)
    return any(math.gcd(n, math.prod(SIZES) ** 6) == n for n in near)
