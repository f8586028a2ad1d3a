"""Dropout on a part of a tensor that is cut inside: the numbers of the whole, in runs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ...language.factors import Place, aligned, needed_whole
from .draws import Draw, Dropout, drop, export_drop
from .philox import stream


class DropoutPart(Draw):
    """(x, step) → x / (1 - ratio) where kept, else 0; and the mask of what is kept (optional), as `Dropout` does.

    x is a part of a larger tensor: `run` elements one after the other draw what the larger one draws there, and the
    next run begins `skip` elements behind the begin of this one.
    """

    ratio: float = 0.5
    seed: int = 0
    first: int = 0
    run: int = 1
    skip: int = 1

    inplace = (0,)

    def infer(self, x, step):
        self.check_step(step)
        if not 0 <= self.ratio < 1 or not 1 <= self.run <= self.skip < 1 << 56 or x.size % self.run:
            raise self.fail("ratio must be in [0, 1), and x consist of whole runs that do not overlap", x, step)
        return x, x.with_dtype("bool")

    def scratch(self, ins, outs):
        """A tile of numbers and of comparisons."""
        return Dropout.scratch(self, ins, outs)  # type: ignore[arg-type]

    def compute(self, ins, outs, scratch):
        x, y = ins[0].reshape(-1), outs[0].reshape(-1)
        mask = outs[1].reshape(-1) if len(outs) > 1 and outs[1] is not None else None
        for begin in range(0, x.size, self.run):
            fill = stream(self.seed, ins[1], self.first + begin // self.run * self.skip)
            run = slice(begin, begin + self.run)
            drop(self.ratio, fill, (x[run], y[run], None if mask is None else mask[run]), scratch)

    def axis_factors(self, ins, outs):
        """The outermost axis, if each of its slices has whole runs; the others are needed whole."""
        lead = next((a for a, d in enumerate(ins[0].shape) if d != 1), 0)
        factors = aligned(ins, outs)
        whole = math.prod(ins[0].shape[lead + 1 :]) % self.run == 0
        return (*factors[: lead + whole], *needed_whole(factors[lead + whole :]))

    def sliced(self, factor, start, size, outs):
        """The same numbers: those of the runs before the slice are left out."""
        place = factor.outputs[0]
        before = start * place.inner * math.prod(outs[0].shape[place.axis + 1 :])
        return dataclasses.replace(self, first=self.first + before // self.run * self.skip)

    def gradient(self, b, ins, outs, grads):
        """This dropout of dy."""
        return [b.emit(self, grads[0], ins[1]), None]

    def inference(self, b, ins, running):
        return Dropout.inference(self, b, ins, running)  # type: ignore[arg-type]

    def export(self, g, ins, outs):
        """The numbers of all runs one after the other."""
        places = [self.first + k * self.skip for k in range(g.type(ins[0]).size // self.run)]
        return export_drop(g, self, ins, outs, self.run, places)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(ratio=0.3, seed=5, first=3, run=5, skip=20), draw("f64[3,5]"), np.array(2))
        yield draw.case(cls(ratio=0.5, seed=1, run=4, skip=4), draw("f32[2,2,4]"), np.array(0), want=1)


def part_of(op: Any, place: Place, rank: int, n: int, shape: tuple[int, ...]) -> DropoutPart | None:
    """Dropout on a rank's part of a tensor of `shape` that is cut at `place` among n ranks; None if it cannot be."""
    length = place.inner * math.prod(shape[place.axis + 1 :])
    if isinstance(op, Dropout):
        return DropoutPart(op.ratio, op.seed, op.first + rank * length, length, n * length)
    if isinstance(op, DropoutPart) and op.run == n * length:
        return dataclasses.replace(op, first=op.first + rank * length, run=length)
    return None
