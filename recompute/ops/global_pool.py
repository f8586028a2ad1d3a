"""Pooling over all spatial positions."""

from __future__ import annotations

from dataclasses import dataclass

from ..op import Op
from .reduce import ReduceMean


def _spatial(ndim: int) -> tuple[int, ...]:
    return tuple(range(2, ndim))


@dataclass(frozen=True)
class GlobalAveragePool(Op, onnx=True):
    """The mean over all spatial axes, which become 1."""

    def infer(self, x):
        """[n, c, 1, ...]."""
        if x.ndim < 3 or not x.is_float:
            raise self.fail("needs floats with a spatial axis", x)
        return (x.with_shape((*x.shape[:2], *(1,) * (x.ndim - 2))),)

    def compute(self, xp, ins, outs, scratch):
        """One mean."""
        x = ins[0].reshape(*ins[0].shape[:2], -1)
        xp.mean(x, axis=2, out=outs[0].reshape(x.shape[:2]))

    def cost(self, ins, outs):
        """One operation an input element."""
        return ReduceMean().cost(ins, outs)

    def gradient(self, b, ins, outs, grads):
        """dy / n repeated; nothing is kept."""
        return ReduceMean(axes=_spatial(ins[0].ndim)).gradient(b, ins, outs, grads)

    @classmethod
    def samples(cls, draw):
        """1 to 3 axes."""
        yield draw.case(cls(), draw("f64[2,3,2,2]"))
        yield draw.case(cls(), draw("f64[2,2,3]"))
        yield draw.case(cls(), draw("f32[1,2,2,1,3]"))
