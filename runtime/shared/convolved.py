"""A common form of all convolution operators and layouts, for kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...language.ir import Operator
from ...ops.channels_last import ChannelsLast
from ...ops.convolution.conv import Conv, ConvGradInput, ConvGradWeight, Convolution
from ...ops.convolution.numerics import Geometry
from ...ops.convolution.transposed import ConvTranspose


@dataclass(frozen=True)
class Convolved:
    """One of a convolution's three products.

    `kind`: "output" (y from x and w), "input" (x's gradient from w and y's) or "weight" (w's from x and y's).
    x is [n, c, spatial...] and y [n, m, spatial...], channels-last where `last`; w is [m, c / group, kernel...].
    `bias`: one more operand is added to the result's channels.
    """

    kind: str
    geometry: Geometry
    last: bool
    bias: bool

    @property
    def x(self) -> tuple[int, ...]:
        """The input's shape, channels second."""
        g = self.geometry
        return (g.batch, g.group * g.cg, *g.window.inp)

    @property
    def w(self) -> tuple[int, ...]:
        """The weight's shape."""
        g = self.geometry
        return (g.group * g.mg, g.cg, *g.window.kernel)

    @property
    def y(self) -> tuple[int, ...]:
        """The output's shape, channels second."""
        g = self.geometry
        return (g.batch, g.group * g.mg, *g.window.out)

    @property
    def bytes(self) -> int:
        """Bytes of x, w and y in float32."""
        return 4 * sum(math.prod(shape) for shape in (self.x, self.w, self.y))

    @property
    def end(self) -> tuple[int, ...]:
        """Padding behind each spatial axis that the last window just reaches (less than 0: elements left over)."""
        w = self.geometry.window
        axes = zip(w.inp, w.out, w.kernel, w.strides, w.dilations, w.begin, strict=True)
        return tuple((o - 1) * s + (k - 1) * d + 1 - i - b for i, o, k, s, d, b in axes)


#: operator → (kind, positions of x, w and y among inputs and then outputs)
_ROLES: dict[type, tuple[str, tuple[int, int, int]]] = {
    Conv: ("output", (0, 1, -1)),
    ConvGradInput: ("input", (-1, 0, 1)),
    ConvGradWeight: ("weight", (0, -1, 1)),
    ConvTranspose: ("input", (-1, 1, 0)),
}


def convolved(op: Operator, dtypes: Sequence[str] = ("f32",), *, empty: bool = False) -> Convolved | None:
    """An operator's convolution; None if it is none, not in these types, or (unless `empty`) empty."""
    plain = op.op.plain if isinstance(op.op, ChannelsLast) else op.op
    if not isinstance(plain, Convolution) or type(plain) not in _ROLES:
        return None
    types = [None if v is None else v.type for v in (*op.inputs, *op.outputs)]
    if any(t is not None and (t.dtype not in dtypes or not (t.size or empty)) for t in types):
        return None
    ins, outs = types[: len(op.inputs)], types[len(op.inputs) :]
    last = isinstance(op.op, ChannelsLast)
    if isinstance(op.op, ChannelsLast):
        ins = list(op.op.plain_types(ins, op.op.activations))
        outs = list(op.op.plain_types(outs, op.op.results))
    kind = _ROLES[type(plain)][0]
    geometry: Geometry = plain.shapes(ins, outs)
    return Convolved(kind, geometry, last, kind != "weight" and len(ins) > 2 and ins[2] is not None)


def operands(op: Operator, ins: Sequence[Any], outs: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """The arrays x, w, y and the bias (None: there is none) of an operator that `convolved` knows."""
    plain = op.op.plain if isinstance(op.op, ChannelsLast) else op.op
    kind, roles = _ROLES[type(plain)]
    x, w, y = (outs[0] if r < 0 else ins[r] for r in roles)
    return x, w, y, ins[2] if kind != "weight" and len(ins) > 2 else None
