"""Element-wise numerics in several steps, piece by piece: temporaries stay in the cache and are small.

An operator whose formula takes several passes over its tensors walks over tiles of `TILE` elements; the temporaries
of one tile are declared as scratch.  float16 and bfloat16 are computed in float32 within a tile.
"""

from __future__ import annotations

import numpy as np

from ..language.types import Operands, TensorType, Types, dtype_name, need
from .array_steps import ArraySteps, array_steps
from .common import Elementwise, arity

#: elements of a tile: 128 KiB of float32, of which several fit the second-level cache
TILE = 1 << 15


def wide(dtype: str) -> str:
    """The element type in which values of `dtype` are computed and summed: float32 for the half precisions."""
    return "f32" if dtype in ("f16", "bf16") else dtype


class Tiled(Elementwise, abstract=True):
    """Inputs of one type (no broadcasting) to one output of that type: the formula of an element, tile by tile."""

    #: a tile whose output would overwrite its input is computed beside it first
    inplace = (1, 0, 2)
    floats = True

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        self.need(*inputs, count=arity(type(self)))
        first = need(inputs[0])
        if any(t != first for t in inputs):
            raise self.fail("types differ", *inputs)
        if self.floats and not first.is_float:
            raise self.fail("takes floats only", *inputs)
        return (first,)

    def _steps(self, dtype: str, count: int) -> tuple[ArraySteps, int]:
        """The formula in the type that it is computed in, and how many temporaries it has of that type."""
        steps = array_steps(self, (wide(dtype),) * count)
        return steps, steps.temporaries.count(wide(dtype))

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """The temporaries of one tile; of the half precisions also its inputs and output in float32."""
        x = need(ins[0])
        size = min(x.size, TILE)
        steps, work = self._steps(x.dtype, len(ins))
        rows = work + (len(ins) + 1 if wide(x.dtype) != x.dtype else 1)
        floats, masks = (TensorType(wide(x.dtype), (rows, size)),), len(steps.temporaries) - work
        return (*floats, TensorType("bool", (masks, size))) if masks else floats

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """The formula for each piece; of the half precisions through float32 copies of it."""
        steps, work = self._steps(dtype_name(outs[0].dtype), len(ins))
        flat = [a.reshape(-1) for a in ins]
        out = outs[0].reshape(-1)
        temps = [row for s in scratch for row in s]
        copied = scratch[0].dtype != outs[0].dtype
        beside = not copied and any(np.may_share_memory(out, a) for a in flat)
        for start in range(0, out.size, TILE):
            stop = min(start + TILE, out.size)
            here = [t[: stop - start] for t in temps]
            pieces = [a[start:stop] for a in flat]
            if not copied:
                spare = here.pop(work)
                steps.run(pieces, spare if beside else out[start:stop], here)
                if beside:
                    out[start:stop] = spare
                continue
            extra = here[work : work + len(pieces) + 1]
            for target, source in zip(extra, pieces, strict=False):
                target[...] = source
            here = here[:work] + here[work + len(extra) :]
            steps.run(extra[:-1], extra[-1], here)
            out[start:stop] = extra[-1]
