"""Parts that several families share: broadcasting, axes, element-wise bases."""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..errors import TypeRuleError
from ..language.element import FLOAT_UFUNCS, UFUNCS, Expr, Formula
from ..language.factors import Factor, aligned
from ..language.formulas import through_expansion
from ..language.layouts import Turned
from ..language.op import Cost, Op
from ..language.types import Operands, TensorType, Types, Values, dtype_name
from .array_steps import array_steps


def normal_axis(axis: int, ndim: int, op: Op) -> int:
    """`axis` counted from the front.  TypeRuleError where it is out of range."""
    if not -ndim <= axis < max(ndim, 1):
        raise TypeRuleError(f"{op.name}: axis {axis} is out of range for {ndim} dimensions")
    return axis % ndim if ndim else 0


def normal_axes(axes: Sequence[int] | None, ndim: int, op: Op) -> tuple[int, ...]:
    """Sorted axes counted from the front; None: all.  0 and -1 of a scalar are none: files of PyTorch have them."""
    if axes is None or (ndim == 0 and set(axes) <= {0, -1}):
        return tuple(range(ndim))
    result = sorted({normal_axis(a, ndim, op) for a in axes})
    return tuple(result)


def broadcast(op: Op, *types: TensorType) -> tuple[int, ...]:
    """The NumPy-broadcast shape of the inputs.  TypeRuleError where they do not fit."""
    shapes = [t.shape for t in types]
    if all(s == shapes[0] for s in shapes):
        return shapes[0]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise op.fail("shapes do not broadcast", *types) from None


def arity(cls: Any) -> int:
    """How many inputs an element-wise operator has: `takes`, or those of its ufunc, its `element` or its `expand`."""
    if cls not in _ARITY:
        _ARITY[cls] = cls.takes or _inputs_of(cls)
    return _ARITY[cls]


_ARITY: dict[Any, int] = {}


def _inputs_of(cls: Any) -> int:
    if (ufunc := getattr(cls, "ufunc", "")) and hasattr(np, ufunc):
        return getattr(np, ufunc).nin
    parameters = list(inspect.signature(cls.element).parameters.values())[1:]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        parameters = list(inspect.signature(cls.expand).parameters.values())[2:]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters), (
        f"{cls.__name__} does not say how many inputs it has"
    )
    return len(parameters)


class Elementwise(Op, abstract=True):
    """Broadcasts its inputs, all of one element type, to one output of the same element type."""

    #: floating-point operations for one output element
    flops_per_element: ClassVar[int] = 1
    #: how many inputs there are, where neither `ufunc` nor `element` says it
    takes: ClassVar[int] = 0
    #: takes floats only, as ONNX has it
    floats: ClassVar[bool] = False
    #: takes bool beside numbers
    truths: ClassVar[bool] = True
    autocast = "follow"

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        self.need(*inputs, count=arity(type(self)))
        present = [t for t in inputs if t is not None]
        if any(t.dtype != present[0].dtype for t in present):
            raise self.fail("element types differ", *inputs)
        if self.floats and not present[0].is_float:
            raise self.fail("takes floats only", *inputs)
        if not self.truths and present[0].dtype == "bool":
            raise self.fail("takes numbers, not bool", *inputs)
        return (TensorType(self.out_dtype(present[0].dtype), broadcast(self, *present)),)

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...] | None:
        """Every axis, where inputs are not repeated along it."""
        return aligned(ins, outs)

    def out_dtype(self, dtype: str) -> str:
        """The output's element type for inputs of type `dtype`."""
        return dtype

    def element(self, *inputs: Expr | None) -> Formula:
        return through_expansion(self, inputs)

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """The temporaries of the formula, if that is what is computed."""
        if type(self).compute is not Elementwise.compute:
            return ()
        steps = array_steps(self, tuple(None if t is None else t.dtype for t in ins), self.inplace)
        assert outs[0] is not None
        return tuple(TensorType(dtype, outs[0].shape) for dtype in steps.temporaries)

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """The formula of an element, step by step."""
        dtypes = tuple(None if a is None else dtype_name(a.dtype) for a in ins)
        array_steps(self, dtypes, self.inplace).run(ins, outs[0], scratch)

    def cost(self, ins: Types, outs: Types) -> Cost:
        """`flops_per_element` for each element of the output."""
        base = super().cost(ins, outs)
        return Cost(self.flops_per_element * sum(t.size for t in outs if t), base.bytes)

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        """The same operator: all inputs broadcast to the output."""
        y = outs[0]
        if y is None or y.ndim < 3:
            return None
        turned = tuple(0 if v is None or (v.size == 1 and v.ndim < y.ndim) else y.ndim for v in ins)
        return Turned(self, turned, (True,) * len(outs))


class Ufunc(Elementwise, abstract=True):
    """Element-wise operator whose numerics are one NumPy ufunc (named `ufunc`)."""

    ufunc: ClassVar[str]

    #: a ufunc reads each element before it writes it
    inplace = (0, 1)

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        getattr(np, self.ufunc)(*ins, out=outs[0])

    def element(self, *inputs: Expr | None) -> Formula:
        """The ufunc, where loops know it."""
        floats = all(x is not None and x.type.is_float for x in inputs)
        name = getattr(self, "ufunc", "")
        ufunc = UFUNCS.get(name) or (FLOAT_UFUNCS.get(name) if floats else None)
        return None if ufunc is None else ufunc(*inputs)


def define(base: type[Ufunc], module: str, name: str, ufunc: str, meaning: str, **members: Any) -> type[Ufunc]:
    """An operator of ONNX that differs from its family's others in a ufunc and in `members` of its class."""
    body = {"__doc__": meaning, "__module__": module, "ufunc": ufunc, **members}
    return types.new_class(name, (base,), {"onnx": True}, lambda space: space.update(body))
