"""Moving averages of parameters."""

from __future__ import annotations

import numpy as np

from ...language.factors import aligned
from ...language.formulas import through_expansion
from ...language.op import Op
from ...language.types import TensorType
from .base import PART, work_dtype


class AverageUpdate(Op):
    """(average, w, keep) → average ← keep · average + (1 - keep) · w, in place.

    The average of an f16 or bf16 parameter is f32; `keep` is f32[]: 0 makes the average w, 1 leaves it.
    """

    updates = (0,)

    def infer(self, average, w, keep):
        if not w.is_float or average != TensorType(work_dtype(w), w.shape) or keep != TensorType("f32", ()):
            raise self.fail("needs an average of w's shape (f32 for 16-bit floats), w, and f32[]", average, w, keep)
        return (average,)

    def axis_factors(self, ins, outs):
        return aligned(ins, outs)

    def scratch(self, ins, outs):
        return (TensorType(ins[0].dtype, (min(ins[0].size, PART),)),)

    def compute(self, ins, outs, scratch):
        kind = outs[0].dtype.type
        average, w, out = ins[0].reshape(-1), ins[1].reshape(-1), outs[0].reshape(-1)
        keep = ins[2].astype(kind)
        rest = kind(1) - keep
        for start in range(0, w.size, PART):
            here = slice(start, min(start + PART, w.size))
            part = scratch[0][: here.stop - start]
            part[...] = w[here]
            np.multiply(part, rest, out=part)
            np.multiply(average[here], keep, out=out[here])
            np.add(out[here], part, out=out[here])

    def gradient(self, b, ins, outs, grads):
        """None: averages are not trained."""
        return [None, None, None]

    def element(self, *inputs):
        return through_expansion(self, inputs)

    def expand(self, b, average, w, keep):
        wide = w if w.dtype == average.dtype else b.Cast(w, to=average.dtype)
        keep = keep if keep.dtype == average.dtype else b.Cast(keep, to=average.dtype)
        rest = b.Sub(b.constant(1.0, keep), keep)
        return (b.Add(b.Mul(average, keep), b.Mul(wide, rest)),)

    @classmethod
    def samples(cls, draw):
        """Two types, 16-bit floats, nothing, more than a part, the first step."""
        keep = np.array(0.75, np.float32)
        for text in ("f64[3,4]", "f32[7]", "f64[0]", "f64[]", f"f32[{PART + 5}]"):
            yield draw.case(cls(), draw(text), draw(text), keep)
        yield draw.case(cls(), draw("f32[5]"), draw("f16[5]"), keep)
        yield draw.case(cls(), draw("f32[5]"), draw("f32[5]"), np.array(0, np.float32))
