"""Costs of a step: floating-point operations, bytes read and written, and seconds by a device's rates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from ..devices import Device

#: operations that only change what an array is called: XLA shares the buffer
VIEWS = ("reshape", "squeeze", "expand_dims", "stop_gradient", "name", "copy", "optimization_barrier", "pvary")
#: operations that XLA computes inside whatever reads them; JAX puts a `reduce_precision` on each value that is saved
FUSED = ("broadcast_in_dim", "iota", "reduce_precision")
#: operations that read and write memory of their own; XLA joins all others with what they read and what reads them
_MOVING = ("dot_general", "conv", "gather", "scatter", "dynamic", "sort", "top_k", "transpose", "concatenate", "pad",
           "reduce", "arg", "cum", "custom", "pallas", "ffi", "fft", "select_and", "random_bits", "cholesky",
           "triangular", "lu", "qr", "svd", "eigh", "rng", "threefry")  # fmt: skip


def nbytes(aval: Any) -> int:
    """Bytes of a value; 0 for tokens and other values without elements."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)


def flops(equation: Any) -> float:
    """Floating-point operations of an equation: 2 for each multiplication with addition, else 1 for each element.

    A scan counts its body as often as it runs, a `cond` its dearest branch, a `while` one round.
    """
    name, params = equation.primitive.name, equation.params
    elements = sum(math.prod(v.aval.shape) for v in equation.outvars if hasattr(v.aval, "shape"))
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * elements * math.prod(equation.invars[0].aval.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        return 2.0 * elements * math.prod(kernel) / max(1, kernel[params["dimension_numbers"].rhs_spec[0]])
    inner = [sum(map(flops, jaxpr.eqns)) for jaxpr in _jaxprs(params)]
    if inner:
        return max(inner) if name == "cond" else sum(inner) * params.get("length", 1)
    if name in VIEWS or name in FUSED:
        return 0.0
    if name.startswith(("reduce", "arg", "cum")):
        return float(sum(math.prod(v.aval.shape) for v in equation.invars if hasattr(v.aval, "shape")))
    return float(elements)


def _jaxprs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for p in params.values():
        for x in p if isinstance(p, tuple) else (p,):
            if isinstance(x, (Jaxpr, ClosedJaxpr)):
                yield x.jaxpr if isinstance(x, ClosedJaxpr) else x


def seconds(equation: Any, device: Device) -> float:
    """The longer of arithmetic at the device's rate for the element type and traffic at its bandwidth.

    See `Device.roofline`.  An element-wise operation counts what it writes, as part of a fusion
    that XLA makes of it and its neighbours: about half of them reach memory, so half of those bytes.
    """
    if equation.primitive.name in (*VIEWS, *FUSED):
        return 0.0
    avals = [v.aval for v in (*equation.invars, *equation.outvars)]
    kinds = {str(getattr(a, "dtype", "")) for a in avals}
    dtype = "bf16" if "bfloat16" in kinds else "f16" if "float16" in kinds else "f32"
    moved = sum(map(nbytes, avals))
    inner = [sum(seconds(e, device) for e in jaxpr.eqns) for jaxpr in _jaxprs(equation.params)]
    if inner:
        name = equation.primitive.name
        return max(inner) if name == "cond" else sum(inner) * equation.params.get("length", 1)
    if not equation.primitive.name.startswith(_MOVING):
        moved = sum(nbytes(v.aval) for v in equation.outvars) // 2
    return device.roofline(flops(equation), moved, dtype)
