"""Detach: a value through which no gradient flows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...language.layouts import Turned, turned_whole
from .reshape import Move


@dataclass(frozen=True)
class Detach(Move):
    """x, through which no gradient flows (PyTorch's `detach`)."""

    def infer(self, x):
        """The same type."""
        return (x,)

    def compute(self, xp, ins, outs, scratch):
        """One copy."""
        outs[0][...] = ins[0]

    def views(self, ins, outs):
        """The same bytes."""
        return (0,)

    def gradient(self, b, ins, outs, grads):
        """None."""
        return [None]

    def export(self, g, ins, outs):
        """Identity: an exported step has its gradients already."""
        g.node("Identity", ins, outs)
        return True

    @classmethod
    def samples(cls, draw):
        """One matrix."""
        yield draw.case(cls(), draw("f64[2,3]"), gradient=False)

    def channels_last(self, ins: Any, outs: Any, rank: int) -> Turned | None:
        """Everything is turned."""
        return turned_whole(self, ins, outs, rank)
