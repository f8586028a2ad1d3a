"""Selections: triangles, diagonals, one-hot, reversed sequences, im2col; each element computes its source."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import DTYPES, need, present
from ....ops.indexing.select import OneHot as OneHotOp
from ....ops.indexing.select import Trilu
from ...shared.kernels.pooling import over_places, three
from ...shared.kernels.windows import from_windows, window_columns
from ...shared.texts import Absent
from ...shared.trouble import INDEX_OUTSIDE
from ..code.parts import WIDE, division, divisor
from ..code.python_kernels import call_of
from ..code.strided import THREADS, WORDS, copy, word
from ..device.kernel import C_TYPES, REPORT, STATUS, Buffer, Call, Kernel
from ..families import Buffers, Family, Moving, family

#: words that a thread writes
_EACH = 4


@functools.cache
def choosing(name: str, parameters: str, lines: str, nbytes: int, *, wide: bool, before: str) -> Kernel:
    """Element e of y is `found`, which `lines` define."""
    body = f"""    typedef {WORDS[nbytes]} W;
    const long long first = (long long)blockIdx.x * ({_EACH} * {THREADS}) + threadIdx.x;
    #pragma unroll
    for (int k = 0; k < {_EACH}; k++) {{
        if (first + k * {THREADS} >= n) break;
        const Index e = (Index)(first + k * {THREADS});
        {lines}
        y[e] = found;
    }}
"""
    head = f"{WORDS[nbytes]}* y, long long n, "
    return Kernel(
        f"{name}_{8 * nbytes}{'_wide' if wide else ''}", head + parameters, body, division(wide=wide) + before
    )


def chosen(
    name: str, y: Buffer, parameters: str, lines: str, sizes: Sequence[int], *args: Any, before: str = ""
) -> list[Call]:
    """The call of a kernel with Divisors d0, d1, ... of `sizes`, then other parameters; `before`: what it uses."""
    if not y.size:
        return []
    wide, nbytes = y.size >= WIDE, y.type.numpy.itemsize
    names = ", ".join(f"Divisor d{i}" for i in range(len(sizes)))
    k = choosing(name, f"{names}, {parameters.replace('W', WORDS[nbytes])}", lines, nbytes, wide=wide, before=before)
    return [k(-(-y.size // _EACH), y, y.size, *(divisor(s, wide=wide) for s in sizes), *args)]


def bits(y: Buffer, value: float) -> int:
    """A value as a word of y's."""
    return word(np.array(value).astype(y.type.numpy).tobytes(), y.type.numpy.itemsize)


_MATRIX = """const Index row = over(e, d0), j = e - row * (Index)d0.by, i = row - over(row, d1) * (Index)d1.by;
        const long long right = (long long)j - (long long)i;
        """


@family("Trilu")
class Triangle(Moving):
    """x, or zero."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule = op.of(Trilu)
        x, y = present(ins[0], outs[0])
        lines = f"{_MATRIX}const W found = (upper ? right >= diagonal : right <= diagonal) ? x[e] : zero;"
        sizes = y.shape[-1], y.shape[-2]
        parameters = "const W* x, long long diagonal, int upper, W zero"
        return chosen("triangle", y, parameters, lines, sizes, x, rule.k, rule.upper, bits(y, 0))


@family("Eye")
class Diagonal(Moving):
    """Ones on a diagonal."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        y = need(outs[0])
        lines = f"{_MATRIX}const W found = right == diagonal ? one : zero;"
        arguments = op.op.k, bits(y, 0), bits(y, 1)  # type: ignore[attr-defined]
        return chosen("diagonal", y, "long long diagonal, W zero, W one", lines, (y.shape[1], y.shape[0]), *arguments)


@family("OneHot")
class OneHot(Moving):
    """`on` at the indices."""

    def accepts(self, op: Operator) -> bool:
        return super().accepts(op) and all(v.dtype in C_TYPES for v in op.reads())

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule = op.of(OneHotOp)
        at, y = present(ins[0], outs[0])
        axis = rule.axis % len(y.shape)
        lines = """const Index row = over(e, d0), outer = over(row, d1), i = row - outer * (Index)d1.by;
        long long index = (long long)widen(indices[outer * (Index)d0.by + (e - row * (Index)d0.by)]);
        index += index < 0 ? (long long)d1.by : 0ll;
        const W found = index == (long long)i ? on : off;"""
        sizes = math.prod(y.shape[axis + 1 :]), rule.depth
        parameters = f"const {C_TYPES[at.dtype]}* indices, W off, W on"
        return chosen(f"one_hot_{at.dtype}", y, parameters, lines, sizes, at, bits(y, rule.off), bits(y, rule.on))


@family("ReverseSequence")
class Turned(Moving):
    """The first elements of each row the other way round; a row whose length is none stays, and is reported."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, lengths, y = present(ins[0], ins[1], outs[0])
        row, place = ("i", "j") if op.op.batch_axis == 0 else ("j", "i")  # type: ignore[attr-defined]
        here = "from * (Index)d1.by + j" if place == "i" else "i * (Index)d1.by + from"
        lines = f"""const Index q = over(e, d0), i = over(q, d1), j = q - i * (Index)d1.by;
        const long long length = lengths[{row}];
        const bool fits = length >= 0 && length <= steps;
        if (!fits) report(status, {INDEX_OUTSIDE}, length, steps);
        const Index from = fits && (long long){place} < length ? (Index)(length - 1 - {place}) : {place};
        const W found = x[({here}) * (Index)d0.by + (e - q * (Index)d0.by)];"""
        sizes = math.prod(y.shape[2:]), y.shape[1]
        parameters = f"const W* x, const {C_TYPES[lengths.dtype]}* lengths, long long steps, long long* status"
        arguments = x, lengths, y.shape[op.op.time_axis], STATUS  # type: ignore[attr-defined]
        return chosen(f"turned_{place}_{lengths.dtype}", y, parameters, lines, sizes, *arguments, before=REPORT)


@family("BitCast")
class Bits(Family):
    """The same bytes."""

    def accepts(self, op: Operator) -> bool:
        return True

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, y = present(ins[0], outs[0])
        return copy(y, x)


@family("Im2Col", "Col2Im")
class Columns(Family):
    """Windows as columns, and back; the sums of these go in the order of the taps."""

    def accepts(self, op: Operator) -> bool:
        kinds = {v.dtype for v in (*op.reads(), *op.writes())}
        return kinds <= {t for t in C_TYPES if DTYPES[t].kind != "b"}

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule: Any = op.op
        x, y = present(ins[0], outs[0])
        if not y.size:
            return []
        w, back = rule.window(), rule.name == "Col2Im"
        planes = (y if back else x).shape[0] * (y if back else x).shape[1]
        deep, *rest = three(w.out, 1)
        image, columns = (planes, *three(w.inp, 1), 1), (planes, w.taps * deep, *rest, 1)
        if back:
            operands, text = [Absent(5), x.reshape(*columns), y.reshape(*image)], from_windows
        else:
            operands, text = [x.reshape(*image), y.reshape(*columns)], window_columns
        return [call_of(work) for work in over_places(text, rule, w, operands, columns=w.taps)]
