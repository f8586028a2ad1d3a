"""CheckFinite: a loss that ends the step if it is infinite or NaN."""

from __future__ import annotations

import numpy as np

from ...errors import NotFiniteError
from ...language.op import Op


class CheckFinite(Op, onnx="Identity"):
    """x, one number, if it is finite; the step fails before its updates if it is not.  Exported as Identity."""

    inplace = (0,)

    def infer(self, x):
        if not x.is_float or x.size != 1:
            raise self.fail("it takes one floating-point number", x)
        return (x,)

    def compute(self, ins, outs, scratch):
        if not np.isfinite(ins[0]).all():
            raise NotFiniteError(f"the loss is {float(ins[0].reshape(()))}")
        outs[0][...] = ins[0]

    def checks(self, ins, outs):
        return ((0, "finite"),)

    def gradient(self, b, ins, outs, grads):
        return [grads[0]]

    @classmethod
    def samples(cls, draw):
        for t in ("f64[]", "f32[1,1]", "f16[]"):
            yield draw.case(cls(), draw(t))
