"""Pooling over windows in both layouts, and the gradients; see windows.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import TensorType
from ....ops.window import Window, full
from ..families import SharedFamily, family
from ..texts import Absent, Divisor, Fixed, Scratch, Text, Work, kernel
from .windows import from_windows, max_gather, max_pool, mean_of_large, mean_pool

#: planes of a device's item, channels first, where there is enough work, and how much that is
_PLANES, _MUCH = 4, 1 << 20
#: taps up to which the loops over a window are written out, and from which on a window is a warp's, channels first
_UNROLLED, _LARGE = 32, 64
#: spatial axes that the kernels count with
AXES = 3


def three(sizes: Sequence[int], fill: int) -> tuple[int, ...]:
    """One entry an axis of three."""
    return (*[fill] * (AXES - len(sizes)), *sizes)


def _form(rule: Any, w: Window, item: Sequence[int], columns: int) -> Fixed:
    end, total = full(rule.pads, 2 * len(w.kernel), 0)[len(w.kernel) :], 1
    if hasattr(rule, "counts"):
        counts = rule.counts(w)
        same = all(len(set(c)) <= 1 for c in counts)
        total = math.prod(c[0] for c in counts if c) if same else 0
    pads = (w.begin, end) if getattr(rule, "count_include_pad", 0) else ((), ())
    rows = (w.begin, *pads, item, (columns, total, 0))
    return Fixed((*(three(n, 1) for n in (w.kernel, w.strides, w.dilations)), *(three(n, 0) for n in rows)))


def over_places(
    text: Text, rule: Any, w: Window, operands: Sequence[Any], wanted: int = 0, columns: int = 0, device: bool = True
) -> list[Work]:
    """The work for all places of windows, or of their input; operands are [lead, ..., channels] or absent.

    `wanted`: see windows.py.  `columns`: taps, where the windows' side has such columns.
    """
    there = [a for a in operands if hasattr(a, "shape")]
    sizes, large = three(w.inp if text is from_windows else w.out, 1), text is mean_of_large
    lead, channels = there[0].shape[0], there[0].shape[-1]
    planes, block, vectors = 1, channels, False
    if device:
        vectors = channels % 8 == 0 and not any(a.address % (8 * a.type.numpy.itemsize) for a in there)
        planes = _PLANES if channels == 1 and lead * math.prod(sizes) >= _MUCH and not large else 1
        block = 8 if vectors else planes
    groups = channels // block if channels > 1 else 1
    items = lead * math.prod(sizes[:2]) if not device else -(-lead // planes) * math.prod(sizes) * groups
    form = _form(rule, w, (planes, block, wanted), columns)
    how: dict[str, Any] = {"whole": vectors, "unrolled": w.taps <= _UNROLLED, "lanes": 32 if large else 1}
    return [text(*operands, form, Divisor((*sizes, groups)), work=items, **how)]


class Windows(SharedFamily):
    """Channels last on every place, channels first on devices."""

    def accepts(self, op: Operator) -> bool:
        """At most three spatial axes; on a processor enough work, and nothing empty."""
        values = (*op.reads(), *op.writes())
        if not super().accepts(op) or any(v.ndim > AXES + 2 or v.dtype == "bool" for v in values):
            return False
        return self.place.device or (op.op.name.startswith("ChannelsLast") and all(v.size for v in values))

    def over(self, op: Operator, text: Text, small: Any, large: Any, *operands: Any, wanted: int = 0) -> list[Work]:
        """The work over some operands; `small`, `large`: those at windows and at elements."""
        if not (small.size and large.size):
            return []
        last = op.op.name.startswith("ChannelsLast")
        rule: Any = op.op.plain if last else op.op  # type: ignore[attr-defined]

        def spatial(a: Any) -> tuple[int, ...]:
            return a.shape[1:-1] if last else a.shape[2:]

        def five(a: Any) -> Any:
            if a is None or isinstance(a, (Absent, Scratch)):
                return a or Absent(5)
            lead, channels = (a.shape[0], a.shape[-1]) if last else (a.shape[0] * a.shape[1], 1)
            return a.reshape(lead, *three(spatial(a), 1), channels)

        w = rule.window(spatial(large), spatial(small))
        return over_places(text, rule, w, [*map(five, operands)], wanted, device=self.place.device)


@family("MaxPool", "ChannelsLastMaxPool")
class MaxPool(Windows):
    """Values, indices, window numbers."""

    def accepts(self, op: Operator) -> bool:
        """Flat indices are left to the operator itself on a processor."""
        return super().accepts(op) and (self.place.device or len(op.outputs) < 2 or op.outputs[1] is None)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Numbers of a row's windows, where they are wanted."""
        if self.place.device or len(op.outputs) < 3 or op.outputs[2] is None:
            return ()
        return (TensorType("i32", (math.prod(op.outputs[2].shape[:-2]), op.outputs[2].shape[-1])),)

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """All windows."""
        y, indices, number = outs[:3]
        some = Scratch(scratch[0] if scratch else None) if self.place.device or scratch else Absent(2)
        wanted = (number is not None) + 2 * (indices is not None)
        return self.over(op, max_pool, y, ins[0], ins[0], y, number, indices, some, wanted=wanted)


@family("MaxPoolGrad", "ChannelsLastMaxPoolGrad")
class MaxPoolGrad(Windows):
    """(window numbers, dy) → dx."""

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """All elements."""
        return self.over(op, from_windows, ins[1], outs[0], ins[0], ins[1], outs[0], wanted=1)


@family("MaxPoolGather", "ChannelsLastMaxPoolGather")
class MaxPoolGather(Windows):
    """(window numbers, x) → elements, as they are; a processor leaves them to NumPy, whose zeros have no sign."""

    def accepts(self, op: Operator) -> bool:
        """On devices."""
        return self.place.device and super().accepts(op)

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """All windows."""
        x, y = ins[1], outs[0]
        if x.dtype == "bf16":  # a float's NaN would be another one
            x, y = x.view(np.dtype(np.uint16)), y.view(np.dtype(np.uint16))
        return self.over(op, max_gather, y, x, ins[0], x, y)


@family("AveragePool", "AveragePoolGrad", "ChannelsLastAveragePool", "ChannelsLastAveragePoolGrad")
class AveragePool(Windows):
    """Both directions."""

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """All windows, or all elements."""
        if op.op.name.endswith("Grad"):
            return self.over(op, from_windows, ins[0], outs[0], None, ins[0], outs[0])
        large = not op.op.name.startswith("ChannelsLast") and math.prod(op.op.kernel_shape) >= _LARGE  # type: ignore[attr-defined]
        return self.over(op, mean_of_large if large else mean_pool, outs[0], ins[0], ins[0], outs[0])


@kernel
def at_largest(indices, dy, dx, sizes, begin, end):
    """dy at the flat indices (channels first), zeros elsewhere, of [images, *sizes]; elements."""
    for i in range(begin, end):
        place, image = i // sizes[1] % sizes[0], i // sizes[1] // sizes[0]
        row = image * sizes[1] + i % sizes[1]
        dx[i] = dy[row] if indices[row] == row * sizes[0] + place else dx.dtype.type(0)


@family("GlobalMaxPoolGrad", "ChannelsLastGlobalMaxPoolGrad")
class GlobalMaxPoolGrad(Windows):
    """(flat indices, dy) → dx."""

    def accepts(self, op: Operator) -> bool:
        """Left to the operator itself on a processor."""
        return self.place.device and self.place.serves(op)

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """All elements."""
        dx, last = outs[0], op.op.name.startswith("ChannelsLast")
        size, channels = math.prod(dx.shape[1:-1] if last else dx.shape[2:]), dx.shape[-1] if last else 1
        operands = [a.reshape(-1) for a in (*ins[:2], dx)]
        return [at_largest(*operands, Divisor((size, channels)), work=dx.size)] if dx.size else []
