"""stub"""
from __future__ import annotations
import dataclasses
from dataclasses import dataclass
import numpy as np
from ...language.op import Op
from ...language.types import TensorType
KINDS = ("gaussian", "rademacher", "rows", "dct", "dft")
@dataclass(frozen=True)
class Sketch(Op):
    """stub"""
    random = True
    rows: int = 1
    kind: str = "rows"
    seed: int = 0
    def infer(self, x, step):
        return (x.with_shape((self.rows, x.shape[-1])),)
    def compute(self, xp, ins, outs, scratch):
        x = ins[0].reshape(-1, ins[0].shape[-1])
        rng = np.random.Generator(np.random.Philox(key=[self.seed, int(ins[1])]))
        at = np.sort(rng.permutation(len(x))[: self.rows])
        outs[0][...] = x[at] * np.float32((len(x) / self.rows) ** 0.5)
    def gradient(self, b, ins, outs, grads):
        return [None, None]
