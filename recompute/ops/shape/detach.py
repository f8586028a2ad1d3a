"""Detach: a value through which no gradient flows."""

from __future__ import annotations

from dataclasses import dataclass

from .reshape import Copied


@dataclass(frozen=True)
class Detach(Copied, onnx="Identity"):
    """x, through which no gradient flows (PyTorch's `detach`); exported as Identity."""

    def gradient(self, b, ins, outs, grads):
        """None."""
        return [None]

    @classmethod
    def samples(cls, draw):
        """One matrix."""
        yield draw.case(cls(), draw("f64[2,3]"), gradient=False)
