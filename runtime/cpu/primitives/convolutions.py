"""Convolutions by oneDNN: activations stay as they are, weights get what layout the library likes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from ....language.types import DTYPES
from ...shared.convolved import Convolved
from ..device import dnnl, native
from . import products
from .plans import Given, Maker, Plan, alone, parts, planned

#: channels on both sides from which on a convolution of single pixels in 16 bits is a product of matrices, and pixels
#: of an image up to which it is
_MANY = 128
_FEW = {"output": 64, "input": 64, "weight": 256}
#: of an axis of a weight, parts of which are copied, a multiple of this: most of the library's blocks end there
_ROWS = 16
#: parts of the images, at most, whose gradients of a weight are summed, bytes of them, and floating-point operations
#: that each has at least: they are about 50 us
_PARTS, _SUMMED, _WORTH = 32, 1 << 21, 1 << 24
#: arguments of a copy, and how the library's slow code is called, and the code that leaves blocks out where
#: groups do not lie behind each other (version 3.2)
_COPIED, _SLOW, _WHOLE_ROWS = (dnnl.SRC, dnnl.DST), ("ref", "simple"), ("jit:blk",)
#: the source of a primitive's argument: the operator's x, w, y, bias, or one of the plan's buffers
_ARGUMENTS = {
    "output": {"x": dnnl.SRC, "w": dnnl.WEIGHTS, "y": dnnl.DST, "bias": dnnl.BIAS},
    "input": {"x": dnnl.DIFF_SRC, "w": dnnl.WEIGHTS, "y": dnnl.DIFF_DST},
    "weight": {"x": dnnl.SRC, "w": dnnl.DIFF_WEIGHTS, "y": dnnl.DIFF_DST},
}


def strides(shape: Sequence[int], *, last: bool) -> tuple[int, ...]:
    """Strides of a dense [n, c, spatial...], in elements; `last`: the channels lie innermost."""
    order = [0, *range(2, len(shape)), 1] if last else range(len(shape))
    steps_of, step = [0] * len(shape), 1
    for axis in reversed(order):
        steps_of[axis] = step
        step *= shape[axis]
    return tuple(steps_of)


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
        factors = products.Factors(
            (rows, inner), (inner, 1), (inner, outer), (1, inner), (rows, outer), (outer, 1), dtype, c.bias
        )
        return factors, ("x", "w", "y")
    if c.kind == "input":  # y w
        factors = products.Factors(
            (rows, outer), (outer, 1), (outer, inner), (inner, 1), (rows, inner), (inner, 1), dtype
        )
        return factors, ("y", "w", "x")
    factors = products.Factors((outer, rows), (1, outer), (rows, inner), (inner, 1), (outer, inner), (inner, 1), dtype)
    return factors, ("y", "x", "w")


def _add(maker: Maker, c: Convolved, dtype: str) -> None:
    """Weights packed, the convolution image by image, weights unpacked or the bias added."""
    if c.kind == "weight":
        _add_weight(maker, c, dtype)
        return
    count = parts(c.geometry.batch)
    p = _Primitive(maker.lib, c, dtype, count)
    maker.buffers |= p.buffers
    p.pack(maker)
    arguments = {p.which["x"]: (p.x, "x"), p.which["y"]: (p.y, "y"), p.which["w"]: (p.wanted, p.packed)}
    if p.bias:
        arguments[p.which["bias"]] = (p.bias, "bias")
    maker.add(p.main, *p.each(arguments))
    if c.bias and c.kind == "input":
        lib = maker.lib
        channels = (1, c.x[1], *(1 for _ in c.x[2:]))
        row = lib.layout(channels, strides(channels, last=False), dtype)
        with alone(count > 1):
            added = lib.add(p.x, row, p.x)
        maker.add(added, *p.each({dnnl.SRC: (p.x, "x"), dnnl.SRC1: (row, "bias"), dnnl.DST: (p.x, "x")}))


def _add_weight(maker: Maker, c: Convolved, dtype: str) -> None:
    """The gradient of a weight: some images each in one thread each, and their sum in the images' order, or all of them
    in the library's threads; then its copy to the layout that it is wanted in."""
    p = (_summed(maker.lib, c) if dtype == "f32" else None) or _Primitive(maker.lib, c, dtype)
    nbytes = maker.lib.nbytes(p.wanted)
    maker.buffers |= p.buffers
    if p.count > 1:
        maker.buffers["parts"] = (p.count - 1) * nbytes
    arguments = p.each({p.which["x"]: (p.x, "x"), p.which["y"]: (p.y, "y")})
    places = [(p.packed, 0), *(("parts", k * nbytes) for k in range(p.count - 1))]
    maker.add(p.main, *({**g, p.which["w"]: (p.wanted, *place)} for g, place in zip(arguments, places, strict=True)))
    if p.count > 1:
        _add_sums(maker, p.packed, nbytes, p.count - 1)
    p.pack(maker)


def _summed(lib: dnnl.Library, c: Convolved) -> _Primitive | None:
    """The gradient of a weight in as many parts for any number of threads; None where there is no room for them, or not
    one for each thread, or where the library has no fast addition."""
    g, width = c.geometry, DTYPES["f32"].itemsize
    room = min(_SUMMED, width * (math.prod(c.x) + math.prod(c.y)) // 2)
    most = min(_PARTS, room // (width * math.prod(c.w)), 2 * g.multiplications // _WORTH)
    least = max(2, native.threads())  # with fewer, threads would have nothing to do
    for count in range(most, least - 1, -1):
        if g.batch % count == 0:
            p = _Primitive(lib, c, "f32", count)
            nbytes = lib.nbytes(p.wanted)  # the library pads weights of few channels
            if count * nbytes <= room and _pieces(nbytes) > 1:
                return None if lib.implementation(_addition(lib, nbytes)[1]).startswith(_SLOW) else p
    return None


def _pieces(nbytes: int) -> int:
    """Into how many equal pieces so many bytes of float32 are cut."""
    return max(d for d in range(1, _PARTS + 1) if nbytes // DTYPES["f32"].itemsize % d == 0)


def _add_sums(maker: Maker, sums: str, nbytes: int, count: int) -> None:
    """Adds so many parts to the sums, one after the other, in pieces of one thread each."""
    pieces = _pieces(nbytes)
    piece = nbytes // pieces
    flat, added = _addition(maker.lib, nbytes)
    for k in range(count):
        maker.add(added, *(
            {dnnl.SRC: (flat, sums, i * piece), dnnl.SRC1: (flat, "parts", k * nbytes + i * piece),
             dnnl.DST: (flat, sums, i * piece)} for i in range(pieces)
        ))  # fmt: skip


def _addition(lib: dnnl.Library, nbytes: int) -> tuple[int, int]:
    """The layout of one piece, and the primitive that adds one to another in one thread."""
    piece = nbytes // _pieces(nbytes) // DTYPES["f32"].itemsize
    with alone():
        flat = lib.layout((1, piece), (piece, 1), "f32")
        return flat, lib.add(flat, flat, flat)


class _Primitive:
    """The primitive of a convolution of one of `count` equal parts of the images, and the layouts of its operands.

    `packed`: the operand or buffer that holds the weights, or their gradient, as the library likes them; `buffers`: the
    bytes of that buffer, where there is one.
    """

    def __init__(self, lib: dnnl.Library, c: Convolved, dtype: str, count: int = 1) -> None:
        self.count, self.width = count, DTYPES[dtype].itemsize
        self.c = c = dataclasses.replace(c, geometry=dataclasses.replace(c.geometry, batch=c.geometry.batch // count))
        g = c.geometry
        self.shape = c.w if g.group == 1 else (g.group, g.mg, g.cg, *g.window.kernel)
        self.x, self.y = (lib.layout(s, strides(s, last=c.last), dtype) for s in (c.x, c.y))
        self.given = lib.layout(self.shape, strides(self.shape, last=False), dtype)
        liked = lib.layout(self.shape, None, dtype)
        self.bias = lib.layout(c.w[:1], (1,), dtype) if c.bias and c.kind == "output" else 0
        window = (g.window.strides, g.window.dilations, g.window.begin, c.end)
        with alone(count > 1):
            self.main = lib.convolution(c.kind, (self.x, liked, self.y), self.bias, window)
        self.which = _ARGUMENTS[c.kind]
        self.wanted = lib.wanted(self.main, self.which["w"])
        self.packed = "w" if lib.same(self.wanted, self.given) else "packed"
        self.buffers = {} if self.packed == "w" else {"packed": lib.nbytes(self.wanted)}

    def each(self, given: Mapping[int, tuple[int, str]]) -> list[Given]:
        """Arguments (layout, name) of every part: its images of x and y, and all of the others."""
        sizes = {"x": math.prod(self.c.x) * self.width, "y": math.prod(self.c.y) * self.width}
        return [
            {k: (layout, name, i * sizes.get(name, 0)) for k, (layout, name) in given.items()}
            for i in range(self.count)
        ]

    def pack(self, made: Maker) -> None:
        """Copies the weights to the layout that the primitive likes, or a gradient from it: in parts of one thread each
        where the library's blocks end there."""
        if self.packed == "w":
            return
        names = ("w", self.packed) if self.c.kind != "weight" else (self.packed, "w")
        layouts = [self.given if n == "w" else self.wanted for n in names]
        for axis in range(2):
            with contextlib.suppress(dnnl.DnnlError):
                if self._pack_parts(made, axis, names, layouts):
                    return
        places = [(layout, name, 0) for layout, name in zip(layouts, names, strict=True)]
        made.add(made.lib.reorder(*layouts), dict(zip(_COPIED, places, strict=True)))

    def _pack_parts(self, maker: Maker, axis: int, names: Sequence[str], layouts: Sequence[int]) -> bool:
        """Makes the primitive for ranges of an axis; returns whether there is fast code for it."""
        lib, size = maker.lib, self.shape[axis]
        count = parts(size // _ROWS) if size % _ROWS == 0 else 1
        if count == 1:
            return False
        one = [size // count if i == axis else n for i, n in enumerate(self.shape)]
        firsts = [[k * one[axis] if i == axis else 0 for i in range(len(one))] for k in range(count)]
        cut = [[lib.part(layout, one, first) for first in firsts] for layout in layouts]
        with alone():
            reorder = lib.reorder(*(side[0][0] for side in cut))
            if lib.implementation(reorder).startswith(_SLOW if axis == 0 else _SLOW + _WHOLE_ROWS):
                return False
        sides = list(zip(_COPIED, cut, names, strict=True))
        operands = [{which: (c[0][0], name, c[k][1] * self.width) for which, c, name in sides} for k in range(count)]
        maker.add(reorder, *operands)
        return True
