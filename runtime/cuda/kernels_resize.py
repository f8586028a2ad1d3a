"""Resizing and its gradient: all axes at once, a thread for each result.

Along an axis, each result is a sum of a few elements with weights (ops/resize_maps.py): those tables are worked out
when the operator is bound and written before each use, so that nothing else has to live on the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...ops.resize import Resize
from ...ops.resize_maps import indices, matrix, outside
from ...types import FLOATS, TensorType
from .families import Buffers, Family, family
from .kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from .traced_kernels import WALK, joined, walk
from .traced_steps import Table, View

if TYPE_CHECKING:
    from ...ir import Operator

#: axes that are resized together
_AXES = 4


@dataclass(frozen=True)
class Map:
    """Along one axis: which elements [rows, terms], and with which weights; -1 in front: a row without any."""

    axis: int
    index: np.ndarray
    weights: np.ndarray


@functools.lru_cache(maxsize=512)
def maps(op: Any, before: tuple[int, ...], after: tuple[int, ...], work: str) -> tuple[Map, ...]:
    """The resized axes of what turns a tensor of shape `before` into one of shape `after`."""
    back = not isinstance(op, Resize)
    small, large = (after, before) if back else (before, after)
    found = []
    for axis, span in op.maps(small, large):
        size = small[axis], large[axis], span
        if op.mode == "nearest" and not back:
            index = indices(op._key(), *size)[:, None].astype(np.int32)
            weights = np.ones(index.shape, work)
        else:
            index, weights = _terms(matrix(op._key(), *size, work), back=back)
        if not back and op.coordinate_transformation_mode == "tf_crop_and_resize":
            index[outside(op._key(), *size)] = -1
        found.append(Map(axis, index, weights))
    return tuple(sorted(found, key=lambda m: m.axis))


def _terms(m: np.ndarray, *, back: bool) -> tuple[np.ndarray, np.ndarray]:
    """Each row's elements that are not 0, in order, as many for every row."""
    m = m.T if back else m
    terms = max(int(np.count_nonzero(m, axis=1).max(initial=0)), 1)
    index = np.argsort(m == 0, axis=1, kind="stable")[:, :terms].astype(np.int32)
    return index, np.take_along_axis(m, index.astype(np.int64), axis=1)


@functools.cache
def kernel(dtype: str, count: int, *, nearest: bool) -> Kernel:
    """Sums over `count` axes; `nearest`: one element as it is.  `edge`: what is outside."""
    t, a = C_TYPES[dtype], COMPUTE[dtype]
    lines, pad, place = [], "    ", "at[1]"
    for k in range(count):
        if not nearest:
            lines.append(f"{pad}for (int t{k} = 0; t{k} < terms{k}; t{k}++) {{")
            pad += "    "
        lines.append(f"{pad}const long long p{k} = at[{2 + k}]{'' if nearest else f' * terms{k} + t{k}'};")
        lines.append(f"{pad}const int i{k} = index{k}[p{k}];")
        lines.append(f"{pad}inside &= i{k} >= 0;")
        if not nearest:
            lines.append(f"{pad}const {a} w{k} = {f'w{k - 1} * ' if k else ''}weights{k}[p{k}];")
        place += f" + i{k} * step{k}"
    if nearest:
        lines.append(f"{pad}out[at[0]] = inside ? x[{place}] : narrow<{t}>(({a})edge);")
    else:
        lines.append(f"{pad}if (inside) a += w{count - 1} * widen(x[{place}]);")
        lines += ["    " * (count - k) + "}" for k in range(count)]
        lines.append(f"    out[at[0]] = narrow<{t}>(inside ? a : ({a})edge);")
    body = (
        f"""    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= w.size) return;
    long long at[{2 + count}];
    find(w, i, at);
    bool inside = true;
"""
        + ("" if nearest else f"    {a} a = 0;\n")
        + "\n".join(lines)
    )
    more = "".join(
        f", const int* index{k}, long long step{k}" + ("" if nearest else f", const {a}* weights{k}, int terms{k}")
        for k in range(count)
    )
    name = f"resize_{dtype}_{count}" + "_nearest" * nearest
    return Kernel(name, f"Walk<{2 + count}> w, {t}* out, const {t}* x, double edge{more}", body, WALK)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


@family("Resize", "ResizeGrad")
class Resizing(Family):
    """Tables, and one launch."""

    def accepts(self, op: Operator) -> bool:
        """Any element type where one element is taken, else floats; a few axes."""
        x, y = op.inputs[0], op.outputs[0]
        if x is None or y is None or x.dtype not in C_TYPES or len(y.shape) > 6:
            return False
        found = self._maps(op)
        return 0 < len(found) <= _AXES and (x.dtype in FLOATS or self._nearest(op))

    def _maps(self, op: Operator) -> tuple[Map, ...]:
        x, y = op.inputs[0], op.outputs[0]
        assert x is not None and y is not None
        return maps(op.op, x.type.shape, y.type.shape, "float64" if x.dtype == "f64" else "float32")

    @staticmethod
    def _nearest(op: Operator) -> bool:
        return isinstance(op.op, Resize) and op.op.mode == "nearest"

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The tables."""
        work = "f64" if op.inputs[0] is not None and op.inputs[0].dtype == "f64" else "f32"
        found = []
        for m in self._maps(op):
            found.append(TensorType("i32", m.index.shape))
            if not self._nearest(op):
                found.append(TensorType(work, m.index.shape))
        return tuple(found)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Tables first."""
        x, out = ins[0], outs[0]
        assert x is not None and out is not None
        if not out.size:
            return []
        found, nearest = self._maps(op), self._nearest(op)
        room, calls, args = iter(scratch), [], []
        steps = _strides(x.shape)
        for m in found:
            index = next(room)
            calls += _table(index, m.index)
            args += [index, steps[m.axis]]
            if not nearest:
                weights = next(room)
                calls += _table(weights, m.weights)
                args += [weights, m.index.shape[1]]
        axes = [m.axis for m in found]
        places = [[int(i == a) for i in range(len(out.shape))] for a in axes]
        still = [0 if i in axes else s for i, s in enumerate(steps)]
        w = walk(*joined(out.shape, [_strides(out.shape), still, *places]))
        edge = float(getattr(op.op, "extrapolation_value", 0.0))
        return [*calls, kernel(out.dtype, len(found), nearest=nearest)(out.size, w, out, x, edge, *args)]


def _table(target: Buffer, contents: np.ndarray) -> list[Call]:
    flat = View(("table", 0), 0, target.shape, (), target.dtype)
    return Table(flat, np.ascontiguousarray(contents).tobytes()).calls(lambda _: target)
