"""Resize and its gradient: on a device one launch for each resized axis, which computes its weights (resize_maps.py).

On a processor `nearest` along one axis or two that are neighbours.  Seen as [lead, rows, columns, run]: positions along
rows and columns are looked up in tables, runs are copied or added.  The gradient adds along columns first, then along
rows, as the operator's own numerics do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import TensorType, Value, present
from ....ops.vision.resize import Interpolation
from ....ops.vision.resize_maps import COORDINATES, NEAREST, Span, indices
from ..families import SharedFamily, family
from ..texts import Divisor, Fixed, Scratch, Work, kernel
from .resize_maps import ROWS, along, back_along, nearest_along, outside, unchanged

#: elements of the larger operand below which NumPy, which goes image by image, does as well
ENOUGH = 1 << 10
_WORDS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
#: in the order of how many elements they read on each side
_MODES = ("nearest", "linear", "cubic")


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


def _words(a: Any) -> Any:
    """Elements as whole numbers."""
    kind = TensorType(_WORDS[a.dtype.itemsize if isinstance(a, np.ndarray) else a.type.numpy.itemsize], a.shape)
    return a.view(kind.numpy) if isinstance(a, np.ndarray) else dataclasses.replace(a, type=kind)


@family("Resize", "ResizeGrad")
class Resizing(SharedFamily):
    """All of them on a device; on a processor nearest resizing, and its gradient in float32 and float64."""

    def accepts(self, op: Operator) -> bool:
        """All types for `nearest`, else floats; gradients of parts that are not turned round."""
        if not self.place.device:
            return self._nearest(op)
        rule = op.of(Interpolation)
        forward = rule.mode == "nearest" and rule.name == "Resize"
        n = len(rule.roi) // 2
        turned = rule.name == "ResizeGrad" and any(a > b for a, b in zip(rule.roi[:n], rule.roi[n:], strict=True))
        floats = all(v.dtype in ("f16", "bf16", "f32", "f64") for v in (*op.reads(), *op.writes()))
        return self.place.serves(op) and (forward or floats) and not turned and min(rule.scales, default=1) > 0

    def _nearest(self, op: Operator) -> bool:
        """Large ones whose scales are positive: then y's positions rise with x's."""
        rule = op.of(Interpolation)
        x, y = _ends(op)
        if rule.mode != "nearest" or rule.coordinate_transformation_mode == "tf_crop_and_resize":
            return False
        supported = x.type.numpy.itemsize in _WORDS if rule.name == "Resize" else x.dtype in ("f32", "f64")
        axes = _axes(op)
        near = len(axes) == 1 or (len(axes) == 2 and axes[1] == axes[0] + 1)
        if not (supported and near and x.size > 0 and max(x.size, y.size) >= self.place.enough(ENOUGH)):
            return False
        return all((np.diff(t) >= 0).all() for t in _tables(op)[0])

    def _steps(self, op: Operator) -> Iterator[tuple[int, Span, tuple[int, ...], tuple[int, ...]]]:
        """(axis, what is done along it, shape before, shape after), in order."""
        rule = op.of(Interpolation)
        (x,), (y,) = ([v.shape for v in vs if v is not None] for vs in (op.inputs, op.outputs))
        back = rule.name == "ResizeGrad"
        maps = rule.maps(*((y, x) if back else (x, y)))
        now = tuple(x)
        for axis, span in reversed(maps) if back else maps:
            after = (*now[:axis], y[axis], *now[axis + 1 :])
            yield axis, span, now, after
            now = after

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Results between the axes; 16-bit floats as float32."""
        if not self.place.device:
            return ()
        rule = op.of(Interpolation)
        t = next(iter(op.reads())).type
        wide = t.dtype in ("f16", "bf16") and (rule.mode != "nearest" or rule.name == "ResizeGrad")
        return tuple(TensorType("f32" if wide else t.dtype, s[3]) for s in list(self._steps(op))[:-1])

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """An axis at a time, or (on a processor) all at once."""
        x, y = present(ins[0], outs[0])
        if not self.place.device:
            return self._at_once(op, x, y)
        steps = list(self._steps(op))
        if not steps or not x.size:
            return [unchanged(_words(x).reshape(-1), _words(y).reshape(-1), work=y.size)]
        stages = [x, *scratch, y]
        works = [self._along(op.op, *s, a, b) for s, a, b in zip(steps, stages, stages[1:], strict=False)]
        rule: Any = op.op
        if rule.name == "Resize" and rule.coordinate_transformation_mode == "tf_crop_and_resize":
            for axis, span, *_ in steps:
                near, inner = y.shape[axis], math.prod(y.shape[axis + 1 :])
                more = np.array([*span, 0, 0], np.float64), _rule(rule), Divisor((near, inner)), x.shape[axis]
                value = float(rule.extrapolation_value)
                works.append(outside(y.reshape(-1, near, inner), value, *more, work=y.size))
        return works

    def _at_once(self, op: Operator, x: Any, y: Any) -> list[Work]:
        tables, p = _tables(op)
        lead = math.prod(_ends(op)[0].shape[: _axes(op)[0]])
        if op.op.name == "Resize":
            return [spread(_words(x).reshape(-1), _words(y).reshape(-1), *tables, p, work=lead * int(p[2]))]
        # those of one place are neighbours
        firsts = [np.searchsorted(t, np.arange(n + 1)) for t, n in zip(tables, p[:2].tolist(), strict=True)]
        return [collect(x.reshape(-1), y.reshape(-1), *firsts, p, work=lead * int(p[0]))]

    def _along(
        self, op: Any, axis: int, span: Span, before: Sequence[int], after: Sequence[int], x: Any, y: Any
    ) -> Work:
        shrink = min(span[0], 1.0) if op.antialias and op.mode != "nearest" else 1.0
        reach, back = math.ceil(_MODES.index(op.mode) / shrink), op.name == "ResizeGrad"
        rows, near, inner = math.prod(before[:axis]), after[axis], math.prod(before[axis + 1 :])
        x, y = x.reshape(rows, before[axis], inner), y.reshape(rows, near, inner)
        table = np.array([*span, op.cubic_coeff_a, shrink], np.float64)
        like = np.zeros(1, np.float32 if op.mode == "nearest" else np.float64)
        more = table, like, _rule(op, reach, scaled=shrink < 1.0), Divisor((near, inner))
        work = -(-rows // ROWS) * near * inner
        if op.mode == "nearest" and not back:
            return nearest_along(_words(x), _words(y), *more, work=work)
        sums = Scratch(None, "f64" if y.dtype == "f64" else "f32")
        return (back_along if back else along)(x, y, sums, *more, work=work)


def _rule(op: Any, reach: int = 0, *, scaled: bool = False) -> Fixed:
    """See resize_maps.py."""
    kinds = _MODES.index(op.mode), COORDINATES.index(op.coordinate_transformation_mode), NEAREST.index(op.nearest_mode)
    return Fixed((kinds, (int(bool(op.exclude_outside)), int(scaled), reach)))
