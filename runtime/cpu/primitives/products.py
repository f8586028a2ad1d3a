"""Matrix products of 16-bit factors by oneDNN: sums in float32, rounded once; all threads work on one product."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....language.ir import Operator
from ....ops.indexing.scatter import strides
from ....ops.linear.products import Gemm, MatMul
from ..device import dnnl
from .plans import Maker, Plan, planned


@dataclass(frozen=True)
class Factors:
    """y [batch..., m, n] = a [batch..., m, k] b [batch..., k, n] + bias [n]; batches have as many dimensions and are 1
    where they broadcast.  Strides in elements; all operands have one element type."""

    a: tuple[int, ...]
    a_strides: tuple[int, ...]
    b: tuple[int, ...]
    b_strides: tuple[int, ...]
    y: tuple[int, ...]
    y_strides: tuple[int, ...]
    dtype: str
    bias: bool = False


def factors(op: Operator) -> Factors | None:
    """The product that a MatMul or Gemm in 16 bits is; None where it is none, is empty, or scales anything."""
    rule = op.op
    if not isinstance(rule, (MatMul, Gemm)):
        return None
    types = [v.type for v in (*op.inputs, *op.outputs) if v is not None]
    kinds = {t.dtype for t in types}
    if len(kinds) != 1 or not kinds <= {"bf16", "f16"} or not all(t.size for t in types):
        return None
    a, b, y = types[0].shape, types[1].shape, types[-1].shape
    bias = len(types) == 4
    if len(a) < 2 or len(b) < 2 or (bias and types[2].shape not in ((y[-1],), (1, y[-1]))):
        return None
    if isinstance(rule, Gemm) and (rule.alpha != 1.0 or (bias and rule.beta != 1.0)):
        return None
    if len(b) == 2 and len(a) > 2 and not rule.transA:  # one matrix for all of the batch: its rows are one matrix
        a, y = (math.prod(a[:-1]), a[-1]), (math.prod(y[:-1]), y[-1])
    rank = len(y)
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    (a, a_strides), (b, b_strides) = _turned(a, rule.transA), _turned(b, rule.transB)
    return Factors(a, a_strides, b, b_strides, y, tuple(strides(y)), kinds.pop(), bias)


def _turned(shape: tuple[int, ...], swap: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides, of the transposed matrices where `swap`."""
    steps = tuple(strides(shape))
    if not swap:
        return shape, steps
    return (*shape[:-2], shape[-1], shape[-2]), (*steps[:-2], steps[-1], steps[-2])


@functools.lru_cache(maxsize=4096)
def plan(p: Factors) -> Plan | str:
    """The primitive of a product, on operands "a", "b", "bias" and "y", or why the library refuses it."""
    return planned(lambda made: add(made, p))


def add(maker: Maker, p: Factors, names: Sequence[str] = ("a", "b", "y")) -> None:
    """One primitive on operands of these names, and "bias"."""
    lib = maker.lib
    a, b = lib.layout(p.a, p.a_strides, p.dtype), lib.layout(p.b, p.b_strides, p.dtype)
    y = lib.layout(p.y, p.y_strides, p.dtype)
    one = (*(1 for _ in p.y[:-1]), p.y[-1])
    bias = lib.layout(one, strides(one), p.dtype) if p.bias else 0
    places = zip((dnnl.SRC, dnnl.WEIGHTS, dnnl.DST), (a, b, y), names, strict=True)
    arguments = {which: (layout, name, 0) for which, layout, name in places}
    if bias:
        arguments[dnnl.BIAS] = (bias, "bias", 0)
    maker.add(lib.product(a, b, bias, y), arguments)
