"""Values through which no gradient flows, ever or on a condition."""

from __future__ import annotations

import numpy as np

from ...language.factors import aligned
from .reshape import Copied


class Detach(Copied, onnx="Identity"):
    """x, through which no gradient flows (PyTorch's `detach`); exported as Identity."""

    def gradient(self, b, ins, outs, grads):
        return [None]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[2,3]"), gradient=False)


class Gate(Copied):
    """x, of one bool's condition: where it is false no gradient flows, whatever it is.

    What a branch reads that is computed but not chosen: its operators may have gradients that are infinite or NaN.
    """

    autocast_inputs = (0,)

    def infer(self, x, condition):
        if condition.dtype != "bool" or condition.shape:
            raise self.fail("the condition is one bool", x, condition)
        return (x,)

    def gradient(self, b, ins, outs, grads):
        """dy or 0."""
        return [b.Where(ins[1], grads[0], b.constant(0, grads[0])), None]

    def axis_factors(self, ins, outs):
        return aligned(ins, outs)

    def channels_last(self, ins, outs, rank):
        return None

    def export(self, g, ins, outs):
        g.node("Identity", ins[:1], outs)
        return True

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[2,3]"), np.array(True))
        yield draw.case(cls(), draw("f64[2,3]"), np.array(False), gradient=False)
