"""Operators that change a tensor's form, not its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from ...language.element import cast
from ...language.factors import aligned, digits, factor
from ...language.layouts import Turned, turned_list, turned_whole
from ...language.op import Imported, ImportedNode, Op, OperatorBuilder, imports
from ...language.types import DTYPES, TensorType, Value, Values, dtype_from_onnx, dtype_to_onnx
from ..common import Elementwise


class Move(Op, abstract=True):
    """Copies elements."""

    moves_data = True
    autocast = "follow"


class Copied(Move, abstract=True):
    """A value with the elements of x, and their bytes where that may be."""

    linear = ((0,),)

    def infer(self, x):
        return (x,)

    def axis_factors(self, ins, outs):
        return aligned(ins, outs)

    def compute(self, ins, outs, scratch):
        outs[0][...] = ins[0]

    def views(self, ins, outs):
        return (0,)

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        return turned_whole(self, ins, outs, rank)


class Identity(Copied, onnx=True):
    """A copy of x."""

    def gradient(self, b, ins, outs, grads):
        return [grads[0]]

    @classmethod
    def from_onnx(cls, node):
        """No operator at all: another name for its input; but PyTorch's exporter writes `detach` as Identity."""
        return node.builder.Detach(node.need(0)) if node.source == "aten.detach.default" else node.inputs[0]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[2,3]"))


#: element types of less than a byte that are integers, and all that are stored in a byte and not computed with
_INTEGERS = frozenset({"i4", "u4", "i2", "u2"})
_STORED = _INTEGERS | {"f4e2m1", "f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz", "f8e8m0"}
#: the largest number of a float of one byte
_LARGEST = {
    name: float(ml_dtypes.finfo(DTYPES[name]).max) for name in ("f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz")
}


class Cast(Elementwise):
    """x with element type `to` (a short name).

    `saturate`, for floats of one byte: what is too large becomes the largest, else infinity or NaN.
    """

    to: str
    saturate: int = 1
    on_host = "eight bits of float, and two or four of integer, are converted by ml_dtypes"

    def out_dtype(self, dtype: str) -> str:
        return self.to

    def compute(self, ins, outs, scratch):
        """Converts as ONNX does: floats are truncated towards zero, anything but 0 is true."""
        x = ins[0]
        for room in scratch:
            if room.dtype != x.dtype:
                np.copyto(room, x, casting="unsafe")
                x = room
            if self.saturate and self.to in _LARGEST:
                most = x.dtype.type(_LARGEST[self.to])
                x = np.minimum(np.maximum(x, -most, out=room), most, out=room)
        np.copyto(outs[0], x, casting="unsafe")

    def element(self, x):
        return cast(x, self.to)

    def scratch(self, ins, outs):
        """The saturated input; floats between two types that are not converted into each other."""
        if self._indirect(ins[0].dtype):
            return (ins[0].with_dtype("f32"),)
        return (ins[0],) if self._saturates(ins[0]) else ()

    def _indirect(self, dtype: str) -> bool:
        """Whether ml_dtypes has no conversion."""
        both = {dtype, self.to}
        return len(both) == 2 and both <= _STORED and (both <= _INTEGERS or "f8e8m0" in both)

    def _saturates(self, x: TensorType) -> bool:
        most = _LARGEST.get(self.to)
        return most is not None and bool(self.saturate) and (x.is_float or _LARGEST.get(x.dtype, 0) > most)

    def gradient(self, b, ins, outs, grads):
        """dy cast back, between floating types."""
        return [b.Cast(grads[0], to=ins[0].dtype) if ins[0].type.is_float else None]

    def export(self, g, ins, outs):
        options = {} if self.saturate else {"saturate": 0}
        g.node("Cast", ins, outs, to=dtype_to_onnx(self.to), **options)
        return True

    @classmethod
    def from_onnx(cls, node):
        """Nothing where the type is the same already."""
        to = dtype_from_onnx(node.attributes["to"])
        if to is None:
            raise node.fail(f"casts to element type {node.attributes['to']}, which is not supported")
        if to == "f8e8m0" and node.need_type(0).dtype != to:
            return None  # powers of two, rounded as `round_mode` says
        saturate = node.attributes.get("saturate", 1)
        x = node.numbers(to)
        return x if x.dtype == to else node.emit(cls(to=to, saturate=saturate), x)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(to="f32"), draw("f64[2,3]"), tolerance=1e-3)
        yield draw.case(cls(to="f64"), draw("f32[2,3]"))
        for to, source in (("i2", "u4"), ("u4", "i2"), ("f8e4m3fn", "f8e8m0"), ("f8e8m0", "i4")):
            numbers = draw.ints("i8[5]", 1, 2).astype(DTYPES[source])
            yield draw.case(cls(to=to), numbers, gradient=False, export=False)
        yield draw.case(cls(to="i32"), draw("f32[2,3]", -5, 5))
        yield draw.case(cls(to="bool"), draw.ints("i64[4]", 0, 2))
        yield draw.case(cls(to="f8e4m3fn"), draw("f32[9]", -600, 600), export=False)
        yield draw.case(cls(to="f8e5m2", saturate=0), draw("f16[9]", -6e4, 6e4), export=False)
        yield draw.case(cls(to="i4"), draw.ints("i64[9]", -8, 7), export=False)


class Reshape(Move):
    """x in row-major order under another shape (static, no -1)."""

    linear = ((0,),)
    shape: tuple[int, ...]

    def infer(self, x):
        if math.prod(self.shape) != x.size or min(self.shape, default=0) < 0:
            raise self.fail(f"cannot become shape {list(self.shape)}", x)
        return (x.with_shape(self.shape),)

    def axis_factors(self, ins, outs):
        """The factors of which both shapes consist."""
        return [factor(n, [a], [y]) for n, a, y in digits(ins[0].shape, outs[0].shape)]

    def compute(self, ins, outs, scratch):
        outs[0].reshape(-1)[...] = ins[0].reshape(-1)

    def views(self, ins, outs):
        return (0,)

    def gradient(self, b, ins, outs, grads):
        """dy under the old shape; nothing is kept."""
        return [b.Reshape(grads[0], shape=ins[0].shape)]

    def export(self, g, ins, outs):
        g.node("Reshape", [ins[0], g.ints(self.shape)], outs, allowzero=1 if 0 in self.shape else 0)
        return True

    @classmethod
    def from_onnx(cls, node):
        """0 copies a dimension, -1 takes the rest."""
        x = node.inputs[0]
        wanted = node.need_constant(1, "shape").tolist()
        if not node.attributes.get("allowzero", 0):
            try:
                wanted = [x.shape[i] if d == 0 else d for i, d in enumerate(wanted)]
            except IndexError:
                raise node.fail(f"shape {wanted} copies a dimension that {x.type} lacks") from None
        return reshape(node.builder, x, resolve(wanted, x, node))

    @classmethod
    def samples(cls, draw):
        """To a vector, to more dimensions, of an empty tensor."""
        yield draw.case(cls(shape=(6,)), draw("f64[2,3]"))
        yield draw.case(cls(shape=(1, 3, 2)), draw("f64[2,3]"))
        yield draw.case(cls(shape=(3, 0)), draw("f64[0,2]"))

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        """Images and channels stay, positions are counted in another way."""
        x, y = ins[0], outs[0]
        if x is None or y is None or min(x.ndim, y.ndim) < 3 or x.shape[:2] != y.shape[:2]:
            return None
        return Turned(Reshape(turned_list(y.shape)), (x.ndim,), (True,))


def resolve(wanted: Sequence[int], x: Value, node: ImportedNode) -> tuple[int, ...]:
    """Replaces one -1 by what is left, empty dimensions aside that stay where they are."""
    empty = {i for i, (d, n) in enumerate(zip(wanted, x.shape, strict=False)) if d == n == 0}
    size = math.prod(n for i, n in enumerate(x.shape) if i not in empty)
    product = math.prod(d for i, d in enumerate(wanted) if d != -1 and i not in empty)
    if wanted.count(-1) == 1 and product and size % product == 0:
        wanted = [size // product if d == -1 else d for d in wanted]
    if math.prod(wanted) != x.size or min(wanted, default=0) < 0:
        raise node.fail(f"cannot reshape {x.type} to {list(wanted)}")
    return tuple(int(d) for d in wanted)


def reshape(b: OperatorBuilder, x: Value, shape: Sequence[int]) -> Value:
    """x under another shape; x itself where it has that shape."""
    return x if tuple(shape) == x.shape else b.Reshape(x, shape=tuple(int(d) for d in shape))


class Transpose(Move, onnx=True):
    """Axes in another order; no `perm`: reversed."""

    linear = ((0,),)
    perm: tuple[int, ...]

    def infer(self, x):
        """Dimensions in the order of `perm`."""
        if sorted(self.perm) != list(range(x.ndim)):
            raise self.fail(f"perm {list(self.perm)} is no permutation of the axes", x)
        return (x.with_shape([x.shape[p] for p in self.perm]),)

    def axis_factors(self, ins, outs):
        return [factor(ins[0].shape[a], [a], [i]) for i, a in enumerate(self.perm)]

    def compute(self, ins, outs, scratch):
        outs[0][...] = ins[0].transpose(self.perm)

    def views(self, ins, outs):
        """The same bytes where only dimensions of one element change places."""
        moved = [p for p in self.perm if ins[0].shape[p] != 1]
        return (0,) if moved == sorted(moved) else ()

    def gradient(self, b, ins, outs, grads):
        """dy transposed back."""
        return [b.Transpose(grads[0], perm=tuple(int(i) for i in np.argsort(self.perm)))]

    @classmethod
    def from_onnx(cls, node):
        x = node.inputs[0]
        perm = tuple(node.attributes.get("perm", range(x.ndim)[::-1]))
        return x if perm == tuple(range(x.ndim)) else node.emit(cls(perm=perm), x)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(perm=(1, 0)), draw("f64[2,3]"))
        yield draw.case(cls(perm=(2, 0, 1)), draw("f64[2,3,4]"))


class Expand(Move):
    """x broadcast to `shape`."""

    linear = ((0,),)
    shape: tuple[int, ...]

    def infer(self, x):
        try:
            fits = np.broadcast_shapes(x.shape, self.shape) == self.shape
        except ValueError:
            fits = False
        if not fits:
            raise self.fail(f"does not broadcast to {list(self.shape)}", x)
        return (x.with_shape(self.shape),)

    def axis_factors(self, ins, outs):
        """Every axis; x is read whole along those that are repeated."""
        return aligned(ins, outs)

    def compute(self, ins, outs, scratch):
        outs[0][...] = ins[0]

    def element(self, x):
        """x: broadcasting is what every loop does."""
        return x

    def views(self, ins, outs):
        """The same bytes where nothing is repeated."""
        return (0,) if ins[0].size == outs[0].size else ()

    def gradient(self, b, ins, outs, grads):
        """dy summed over what was repeated."""
        return [b.sum_to(grads[0], ins[0].shape)]

    def export(self, g, ins, outs):
        g.node("Expand", [ins[0], g.ints(self.shape)], outs)
        return True

    @classmethod
    def from_onnx(cls, node):
        x = node.inputs[0]
        try:
            shape = np.broadcast_shapes(x.shape, tuple(node.need_constant(1, "shape").tolist()))
        except ValueError:
            raise node.fail("shapes do not broadcast") from None
        return x if shape == x.shape else node.emit(cls(shape=shape), x)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(shape=(4, 2, 3)), draw("f64[2,1]"))
        yield draw.case(cls(shape=(2, 2)), draw("f64[]"))

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        """The shape that it makes is turned."""
        if len(self.shape) != rank or any(v is not None and v.ndim > rank for v in ins):
            return None
        return turned_whole(self, ins, outs, rank, shape=turned_list(self.shape))


class Fill(Move):
    """A tensor whose elements are all `value`."""

    dtype: str
    shape: tuple[int, ...]
    value: float = 0.0

    def infer(self):
        return (TensorType(self.dtype, self.shape),)

    def axis_factors(self, ins, outs):
        return aligned(ins, outs)

    def compute(self, ins, outs, scratch):
        outs[0].fill(DTYPES[self.dtype].type(self.value))

    def export(self, g, ins, outs):
        scalar = g.array(np.array(self.value, dtype=DTYPES[self.dtype]))
        g.node("Expand", [scalar, g.ints(self.shape)], outs)
        return True

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(dtype="f64", shape=(2, 3), value=1.5))
        yield draw.case(cls(dtype="i64", shape=(2,), value=3.0))

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        """The shape that it makes is turned."""
        if len(self.shape) != rank or any(v is not None and v.ndim > rank for v in ins):
            return None
        return turned_whole(self, ins, outs, rank, shape=turned_list(self.shape))


def _axes(node: ImportedNode) -> list[int] | None:
    """Squeeze's and Unsqueeze's axes: an input since opset 13, an attribute before; None where absent."""
    if "axes" in node.attributes:
        return list(node.attributes["axes"])
    return None if node.type(1) is None else [int(a) for a in node.need_constant(1, "axes").reshape(-1)]


@imports("Squeeze")
def squeeze(node: ImportedNode) -> Imported:
    """Reshape without dimensions of 1: those of `axes`, or all."""
    x, axes = node.need(0), _axes(node)
    if axes is None:
        gone = {i for i, d in enumerate(x.shape) if d == 1}
    else:
        gone = {a + x.ndim if a < 0 else a for a in axes}
    if any(not 0 <= a < x.ndim or x.shape[a] != 1 for a in gone):
        raise node.fail(f"cannot remove the axes {sorted(gone)} of {x.type}: they must have dimension 1")
    return reshape(node.builder, x, [d for i, d in enumerate(x.shape) if i not in gone])


@imports("Unsqueeze")
def unsqueeze(node: ImportedNode) -> Imported:
    """Reshape with dimensions of 1 at `axes`, which count in the result."""
    x, axes = node.need(0), _axes(node)
    if axes is None:
        raise node.fail("has no axes")
    ndim = x.ndim + len(axes)
    new = {a + ndim if a < 0 else a for a in axes}
    if len(new) != len(axes) or any(not 0 <= a < ndim for a in new):
        raise node.fail(f"axes {axes} do not fit a result of {ndim} dimensions")
    rest = iter(x.shape)
    return reshape(node.builder, x, [1 if i in new else next(rest) for i in range(ndim)])


@imports("Flatten")
def flatten(node: ImportedNode) -> Imported:
    """Reshape to a matrix: the dimensions before `axis`, and the others."""
    x, axis = node.need(0), node.attributes.get("axis", 1)
    if not -x.ndim <= axis <= x.ndim:
        raise node.fail(f"axis {axis} is out of range for {x.type}")
    axis = axis + x.ndim if axis < 0 else axis
    return reshape(node.builder, x, [math.prod(x.shape[:axis]), math.prod(x.shape[axis:])])


@imports("CastLike")
def cast_like(node: ImportedNode) -> Imported:
    """Cast to the second input's element type; its contents are not read."""
    x, like = node.numbers(node.need_type(1).dtype), node.need_type(1)
    if like.dtype == "f8e8m0" and x.dtype != like.dtype:
        return None
    saturate = node.attributes.get("saturate", 1)
    return x if x.dtype == like.dtype else node.builder.Cast(x, to=like.dtype, saturate=saturate)


@imports("ConstantOfShape", "Range")
def must_fold(node: ImportedNode) -> Imported:
    """Known at compile time, or else the shape of what it makes is not."""
    for i, what in enumerate(("shape",) if node.op_type == "ConstantOfShape" else ("start", "limit", "delta")):
        node.need_constant(i, what)
    raise node.fail("its result is too large to be made at compile time")
