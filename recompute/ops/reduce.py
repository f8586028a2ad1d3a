"""Reductions over axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..op import Cost, Op
from ..types import TensorType
from .common import normal_axes
from .shape import reshape


class Reduce(Op, abstract=True):
    """Reduces over `axes` (None: all); reduced dimensions become 1, or go away with `keepdims=0`."""

    axes: tuple[int, ...] | None
    keepdims: int
    ufunc: ClassVar[str]

    def infer(self, x: TensorType) -> tuple[TensorType, ...]:  # type: ignore[override]
        """x's type with the reduced dimensions 1 or gone."""
        axes = normal_axes(self.axes, x.ndim, self)
        if self.keepdims:
            return (x.with_shape([1 if i in axes else d for i, d in enumerate(x.shape)]),)
        return (x.with_shape([d for i, d in enumerate(x.shape) if i not in axes]),)

    def compute(self, xp: Any, ins: Any, outs: Any, scratch: Any) -> None:
        """One reduction call, into the output."""
        axes = normal_axes(self.axes, ins[0].ndim, self)
        getattr(xp, self.ufunc)(ins[0], axis=axes, keepdims=bool(self.keepdims), out=outs[0])

    def cost(self, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]) -> Cost:
        """One operation an input element."""
        return Cost(ins[0].size if ins[0] else 0, super().cost(ins, outs).bytes)

    def keep(self, b: Any, x: Any, reduced: Any) -> Any:
        """A reduced value with its reduced dimensions as ones, so that it broadcasts against x."""
        axes = normal_axes(self.axes, x.ndim, self)
        return reshape(b, reduced, [1 if i in axes else d for i, d in enumerate(x.shape)])

    def count(self, x: Any) -> int:
        """How many elements each result was made of."""
        return math.prod(x.shape[a] for a in normal_axes(self.axes, len(x.shape), self))

    def export(self, g: Any, ins: Sequence[str], outs: Sequence[str]) -> bool:
        """The ONNX operator of the same name, axes as an input."""
        axes = [] if self.axes is None else [g.ints(self.axes)]
        empty = self.axes == ()
        g.node(self.name, [*ins, *axes], outs, keepdims=self.keepdims, noop_with_empty_axes=int(empty))
        return True

    @classmethod
    def from_onnx(cls, node: Any) -> Any:
        """Axes from the attribute or the second input."""
        axes = node.attributes.get("axes")
        if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
            axes = node.need_constant(1, "axes").tolist()
        if not axes:
            axes = [] if node.attributes.get("noop_with_empty_axes", 0) else None
        op = cls(axes=None if axes is None else tuple(axes), keepdims=node.attributes.get("keepdims", 1))  # type: ignore[call-arg]
        return node.emit(op, node.inputs[0])

    @classmethod
    def samples(cls, draw: Any) -> Any:
        """All axes, some, negative ones, none, with and without keepdims."""
        for axes, keep in ((None, 1), (None, 0), ((1,), 1), ((0, -1), 0), ((), 1)):
            yield draw.case(cls(axes=axes, keepdims=keep), draw("f64[2,3,4]"))  # type: ignore[call-arg]


@dataclass(frozen=True)
class ReduceSum(Reduce):
    """Sum."""

    axes: tuple[int, ...] | None = None
    keepdims: int = 1
    ufunc = "sum"

    def gradient(self, b, ins, outs, grads):
        """dy repeated; nothing is kept."""
        return [b.Expand(self.keep(b, ins[0], grads[0]), shape=ins[0].shape)]


@dataclass(frozen=True)
class ReduceMean(Reduce):
    """Mean."""

    axes: tuple[int, ...] | None = None
    keepdims: int = 1
    ufunc = "mean"

    def gradient(self, b, ins, outs, grads):
        """dy / n repeated; nothing is kept."""
        dy = self.keep(b, ins[0], grads[0])
        scaled = b.Mul(dy, b.constant(1.0 / max(self.count(ins[0]), 1), dy))
        return [b.Expand(scaled, shape=ins[0].shape)]
