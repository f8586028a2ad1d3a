"""Resize of kind `nearest`, and its gradient, along one axis or two that are neighbours.

Seen as [lead, rows, columns, run]: positions along rows and columns are looked up in tables, runs are copied or added.
The gradient adds along columns first, then along rows, as the operator's own numerics do.
"""

from __future__ import annotations

import math

import numpy as np

from ....language.ir import Operator
from ....language.types import Operands, Value, present
from ....ops.vision.resize import Interpolation
from ....ops.vision.resize_maps import indices
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, enough, family
from .copy import WORDS, words

#: elements of the larger operand below which NumPy, which goes image by image, does as well
ENOUGH = 1 << 10


@kernel
def spread(x, y, rows, columns, p, begin, end):
    """Rows of y; `p`: rows and columns of x, of y, length of a run; `rows`, `columns`: where y's are in x."""
    run = p[4]
    for item in range(begin, end):
        at = (item // p[2] * p[0] + rows[item % p[2]]) * p[1] * run
        to = item * p[3] * run
        for w in range(p[3]):
            a, b = at + columns[w] * run, to + w * run
            for c in range(run):
                y[b + c] = x[a + c]


@kernel
def collect(dy, dx, rows, columns, p, begin, end):
    """Rows of dx; `p` as in `spread`, x being dx; `rows`, `columns`: the first of y's that come from each of x's."""
    run = p[4]
    for item in range(begin, end):
        lead, h = item // p[0], item % p[0]
        for w in range(p[1]):
            first, count = columns[w], columns[w + 1] - columns[w]
            to = (item * p[1] + w) * run
            for c in range(run):
                dx[to + c] = 0
            for row in range(rows[h], rows[h + 1]):
                at = ((lead * p[2] + row) * p[3] + first) * run
                if count == 2:
                    for c in range(run):
                        dx[to + c] += dy[at + c] + dy[at + run + c]
                else:
                    for c in range(run):
                        total = dx[to + c] * 0
                        for i in range(count):
                            total += dy[at + i * run + c]
                        dx[to + c] += total


def _ends(op: Operator) -> tuple[Value, Value]:
    """The types of Resize's input and output, also for its gradient."""
    x, y = present(op.inputs[0], op.outputs[0])
    return (x, y) if op.op.name == "Resize" else (y, x)


def _axes(op: Operator) -> list[int]:
    """The resized axes, in order."""
    x, y = _ends(op)
    return sorted(axis for axis, _ in op.op.maps(x.shape, y.shape))  # type: ignore[attr-defined]


def _tables(op: Operator) -> tuple[list[np.ndarray], np.ndarray]:
    """Where rows and columns of the output are in the input, and `p` of the kernels."""
    rule = op.of(Interpolation)
    x, y = _ends(op)
    spans = dict(rule.maps(x.shape, y.shape))
    axes = _axes(op)
    tables = [indices(rule._key(), x.shape[a], y.shape[a], spans[a]) for a in axes]
    small, large = ([v.shape[a] for a in axes] for v in (x, y))
    if len(axes) == 1:
        tables, small, large = [*tables, np.zeros(1, np.int64)], [*small, 1], [*large, 1]
    return tables, np.array([*small, *large, math.prod(x.shape[axes[-1] + 1 :])], np.int64)


@family("Resize", "ResizeGrad")
class Nearest(Family):
    """Nearest resizing of all element types, and its gradient in float32 and float64."""

    def accepts(self, op: Operator) -> bool:
        """Large ones whose scales are positive: then y's positions rise with x's."""
        rule = op.of(Interpolation)
        x, y = _ends(op)
        if rule.mode != "nearest" or rule.coordinate_transformation_mode == "tf_crop_and_resize":
            return False
        supported = x.type.numpy.itemsize in WORDS if rule.name == "Resize" else x.dtype in ("f32", "f64")
        axes = _axes(op)
        near = len(axes) == 1 or (len(axes) == 2 and axes[1] == axes[0] + 1)
        if not (supported and near and x.size > 0 and max(x.size, y.size) >= enough(ENOUGH)):
            return False
        return all((np.diff(t) >= 0).all() for t in _tables(op)[0])

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        tables, p = _tables(op)
        lead = math.prod(_ends(op)[0].shape[: _axes(op)[0]])
        if op.op.name == "Resize":
            return [spread.call(words(ins[0]), words(outs[0]), *tables, p, work=lead * int(p[2]))]
        # those of one place are neighbours
        firsts = [np.searchsorted(t, np.arange(n + 1)) for t, n in zip(tables, p[:2].tolist(), strict=True)]
        dy, dx = ins[0].reshape(-1), outs[0].reshape(-1)
        return [collect.call(dy, dx, *firsts, p, work=lead * int(p[0]))]
