"""Reductions over any axes: sums, means, norms, products, extremes and their positions.

Dimensions next to each other that are all kept, or all reduced, are merged.  Where the innermost is reduced, threads go
along it, more of them for longer ones; else neighbouring threads have neighbouring outputs.  Long reductions to few
outputs are cut into chunks, by shape, which a second kernel puts together.  Sums are taken in double behind a few
elements; integers wrap, as NumPy's do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import DTYPES, FLOATS, TensorType, need
from ....ops.common import normal_axes, normal_axis
from ....ops.reduction.sums import Reduce
from ..code.expressions import literal
from ..code.parts import WIDE, aligned, divisor, lanes
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call
from ..families import Buffers, Family, family
from ..loops.columns import chunks_of, lines_of, power
from ..loops.reductions import Fold, Shape, along, down, rest

#: outputs from which on each is a thread's own, reduced elements up to which it is
_ENOUGH, _SHORT = 1 << 17, 16
#: elements of an output from which on a block has it; of a chunk at least; blocks that are enough
_LONG, _CHUNK, _BLOCKS = 1024, 4096, 1024
#: element type → what integers are compared in
_WHOLE = {"i64": "long long", "u64": "unsigned long long", "u32": "unsigned"}
_LAST = "9223372036854775807ll"

_SUMS = {
    # operator → what is added, and the result
    "ReduceSum": ("v", "t"),
    "ReduceMean": ("v", "t / count"),
    "ReduceL1": ("abs", "t"),
    "ReduceSumSquare": ("v * v", "t"),
    "ReduceL2": ("v * v", "sqrt(t)"),
    "ReduceLogSum": ("v", "log(t)"),
    "GlobalAveragePool": ("v", "t / count"),
}


def _sum(name: str, dtype: str) -> Fold:
    value, finish = _SUMS[name]
    c = COMPUTE[dtype]
    if dtype in FLOATS:
        value = value.replace("abs", f"{'fabs' if c == 'double' else 'fabsf'}(v)")
        return Fold(name, dtype, dtype, c, "double", "0", "Plus", value, finish)
    whole = "unsigned long long" if dtype[0] == "u" else "long long"
    value = {"v": f"({whole})v", "v * v": f"({whole})v * v", "abs": f"v < 0 ? -({whole})v : ({whole})v"}[value]
    exact = f"({C_TYPES[dtype]})t"
    finish = {"t": exact, "t / count": f"(double){exact} / count"}.get(
        finish, finish.replace("(t)", f"((double){exact})")
    )
    return Fold(name, dtype, dtype, "unsigned long long", "unsigned long long", "0", "Plus", value, finish)


def _product(dtype: str) -> Fold:
    if dtype in FLOATS:
        return Fold("ReduceProd", dtype, dtype, COMPUTE[dtype], "double", "1", "Times")
    return Fold("ReduceProd", dtype, dtype, "unsigned long long", "unsigned long long", "1", "Times",
                "(long long)v" if dtype[0] == "i" else "v")  # fmt: skip


def _extreme(dtype: str, *, largest: bool, out: str = "") -> Fold:
    if dtype in FLOATS:
        kind = COMPUTE[dtype]
        start = literal(-math.inf if largest else math.inf, dtype)
    else:
        kind = _WHOLE.get(dtype, "int")
        limits = (0, 1) if dtype == "bool" else (np.iinfo(DTYPES[dtype]).min, np.iinfo(DTYPES[dtype]).max)
        start = f"({kind}){literal(int(limits[not largest]), 'i64' if dtype[0] == 'i' else 'u64')}"
    name = "ReduceMax" if largest else "ReduceMin"
    return Fold(name, dtype, out or dtype, kind, kind, start, "Larger" if largest else "Smaller")


def _place(dtype: str, best: str, *, last: bool, finish: str = "t") -> Fold:
    """Where an element is the one that was found: NaN is."""
    same = "v == m || (v != v && m != m)"
    start = "-1ll" if last else _LAST
    return Fold("ArgLast" if last else "ArgFirst", dtype, "i64", "long long", "long long", start,
                "Larger" if last else "Smaller", f"{same} ? r : {start}", finish, best)  # fmt: skip


def _log_sum_exp(dtype: str, best: str) -> Fold:
    """An infinite m is not subtracted: ∞ - ∞ is NaN."""
    return Fold("ReduceLogSumExp", dtype, dtype, COMPUTE[dtype], "double", "0", "Plus", "exp_of(v - m)", "log(t) + m",
                best, "finite_or_zero({})")  # fmt: skip


def _folds(op: Operator) -> list[Fold]:
    """The passes of an operator; none where its types are not reduced."""
    x, name = op.inputs[0], op.op.name.removeprefix("ChannelsLast")
    if x is None or x.dtype not in C_TYPES:
        return []
    wide = "f32" if x.dtype in ("f16", "bf16") else x.dtype
    largest = name in ("ReduceMax", "ArgMax", "ReduceLogSumExp")
    if name in ("ReduceMax", "ReduceMin"):
        return [_extreme(x.dtype, largest=largest)]
    if name in ("ArgMax", "ArgMin"):
        last = bool(op.op.attributes().get("select_last_index"))
        return [_extreme(x.dtype, largest=largest, out=wide), _place(x.dtype, wide, last=last)]
    if name == "GlobalMaxPool":
        places = _place(x.dtype, x.dtype, last=False, finish="t + ({o}) * (long long)count")
        return [_extreme(x.dtype, largest=True), *([places] if op.outputs[1:] and op.outputs[1] else [])]
    if name == "ReduceLogSumExp":
        return [_extreme(x.dtype, largest=True, out=wide), _log_sum_exp(x.dtype, wide)] if x.type.is_float else []
    if name == "ReduceProd":
        return [_product(x.dtype)]
    return [_sum(name, x.dtype)] if x.dtype != "bool" or name == "ReduceSum" else []


@dataclass(frozen=True)
class Plan:
    """Merged dimensions (size, stride), and how they are cut: `group` threads for an output along the innermost, or
    blocks of `lines` threads for each output."""

    kept: tuple[tuple[int, int], ...]
    reduced: tuple[tuple[int, int], ...]
    inner: bool
    group: int
    lines: int
    chunk: int
    chunks: int
    width: int

    @property
    def outputs(self) -> int:
        """Results."""
        return math.prod(size for size, _ in self.kept)

    @property
    def count(self) -> int:
        """Elements of each."""
        return math.prod(size for size, _ in self.reduced)

    @property
    def wide(self) -> bool:
        """Whether indices take 64 bits."""
        return max(self.outputs, self.count + 64 * 256 * self.width) >= WIDE

    @property
    def shape(self) -> Shape:
        """The parameters of the texts."""
        return Shape(len(self.kept), len(self.reduced), self.inner, self.wide)

    @property
    def places(self) -> list[Any]:
        """Arguments: strides and sizes."""
        values: list[Any] = []
        for dims in (self.kept, self.reduced):
            values += [stride for _, stride in dims]
            values += [divisor(size, wide=self.wide) for size, _ in dims[1:]]
        return values


@functools.lru_cache(maxsize=1 << 12)
def plan(x: TensorType, axes: tuple[int, ...]) -> Plan:
    """How x is reduced over these axes."""
    groups: list[tuple[int, int, bool]] = []
    stride = 1
    for d in range(x.ndim - 1, -1, -1):
        size, gone = x.shape[d], d in axes
        if size == 1:
            continue
        if groups and groups[-1][2] == gone:
            groups[-1] = (groups[-1][0] * size, groups[-1][1], gone)
        else:
            groups.append((size, stride, gone))
        stride *= size
    inner = bool(groups) and groups[0][2]
    kept, reduced = (tuple((n, s) for n, s, gone in reversed(groups) if gone is which) for which in (False, True))
    outputs, n = math.prod(s for s, _ in kept), math.prod(s for s, _ in reduced)
    width = lanes([x.dtype])
    group, lines, chunk, chunks = 1, 1, n, 1
    if inner and n <= _LONG:
        group = min(power(_up(n, width)), 32)
    elif inner:
        group, chunks = 256, max(min(_up(n, _CHUNK), _up(_BLOCKS, max(outputs, 1))), 1)
        chunk = _up(_up(n, chunks), _LONG) * _LONG
        chunks = _up(n, chunk)
    elif outputs < _ENOUGH and n > _SHORT:
        lines = lines_of(outputs)
        chunk, chunks = chunks_of(n, outputs)
    return Plan(kept, reduced, inner, group, lines, chunk, chunks, width)


def _up(a: int, b: int) -> int:
    return -(-a // b)


def plan_of(op: Operator) -> Plan:
    """The plan of an applied operator."""
    x, name = need(op.inputs[0]), op.op.name
    if "Global" in name:
        return plan(x.type, tuple(range(1, x.ndim - 1) if name.startswith("ChannelsLast") else range(2, x.ndim)))
    if isinstance(op.op, Reduce):
        return plan(x.type, normal_axes(op.op.axes, x.ndim, op.op))
    return plan(x.type, (normal_axis(op.op.attributes().get("axis", 0), x.ndim, op.op),))


def _pass(p: Plan, fold: Fold, x: Buffer, best: Buffer | None, out: Buffer, parts: Buffer | None) -> list[Call]:
    """One reduction."""
    dims = [] if best is None else [best]
    target, chunked = (out, False) if parts is None else (parts, True)
    arguments = [x, *dims, target, p.outputs, p.count, p.chunk, float(p.count), *p.places]
    fits = aligned([x.address])
    if p.inner:
        vectors = fits and p.reduced[-1][0] % p.width == 0
        kernel = along(fold, p.shape, p.group, p.width, vectors=vectors, chunked=chunked)
        blocks = p.outputs if p.group > 32 else _up(p.outputs * p.group, 256)
    else:
        width = min(p.width, 8) if fits and p.kept else 1
        while p.kept and p.kept[-1][0] % width:
            width //= 2
        across = 256 if p.lines == 1 else min(32, power(_up(p.outputs, width)))
        kernel = down(fold, p.shape, across, p.lines, width, chunked=chunked)
        blocks = _up(p.outputs, across * width)
    calls: list[Call] = [kernel.blocks(blocks, p.chunks, args=arguments)]
    if parts is not None:
        last, wide = rest(fold, p.chunks, p.outputs)
        args = [parts, *dims, out, p.chunks, p.outputs, float(p.count)]
        calls.append(last.blocks(_up(p.outputs, wide), args=args))
    return calls


@family(*_SUMS, "ReduceLogSumExp", "ReduceProd", "ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "GlobalMaxPool",
        "ChannelsLastGlobalMaxPool", "ChannelsLastGlobalAveragePool")  # fmt: skip
class Reductions(Family):
    """One pass, or two where the first finds the extreme that the second needs."""

    def accepts(self, op: Operator) -> bool:
        """Numbers; booleans where they have an order, or are added."""
        return bool(_folds(op))

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The result of the first pass, unless that is an output, and the chunks' results."""
        p, folds = plan_of(op), _folds(op)
        first = [TensorType(folds[0].out, (p.outputs,))] if len(folds) > len([*op.writes()]) else []
        return (*first, *([TensorType("f64", (p.chunks, p.outputs))] if p.chunks > 1 else []))

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """The passes in order."""
        p, folds, x = plan_of(op), _folds(op), need(ins[0])
        targets = [b for b in outs if b is not None]
        if len(targets) < len(folds):
            targets.insert(0, scratch[0])
        calls, partial, parts = list[Call](), None, scratch[-1] if p.chunks > 1 else None
        for fold, out in zip(folds, targets if p.outputs else (), strict=False):
            calls += _pass(p, fold, x, partial, out, parts)
            partial = out
        return calls
