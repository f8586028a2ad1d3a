"""Convolutions by oneDNN: activations stay as they are, weights get what layout the library likes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from ...shared.convolved import Convolved
from ..device import dnnl
from . import products
from .plans import Maker, Plan, planned

#: channels on both sides from which on a convolution of single pixels in 16 bits is a product of matrices, and pixels
#: of an image up to which it is
_MANY = 128
_FEW = {"output": 64, "input": 64, "weight": 256}
#: what a primitive's argument is: the operator's x, w, y, bias, or one of the plan's buffers
_ARGUMENTS = {
    "output": {"x": dnnl.SRC, "w": dnnl.WEIGHTS, "y": dnnl.DST, "bias": dnnl.BIAS},
    "input": {"x": dnnl.DIFF_SRC, "w": dnnl.WEIGHTS, "y": dnnl.DIFF_DST},
    "weight": {"x": dnnl.SRC, "w": dnnl.DIFF_WEIGHTS, "y": dnnl.DIFF_DST},
}


def strides(shape: Sequence[int], *, last: bool) -> tuple[int, ...]:
    """Of a dense [n, c, spatial...], in elements; `last`: the channels lie innermost."""
    order = [0, *range(2, len(shape)), 1] if last else range(len(shape))
    found, step = [0] * len(shape), 1
    for axis in reversed(order):
        found[axis] = step
        step *= shape[axis]
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def plan(c: Convolved, dtype: str = "f32") -> Plan | str:
    """The primitives of a product whose operands are all of one type, or why the library refuses it."""
    product = None if dtype == "f32" else _as_product(c, dtype)
    if product is not None:
        return planned(lambda made: products.add(made, *product))
    return planned(lambda made: _add(made, c, dtype))


def _as_product(c: Convolved, dtype: str) -> tuple[products.Factors, tuple[str, str, str]] | None:
    """A convolution of single pixels as a product of matrices, and what its operands are; None where it is none, or
    where the library's convolutions are as fast: on few pixels they take up to twice as long."""
    g = c.geometry
    if not (c.last and g.pointwise and g.group == 1 and min(g.cg, g.mg) >= _MANY) or (c.bias and c.kind == "input"):
        return None
    if math.prod(c.x[2:]) > _FEW[c.kind]:
        return None
    rows, inner, outer = c.x[0] * math.prod(c.x[2:]), g.cg, g.mg
    if c.kind == "output":  # x wᵀ
        found = products.Factors(
            (rows, inner), (inner, 1), (inner, outer), (1, inner), (rows, outer), (outer, 1), dtype, c.bias
        )
        return found, ("x", "w", "y")
    if c.kind == "input":  # y w
        found = products.Factors(
            (rows, outer), (outer, 1), (outer, inner), (inner, 1), (rows, inner), (inner, 1), dtype
        )
        return found, ("y", "w", "x")
    found = products.Factors((outer, rows), (1, outer), (rows, inner), (inner, 1), (outer, inner), (inner, 1), dtype)
    return found, ("y", "x", "w")


def _add(made: Maker, c: Convolved, dtype: str) -> None:
    """Weights packed, the convolution, weights unpacked or the bias added."""
    lib, g = made.lib, c.geometry
    shape = c.w if g.group == 1 else (g.group, g.mg, g.cg, *g.window.kernel)
    x, y = (lib.layout(s, strides(s, last=c.last), dtype) for s in (c.x, c.y))
    given, any_ = lib.layout(shape, strides(shape, last=False), dtype), lib.layout(shape, None, dtype)
    bias = lib.layout(c.w[:1], (1,), dtype) if c.bias and c.kind == "output" else 0
    window = (g.window.strides, g.window.dilations, g.window.begin, c.end)
    main = lib.convolution(c.kind, (x, any_, y), bias, window)
    which = _ARGUMENTS[c.kind]
    wanted = lib.wanted(main, which["w"])
    packed = "w" if lib.same(wanted, given) else "packed"
    arguments = {which["x"]: (x, "x"), which["y"]: (y, "y"), which["w"]: (wanted, packed)}
    if bias:
        arguments[which["bias"]] = (bias, "bias")
    if packed != "w":
        made.buffers["packed"] = lib.nbytes(wanted)
    if packed != "w" and c.kind != "weight":
        made.add(lib.reorder(given, wanted), {dnnl.SRC: (given, "w"), dnnl.DST: (wanted, packed)})
    made.add(main, arguments)
    if packed != "w" and c.kind == "weight":
        made.add(lib.reorder(wanted, given), {dnnl.SRC: (wanted, packed), dnnl.DST: (given, "w")})
    if c.bias and c.kind == "input":
        channels = (1, c.x[1], *(1 for _ in c.x[2:]))
        one = lib.layout(channels, strides(channels, last=False), dtype)
        made.add(lib.add(x, one, x), {dnnl.SRC: (x, "x"), dnnl.SRC1: (one, "bias"), dnnl.DST: (x, "x")})
