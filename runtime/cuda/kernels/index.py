"""Gather and scatter operators and their gradients; sums in the order of the indices.

Indices of several numbers each are made into row numbers first.  One that is out of range is reported (see
`kernel.STATUS`) and skipped: nothing is taken, added or put.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator, Value
from ....language.types import TensorType, present
from ....ops.communication.base import doublings
from ....ops.communication.row_sums import RowSums
from ....ops.indexing.add_rows import AddRows
from ....ops.indexing.scatter import strides
from ...shared.trouble import INDEX_OUTSIDE
from ..code.parts import WIDE, division, divisor
from ..code.sorting import sort, sort_scratch, sums, sums_scratch
from ..code.strided import THREADS, WORDS, copy, word_bytes
from ..device.kernel import C_TYPES, COMPUTE, REPORT, STATUS, Buffer, Call, Fill, Kernel
from ..families import Buffers, Family, Moving, family
from .loops import added, computed

#: words that a thread moves; rows and indices are fewer than
_EACH, _MOST = 4, 1 << 30
#: the number of no row: out of range of every axis, from its end too, and sorted behind the others
_NOWHERE = "(int)0x80ffffff"
_PLACE = f"""{REPORT}
// an index that counts from the end where it is negative; -1 where it is out of range
template <class I> DEVICE long long place(I index, long long size, long long* status)
{{
    const long long found = index < 0 ? index + size : index;
    if (found >= 0 && found < size) return found;
    report(status, {INDEX_OUTSIDE}, index, size);
    return -1;
}}
"""


# -- row numbers ------------------------------------------------------------------------------------------------------


@functools.cache
def row_numbers(index: str, depth: int) -> Kernel:
    """The rows that indices [batches, each, depth] name, in row-major order of `sizes` before them."""
    lines = "".join(f"    const long long p{d} = place(indices[i * {depth} + {d}], size{d}, status);\n"
                    f"    row = row * size{d} + p{d};\n    there = there && p{d} >= 0;\n"
                    for d in range(depth))  # fmt: skip
    body = f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long row = i / each;
    bool there = true;
{lines}    rows[i] = there ? (int)row : {_NOWHERE};
"""
    sizes = "".join(f", long long size{d}" for d in range(depth))
    parameters = (
        f"const {C_TYPES[index]}* indices, int* rows, long long count, long long each{sizes}, long long* status"
    )
    return Kernel(f"row_numbers_{index}_{depth}", parameters, body, _PLACE)


@functools.cache
def element_numbers(index: str, dims: int, axis: int) -> Kernel:
    """Flat positions of what indices name along one axis; along the others they lie at their own."""
    lines, rest = [], "i"
    for d in range(dims - 1, -1, -1):
        lines.append(f"const long long c{d} = {f'{rest} % n{d}' if d else rest};")
        lines += [f"const long long q{d} = {rest} / n{d};"] if d else []
        rest = f"q{d}"
    terms = [f"{'there' if d == axis else f'c{d}'} * s{d}" for d in range(dims)]
    body = f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    {(chr(10) + "    ").join(lines)}
    const long long there = place(indices[i], size, status);
    rows[i] = there < 0 ? {_NOWHERE} : (int)({" + ".join(terms)});
"""
    sizes = "".join(f", long long n{d}, long long s{d}" for d in range(dims))
    parameters = (
        f"const {C_TYPES[index]}* indices, int* rows, long long count, long long size{sizes}, long long* status"
    )
    return Kernel(f"element_numbers_{index}_{dims}_{axis}", parameters, body, _PLACE)


def numbered(op: Operator, indices: Buffer, rows: Buffer, shape: Sequence[int]) -> list[Call]:
    """Calls that make the numbers of rows (or elements) in a tensor of `shape` from an operator's indices."""
    rule: Any = op.op
    count = rows.size
    if rule.name.endswith(("Elements", "ElementsGrad")):
        axis = rule.axis % len(shape)
        apart = [n for pair in zip(indices.shape, strides(shape), strict=True) for n in pair]
        k = element_numbers(indices.dtype, len(shape), axis)
        return [k(count, indices, rows, count, shape[axis], *apart, STATUS)]
    if rule.name.endswith(("ND", "NDGrad")):
        batch, depth = getattr(rule, "batch_dims", 0), indices.shape[-1]
        each = math.prod(indices.shape[batch:-1])
        k = row_numbers(indices.dtype, depth)
        return [k(count, indices, rows, count, each, *shape[batch : batch + depth], STATUS)]
    k = row_numbers(indices.dtype, 1)
    return [k(count, indices, rows, count, count, shape[rule.axis % len(shape)], STATUS)]


def _type(v: Value | None) -> TensorType:
    assert v is not None
    return v.type


def form_of(op: Operator, indices: TensorType, shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Sizes outside of the rows, the number of rows, a row's elements, and how many are named."""
    rule: Any = op.op
    if rule.name.endswith(("Elements", "ElementsGrad")):
        return 1, math.prod(shape), 1, indices.size
    if rule.name.endswith(("ND", "NDGrad")):
        front = getattr(rule, "batch_dims", 0) + indices.shape[-1]
        return 1, math.prod(shape[:front]), math.prod(shape[front:]), math.prod(indices.shape[:-1])
    axis = rule.axis % len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]), indices.size


# -- taking -----------------------------------------------------------------------------------------------------------


@functools.cache
def gather(index: str, nbytes: int, *, wide: bool) -> Kernel:
    """Rows of x [outer, size, inner] to y [outer, count, inner], in words."""
    body = f"""    typedef {WORDS[nbytes]} W;
    const long long first = (long long)blockIdx.x * ({_EACH} * {THREADS}) + threadIdx.x;
    W found[{_EACH}];
    #pragma unroll
    for (int k = 0; k < {_EACH}; k++) {{
        if (first + k * {THREADS} >= n) break;
        const Index e = (Index)(first + k * {THREADS}), row = over(e, inner), o = over(row, count);
        const long long from = place(indices[row - o * (Index)count.by], size, status);
        found[k] = from < 0 ? W() : x[((long long)o * size + from) * inner.by + (e - row * (Index)inner.by)];
    }}
    #pragma unroll
    for (int k = 0; k < {_EACH}; k++)
        if (first + k * {THREADS} < n) y[first + k * {THREADS}] = found[k];
"""
    parameters = (
        f"const {WORDS[nbytes]}* x, const {C_TYPES[index]}* indices, {WORDS[nbytes]}* y, long long n, long long size, "
        "Divisor inner, Divisor count, long long* status"
    )
    name = f"gather_rows_{index}_{8 * nbytes}{'_wide' if wide else ''}"
    return Kernel(name, parameters, body, division(wide=wide) + _PLACE, THREADS)


def gathering(x: Buffer, indices: Buffer, y: Buffer, form: tuple[int, int, int]) -> list[Call]:
    """The call that takes rows; `form`: outer, size, inner."""
    if not y.size:
        return []
    _, size, inner = form
    item = x.type.numpy.itemsize
    nbytes = word_bytes(x.address, y.address, inner * item)
    n, inner = y.nbytes // nbytes, inner * item // nbytes
    wide = n >= WIDE
    args = (n, size, divisor(inner, wide=wide), divisor(indices.size, wide=wide), STATUS)
    return [gather(indices.dtype, nbytes, wide=wide)(-(-n // _EACH), x, indices, y, *args)]


@family("Gather", "GatherND", "GatherElements")
class Gathers(Moving):
    """(x, indices) → rows, or elements."""

    def accepts(self, op: Operator) -> bool:
        """All element types; numbers of rows and indices have 30 bits."""
        form = self._form(op)
        return super().accepts(op) and max(form[1], form[3]) < _MOST

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Row numbers, where indices are no such."""
        return () if op.op.name == "Gather" else (TensorType("i32", (self._form(op)[3],)),)

    def _form(self, op: Operator) -> tuple[int, int, int, int]:
        return form_of(op, _type(op.inputs[1]), _type(op.inputs[0]).shape)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """One launch; before it one for the numbers."""
        x, indices, y = present(ins[0], ins[1], outs[0])
        form = self._form(op)
        if op.op.name == "Gather" or not y.size:
            return gathering(x, indices, y, form[:3])
        return [*numbered(op, indices, scratch[0], x.shape), *gathering(x, scratch[0], y, form[:3])]


# -- gradients --------------------------------------------------------------------------------------------------------


@family("GatherGrad", "GatherNDGrad", "GatherElementsGrad")
class GatherGradients(Family):
    """(indices, dy) → sums of the rows of dy."""

    def accepts(self, op: Operator) -> bool:
        """Floats; numbers of rows and indices have 30 bits."""
        form = self._form(op)
        return _type(op.outputs[0]).dtype in ("f16", "bf16", "f32", "f64") and max(form[1], form[3]) < _MOST

    def _form(self, op: Operator) -> tuple[int, int, int, int]:
        return form_of(op, _type(op.inputs[0]), _type(op.outputs[0]).shape)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Buffers of the sort and of the sums."""
        outer, _, inner, count = self._form(op)
        return (*sort_scratch(count), *sums_scratch(count, outer * inner, _type(op.outputs[0]).dtype))

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Zeros; numbers, sorted; sums."""
        indices, dy, dx = present(ins[0], ins[1], outs[0])
        if not dx.size:
            return []
        calls: list[Call] = [Fill(dx)]
        if not dy.size:
            return calls
        outer, size, inner, _ = self._form(op)
        calls += numbered(op, indices, scratch[0], dx.shape)
        more, keys, order = sort(scratch[:5], size)
        return [*calls, *more, *sums(keys, order, dy, dx, scratch[5], (outer, size, inner))]


# -- putting ----------------------------------------------------------------------------------------------------------


@functools.cache
def last_of_each() -> Kernel:
    """The last of the updates of each row."""
    body = """    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && rows[i] >= 0) atomicMax(&last[rows[i]], (int)i);
"""
    return Kernel("last_of_each", "const int* rows, int* last, long long count", body)


@functools.cache
def put(nbytes: int, *, wide: bool) -> Kernel:
    """Rows of the updates where there are any, else those of x."""
    body = f"""    const long long first = (long long)blockIdx.x * ({_EACH} * {THREADS}) + threadIdx.x;
    #pragma unroll
    for (int k = 0; k < {_EACH}; k++) {{
        if (first + k * {THREADS} >= n) break;
        const Index e = (Index)(first + k * {THREADS}), row = over(e, inner);
        const int from = last[row];
        y[e] = from < 0 ? x[e] : updates[(long long)from * inner.by + (e - row * (Index)inner.by)];
    }}
"""
    w = WORDS[nbytes]
    parameters = f"const {w}* x, const {w}* updates, const int* last, {w}* y, long long n, Divisor inner"
    return Kernel(f"put_rows_{8 * nbytes}{'_wide' if wide else ''}", parameters, body, division(wide=wide), THREADS)


_TOGETHER = {"add": "a + b", "mul": "a * b", "max": "larger(a, b)", "min": "smaller(a, b)"}


@functools.cache
def reduced(dtype: str, how: str) -> Kernel:
    """Each element of y [outer, size, inner] with the updates [outer, count, inner] of its row, in the order of their
    numbers: by the thread of the first of them."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    body = f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)count * columns) return;
    long long at = i / columns;
    const long long o = (i - at * columns) / inner, c = i - at * columns - o * inner;
    const int key = keys[at];
    if (key < 0 || (at && keys[at - 1] == key)) return;
    {c}& to = y[(o * size + key) * inner + c];
    {a} a = widen(to);
    for (; at < count && keys[at] == key; at++) {{
        const {a} b = widen(updates[(o * count + order[at]) * inner + c]);
        a = {_TOGETHER[how]};
    }}
    to = narrow<{c}>(a);
"""
    parameters = (
        f"const int* keys, const int* order, const {c}* updates, {c}* y, int count, long long columns, "
        "long long inner, long long size"
    )
    return Kernel(f"rows_{how}_{dtype}", parameters, body)


def reduce_rows(
    how: str, updates: Buffer, y: Buffer, form: tuple[int, int, int, int], scratch: Sequence[Buffer]
) -> list[Call]:
    """Calls that add (or so) updates to rows of y, whose numbers scratch[0] has; `form` as of `form_of`."""
    outer, size, inner, count = form
    calls, keys, order = sort(scratch, size)
    k = reduced(y.dtype, how)
    return [*calls, k(count * outer * inner, keys, order, updates, y, count, outer * inner, inner, size)]


@functools.cache
def part_numbers(index: str) -> Kernel:
    """The rows of a part of a table that indices name; what lies elsewhere is of no row."""
    body = f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const long long row = ((long long)indices[i] % size + size) % size - first;
    rows[i] = row >= 0 && row < here ? (int)row : {_NOWHERE};
"""
    parameters = (
        f"const {C_TYPES[index]}* indices, int* rows, long long count, long long size, long long first, long long here"
    )
    return Kernel(f"part_numbers_{index}", parameters, body)


@family("RowSums")
class RowsOfRanks(Family):
    """(indices, dy) → a part of the sum of all ranks' gradients of a table: rank by rank, in the tree of `TreeSum`."""

    def accepts(self, op: Operator) -> bool:
        return max(op.of(RowSums).rows, _type(op.inputs[0]).size) < _MOST

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The buffers of sorting, and a sum for each level of the tree."""
        rule, n = op.of(RowSums), _type(op.inputs[0]).size // op.of(RowSums).parts
        levels = TensorType(_type(op.outputs[0]).dtype, (doublings(rule.parts) + 1, rule.rows * rule.inner))
        return (*sort_scratch(n), levels)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule, (indices, dy, y) = op.of(RowSums), present(ins[0], ins[1], outs[0])
        *spare, levels = scratch
        n, each = indices.size // rule.parts, levels.shape[1]
        calls: list[Call] = []

        def add_up(low: int, high: int, level: int) -> None:
            """The sum of parts `low` to `high`, in that level's."""
            sums = levels.at(level * each, [each])
            if high - low > 1:
                middle = low + (1 << doublings(high - low) - 1)
                add_up(low, middle, level)
                add_up(middle, high, level + 1)
                calls.extend(computed(added, y.dtype, [sums, levels.at((level + 1) * each, [each])], [sums]))
                return
            calls.append(Fill(sums))
            if n and rule.rows:
                mine = indices.reshape(-1).at(low * n, [n])
                where = (n, rule.shape[0], rule.first, rule.rows)
                calls.append(part_numbers(indices.dtype)(n, mine, spare[0], *where))
                part = dy.reshape(-1).at(low * n * rule.inner, [n * rule.inner])
                calls.extend(reduce_rows("add", part, sums, (1, rule.rows, rule.inner, n), spare))

        if y.size:
            add_up(0, rule.parts, 0)
            calls += copy(y, levels.at(rule.start - rule.first * rule.inner, [y.size]))
        return calls


@family("ScatterND", "ScatterElements", "AddRows")
class Scatters(Moving):
    """(x, indices, updates) → x with rows or elements replaced, or reduced."""

    def how(self, op: Operator) -> str:
        """The reduction of updates: "none" replaces the elements."""
        return "add" if isinstance(op.op, AddRows) else op.op.options()["reduction"]

    def accepts(self, op: Operator) -> bool:
        """All element types, those with arithmetic for reductions; numbers of rows and indices have 30 bits."""
        form = self._form(op)
        if max(form[1], form[3]) >= _MOST or not super().accepts(op):
            return False
        return self.how(op) == "none" or _type(op.outputs[0]).dtype in {*C_TYPES} - {"bool"}

    def _form(self, op: Operator) -> tuple[int, int, int, int]:
        return form_of(op, _type(op.inputs[1]), _type(op.outputs[0]).shape)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Row numbers, and the last update of each row; or what sorting takes."""
        _, size, _, count = self._form(op)
        if self.how(op) == "none":
            return TensorType("i32", (count,)), TensorType("i32", (size,))
        return sort_scratch(count)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Numbers; then who writes where."""
        x, indices, updates, y = present(*ins[:3], outs[0])
        copied = copy(y, x)
        if not updates.size or not y.size:
            return copied
        how, form = self.how(op), self._form(op)
        calls = numbered(op, indices, scratch[0], y.shape)
        if how != "none":
            return [*copied, *calls, *reduce_rows(how, updates, y, form, scratch)]
        _, _, inner, count = form
        nbytes = word_bytes(x.address, y.address, updates.address, inner * y.type.numpy.itemsize)
        n, inner = y.nbytes // nbytes, inner * y.type.numpy.itemsize // nbytes
        k = put(nbytes, wide=n >= WIDE)
        return [
            *calls,
            Fill(scratch[1], 0xFF),
            last_of_each()(count, scratch[0], scratch[1], count),
            k(-(-n // _EACH), x, updates, scratch[1], y, n, divisor(inner, wide=n >= WIDE)),
        ]
