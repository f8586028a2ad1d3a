"""Operators that draw random numbers: each a pure function of its seed, the step counter and the element's number.

So a second run gives the same bits, and nothing has to be kept for one; see `philox` for the stream.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from ...language import samples
from ...language.factors import Factor, Place, aligned, needed_whole
from ...language.op import Case, FunctionWriter, Imported, ImportedNode, Op, OperatorBuilder, imports
from ...language.types import (
    DTYPES,
    Array,
    Operands,
    TensorType,
    Types,
    Value,
    Values,
    dtype_from_onnx,
    dtype_to_onnx,
    need,
)
from ..tiles import TILE
from .philox import export_numbers, stream


class Draw(Op, abstract=True):
    """Reads the step counter (i64[]) as its last input.

    `first`: the number of its first element, for a slice of a larger tensor, which draws what the whole draws there.
    """

    random = True

    def check_step(self: Any, step: TensorType | None) -> None:
        """TypeRuleError where the step counter is none, or the seed is no word of 64 bits."""
        if not 0 <= self.seed < 1 << 64:
            raise self.fail(f"the seed must be in [0, 2⁶⁴), not {self.seed}", step)
        if not 0 <= self.first < 1 << 56:
            raise self.fail(f"the first element's number must be in [0, 2⁵⁶), not {self.first}", step)
        if step != TensorType("i64", ()):
            raise self.fail("the step counter must be i64[]", step)

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...] | None:
        """The outermost axis, whose slices are elements one after the other; the others are needed whole."""
        y = need(outs[0])
        lead = next((a for a, d in enumerate(y.shape) if d != 1), 0)
        factors = aligned(ins, outs)
        return (*factors[: lead + 1], *needed_whole(factors[lead + 1 :]))

    def sliced(self: Any, factor: Factor, start: int, size: int, outs: Types) -> Any:
        """The same numbers: those before the slice are left out."""
        place, y = factor.outputs[0], outs[0]
        assert isinstance(place, Place) and y is not None
        before = start * place.inner * math.prod(y.shape[place.axis + 1 :])
        return dataclasses.replace(cast(Any, super().sliced(factor, start, size, outs)), first=self.first + before)

    def gradient(self, b: OperatorBuilder, ins: Values, outs: Sequence[Value], grads: Values) -> Values:
        return [None] * len(ins)


def drop(ratio: float, fill: Any, arrays: tuple[Array, Array, Array | None], scratch: Operands) -> None:
    """Dropout of a run of elements with the numbers that `fill` draws, tile by tile: draw, compare, scale.

    `arrays`: x, the result, and the mask (None: it is not wanted), in one dimension.
    """
    x, y, mask = arrays
    least, scale = np.float32(ratio), x.dtype.type(1 / (1 - ratio))
    for start in range(0, x.size, TILE):
        part = slice(start, min(start + TILE, x.size))
        u = scratch[0][: part.stop - start]
        keep = scratch[1][: len(u)] if mask is None else mask[part]
        fill(u)
        np.greater_equal(u, least, out=keep)
        np.multiply(x[part], scale, out=y[part])
        np.multiply(y[part], keep, out=y[part])


def export_drop(
    g: FunctionWriter, op: Any, ins: Sequence[str], outs: Sequence[str], run: int, places: Sequence[int]
) -> bool:
    """Dropout with the cipher in integers, the same bits as here: runs of so many numbers from these places on."""
    x, step = ins
    t = g.type(x)
    if not t.size:
        g.node("Identity", [x], outs[:1])
        keep = g.call("Cast", x, to=_BOOL)
    else:
        runs = [export_numbers(g, op.seed, step, run, first) for first in places]
        numbers = runs[0] if len(runs) == 1 else g.call("Concat", *runs, axis=0)
        threshold = math.ceil(float(np.float32(op.ratio)) * 2**24)
        flat = g.call("GreaterOrEqual", numbers, g.array(np.array(threshold, np.int64)))
        keep = g.call("Reshape", flat, g.ints(t.shape))
        scaled = g.call("Mul", x, g.scalar(1 / (1 - op.ratio), x))
        g.node("Mul", [scaled, g.call("Cast", keep, to=dtype_to_onnx(t.dtype))], outs[:1])
    if len(outs) > 1 and outs[1]:
        g.node("Identity", [keep], outs[1:2])
    return True


class Dropout(Draw):
    """(x, step) → x / (1 - ratio) where kept, else 0; and the mask of what is kept (optional).

    Element i is kept where u_i ≥ ratio, both in float32.
    """

    autocast = "follow"
    ratio: float = 0.5
    seed: int = 0
    first: int = 0

    inplace = (0,)

    def infer(self, x, step):
        self.check_step(step)
        if not 0 <= self.ratio < 1:
            raise self.fail(f"ratio must be in [0, 1), not {self.ratio}", x, step)
        return x, x.with_dtype("bool")

    def scratch(self, ins, outs):
        """A tile of numbers and of comparisons."""
        size = min(ins[0].size, TILE)
        return TensorType("f32", (size,)), TensorType("bool", (size,))

    def compute(self, ins, outs, scratch):
        x, y = ins[0].reshape(-1), outs[0].reshape(-1)
        mask = outs[1].reshape(-1) if len(outs) > 1 and outs[1] is not None else None
        drop(self.ratio, stream(self.seed, ins[1], self.first), (x, y, mask), scratch)

    def inference(self, b, ins, running):
        x = ins[0]
        return (x, b.fill(True, x.type.with_dtype("bool"))) if len(running) > 1 else (x,)

    def gradient(self, b, ins, outs, grads):
        """Dropout of dy: the same key gives the same mask, and nothing is saved."""
        return [b.Dropout(grads[0], ins[1], ratio=self.ratio, seed=self.seed, first=self.first), None]

    def export(self, g, ins, outs):
        return export_drop(g, self, ins, outs, g.type(ins[0]).size, (self.first,))

    @classmethod
    def from_onnx(cls, node):
        """Nothing in evaluation and for ratio 0; the ratio is an attribute, or since opset 12 an input."""
        x = node.need(0)
        ratio = node.attributes.get("ratio", 0.5)
        if node.type(1) is not None:
            ratio = float(node.need_constant(1, "ratio").reshape(()))
        if not node.training or ratio == 0:
            everything = node.builder.fill(True, x.type.with_dtype("bool")) if node.wants(1) else None
            return (x, everything) if node.wants(1) else x
        op = cls(ratio=ratio, seed=node.random_seed())
        return node.emit(op, x, node.step(), want=2 if node.wants(1) else 1)

    @classmethod
    def samples(cls, draw):
        """Several ratios and steps; more than a tile; nothing."""
        for ratio, step in ((0.5, 0), (0.1, 3), (0.0, 1)):
            yield draw.case(cls(ratio=ratio, seed=5), draw("f64[3,5]"), np.array(step))
        yield draw.case(cls(ratio=0.3, seed=2**62 + 1), draw("f32[33,1001]"), np.array(7))
        yield draw.case(cls(ratio=0.3, seed=1), draw("f16[9]"), np.array(7), want=1)
        yield draw.case(cls(seed=1), draw("f64[0,2]"), np.array(7), want=1)
        yield draw.case(cls(ratio=0.3, seed=1, first=11), draw("f64[5,9]"), np.array(7))


class Fresh(Draw, abstract=True):
    """A new tensor of `shape` and `dtype`; `per_element` numbers of the stream make one element."""

    per_element = 1

    def infer(self: Any, step):
        self.check_step(step)
        return (TensorType(self.dtype, self.shape),)

    def scratch(self: Any, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        size = min(math.prod(self.shape), TILE)
        return (TensorType("f32", (self.per_element * size,)), TensorType("f32", (size,)))

    def compute(self: Any, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """Tile by tile: draw, transform in float32, cast."""
        out = outs[0].reshape(-1)
        fill = stream(self.seed, ins[-1], self.per_element * self.first)
        for start in range(0, out.size, TILE):
            stop = min(start + TILE, out.size)
            u = scratch[0][: self.per_element * (stop - start)]
            fill(u)
            out[start:stop] = self.transform(u, scratch[1][: stop - start])

    def transform(self, u: Any, temp: Any) -> Any:
        """Numbers in [0, 1) to elements, in u or temp."""
        raise NotImplementedError

    def export(self: Any, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
        """The stream's bits exactly; the transformation as ONNX Runtime rounds it."""
        count = math.prod(self.shape)
        if not count:
            g.node("Expand", [g.array(np.zeros((), DTYPES[self.dtype])), g.ints(self.shape)], outs)
            return True
        numbers = export_numbers(g, self.seed, ins[-1], count * self.per_element, self.first * self.per_element)
        u = g.call("Mul", g.call("Cast", numbers, to=_FLOAT), g.array(np.array(2.0**-24, np.float32)))
        y = g.call("Cast", self.export_transform(g, u), to=dtype_to_onnx(self.dtype))
        g.node("Reshape", [y, g.ints(self.shape)], outs)
        return True

    def export_transform(self, g: FunctionWriter, u: str) -> str:
        """`transform` in ONNX."""
        raise NotImplementedError

    @classmethod
    def from_onnx(cls, node: ImportedNode) -> Imported:
        """The shape is an attribute; the seed is the program's."""
        return _random_from_onnx(cls, node, node.attributes["shape"], "f32")

    @classmethod
    def samples(cls, draw: samples.Draw) -> Iterator[Case]:
        for shape, dtype in (((3, 5), "f64"), ((33, 1001), "f32"), ((0, 2), "f32"), ((9,), "f16")):
            yield draw.case(cls(shape=shape, dtype=dtype, seed=3), np.array(4))
        yield draw.case(cls(shape=(3, 5), dtype="f32", seed=3, first=7), np.array(4))


_FLOAT, _BOOL = 1, 9


def _scalar32(g: FunctionWriter, value: float) -> str:
    return g.array(np.array(value, np.float32))


class RandomUniform(Fresh):
    """(step) → low + (high - low) · u_i, in float32."""

    shape: tuple[int, ...]
    dtype: str = "f32"
    low: float = 0.0
    high: float = 1.0
    seed: int = 0
    first: int = 0

    def transform(self, u, temp):
        np.multiply(u, self.high - self.low, out=u)
        return np.add(u, self.low, out=u)

    def export_transform(self, g, u):
        return g.call("Add", g.call("Mul", u, _scalar32(g, self.high - self.low)), _scalar32(g, self.low))


class RandomNormal(Fresh):
    """(step) → mean + scale · √(-2 ln(1 - u₂ᵢ)) · cos(2π u₂ᵢ₊₁), in float32 (Box & Muller 1958)."""

    shape: tuple[int, ...]
    dtype: str = "f32"
    mean: float = 0.0
    scale: float = 1.0
    seed: int = 0
    first: int = 0

    per_element = 2

    def transform(self, u, temp):
        """Radius times cosine."""
        radius, angle = u[0::2], u[1::2]
        np.subtract(1, radius, out=temp)
        np.log(temp, out=temp)
        np.multiply(temp, -2, out=temp)
        np.sqrt(temp, out=temp)
        np.multiply(angle, 2 * math.pi, out=angle)
        np.cos(angle, out=angle)
        np.multiply(temp, angle, out=temp)
        np.multiply(temp, self.scale, out=temp)
        return np.add(temp, self.mean, out=temp)

    def export_transform(self, g, u):
        """Radius times cosine."""
        count = math.prod(self.shape)
        pairs = g.call("Reshape", u, g.ints([count, 2]))
        first = g.call("Gather", pairs, g.array(np.array(0)), axis=1)
        angle = g.call("Gather", pairs, g.array(np.array(1)), axis=1)
        log = g.call("Log", g.call("Sub", _scalar32(g, 1), first))
        radius = g.call("Sqrt", g.call("Mul", log, _scalar32(g, -2)))
        cosine = g.call("Cos", g.call("Mul", angle, _scalar32(g, 2 * math.pi)))
        scaled = g.call("Mul", g.call("Mul", radius, cosine), _scalar32(g, self.scale))
        return g.call("Add", scaled, _scalar32(g, self.mean))


class Bernoulli(Draw):
    """(p, step) → 1 where u_i < p, else 0, of element type `dtype`; no gradient."""

    dtype: str
    seed: int = 0
    first: int = 0

    def infer(self, p, step):
        self.check_step(step)
        return (p.with_dtype(self.dtype),)

    def scratch(self, ins, outs):
        """A tile of numbers and of comparisons."""
        size = min(ins[0].size, TILE)
        return TensorType("f32", (size,)), TensorType("bool", (size,))

    def compute(self, ins, outs, scratch):
        p, out = ins[0].reshape(-1), outs[0].reshape(-1)
        fill = stream(self.seed, ins[1], self.first)
        for start in range(0, p.size, TILE):
            stop = min(start + TILE, p.size)
            u, less = (s[: stop - start] for s in scratch)
            fill(u)
            np.less(u, p[start:stop], out=less)
            out[start:stop] = less

    def export(self, g, ins, outs):
        """The cipher in integers, then the comparison."""
        t = g.type(ins[0])
        if not t.size:
            g.node("Cast", ins[:1], outs, to=dtype_to_onnx(self.dtype))
            return True
        numbers = export_numbers(g, self.seed, ins[1], t.size, self.first)
        u = g.call("Mul", g.call("Cast", numbers, to=_FLOAT), _scalar32(g, 2.0**-24))
        p = ins[0]
        u, p = (u, g.call("Cast", p, to=_FLOAT)) if t.dtype != "f64" else (g.call("Cast", u, to=11), p)
        less = g.call("Less", g.call("Reshape", u, g.ints(t.shape)), p)
        g.node("Cast", [less], outs, to=dtype_to_onnx(self.dtype))
        return True

    @classmethod
    def from_onnx(cls, node):
        """p's element type where none is given."""
        p = node.need(0)
        return node.emit(cls(dtype=_dtype(node, p.dtype), seed=node.random_seed()), p, node.step())

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(dtype="f64", seed=1), draw("f64[3,5]", 0, 1), np.array(2), gradient=False)
        yield draw.case(cls(dtype="bool", seed=1), draw("f32[33,1001]", 0, 1), np.array(2))
        yield draw.case(cls(dtype="bool", seed=1, first=13), draw("f32[3,5]", 0, 1), np.array(2))


def _dtype(node: ImportedNode, default: str) -> str:
    number = node.attributes.get("dtype")
    dtype = default if number is None else dtype_from_onnx(number)
    if dtype is None:
        raise node.fail(f"its element type {number} is not supported")
    return dtype


def _random_from_onnx(cls: Any, node: ImportedNode, shape: Sequence[int], default: str) -> Value | None:
    names = ("mean", "scale") if cls is RandomNormal else ("low", "high")
    options = {k: float(node.attributes[k]) for k in names if k in node.attributes}
    op = cls(tuple(map(int, shape)), _dtype(node, default), **options, seed=node.random_seed())
    return node.emit(op, node.step())


@imports("RandomNormalLike")
def _normal_like(node: ImportedNode) -> Imported:
    return _random_from_onnx(RandomNormal, node, node.need_type(0).shape, node.need_type(0).dtype)


@imports("RandomUniformLike")
def _uniform_like(node: ImportedNode) -> Imported:
    return _random_from_onnx(RandomUniform, node, node.need_type(0).shape, node.need_type(0).dtype)
