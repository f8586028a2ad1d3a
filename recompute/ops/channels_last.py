"""Channels-last forms: operators whose activations are [n, spatial..., c] where ONNX has [n, c, spatial...].

One line beside an operator makes its form: `@channels_last(inputs=(0,), outputs=(0,))` over `Conv` registers
`ChannelsLastConv`, with the same attributes and weights in ONNX's layout.  The form's own numerics are a reference:
the operator itself between copies in ONNX's layout, which are declared as scratch; what is fast is a kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from ..errors import TypeRuleError
from ..language.element import Expr, Formula
from ..language.factors import Factor, renumbered
from ..language.layouts import permuted, to_first, to_last
from ..language.op import Case, Cost, Draw, Op, OperatorBuilder
from ..language.options import option_fields
from ..language.types import Operands, TensorType, Types, Value, Values
from .shape.reshape import reshape


def moves(shape: Sequence[int], perm: Sequence[int]) -> bool:
    """Whether the order of the elements in memory changes: not where only axes of one element change places."""
    moved = [p for p in perm if shape[p] != 1]
    return moved != sorted(moved) and 0 not in shape


def turn(b: OperatorBuilder, v: Value, perm: Sequence[int]) -> Value:
    """Emits a Transpose, or a Reshape where no element moves."""
    shape = [v.shape[p] for p in perm]
    return b.Transpose(v, perm=tuple(perm)) if moves(v.shape, perm) else reshape(b, v, shape)


class Laid(Op, abstract=True):
    """The operator `plain_class` with its inputs `activations` and its outputs `results` in another order of axes.

    `activations` and `results` are fields of some classes: their operators differ in what is turned.
    """

    plain_class: ClassVar[type[Op]]
    activations = results = tuple[int, ...]()

    @staticmethod
    def laid(ndim: int) -> tuple[int, ...]:
        """The permutation of the plain operator's axes that gives this one's."""
        raise NotImplementedError

    @staticmethod
    def unlaid(ndim: int) -> tuple[int, ...]:
        """The inverse of `laid`."""
        raise NotImplementedError

    @property
    def plain(self) -> Op:
        """The operator in ONNX's layout."""
        return _plain(self)

    def form_of(self, plain: Op) -> Laid:
        """This form of another operator of the plain class."""
        return dataclasses.replace(self, **plain.options())

    def plain_types(self, types: Types, which: Sequence[int]) -> tuple[TensorType | None, ...]:
        """Types in ONNX's layout, None where absent; `which` are turned."""
        return tuple(permuted(t, self.unlaid(t.ndim)) if i in which and t else t for i, t in enumerate(types))

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        try:
            types = self.plain.infer(*self.plain_types(inputs, self.activations))
        except TypeRuleError as e:
            raise self.fail(f"in its usual layout it is {e}", *inputs) from None
        return tuple(permuted(t, self.laid(t.ndim)) if i in self.results else t for i, t in enumerate(types))

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...] | None:
        """The plain operator's, turned; None where those follow from its expansion, as its own do."""
        plain_ins, plain_outs = self.plain_types(ins, self.activations), self.plain_types(outs, self.results)
        factors = self.plain.axis_factors(plain_ins, plain_outs)
        if factors is None:
            return None

        def turned(types: Types, which: Sequence[int]) -> Callable[[int, int], int]:
            ranks = {i: t.ndim for i, t in enumerate(types) if t is not None and i in which}
            return lambda i, axis: self.laid(ranks[i]).index(axis) if i in ranks else axis

        return renumbered(factors, turned(ins, self.activations), turned(outs, self.results))

    def sliced(self, factor: Factor, start: int, size: int, outs: Types) -> Op:
        """The form of the plain operator of a slice."""
        plain_outs = self.plain_types(outs, self.results)
        ranks = {i: t.ndim for i, t in enumerate(plain_outs) if t is not None and i in self.results}

        def plain_axis(i: int, axis: int) -> int:
            return self.unlaid(ranks[i]).index(axis) if i in ranks else axis

        (plain,) = renumbered((factor,), lambda i, axis: axis, plain_axis)
        return self.form_of(self.plain.sliced(plain, start, size, plain_outs))

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """Turned copies, then what the plain operator needs."""
        plain_ins, plain_outs = self.plain_types(ins, self.activations), self.plain_types(outs, self.results)
        turned = [
            t for ts, w in ((plain_ins, self.activations), (plain_outs, self.results)) for t in self._turned(ts, w)
        ]
        return (*turned, *self.plain.scratch(plain_ins, plain_outs))

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        spare = list(scratch)
        given, targets = list(ins), list(outs)
        for arrays, which in ((given, self.activations), (targets, self.results)):
            for i in which:
                if i < len(arrays) and (a := arrays[i]) is not None:
                    perm = self.unlaid(a.ndim)
                    shape = tuple(a.shape[p] for p in perm)
                    arrays[i] = spare.pop(0) if moves(a.shape, perm) else a.reshape(shape)
        for i in self.activations:
            if given[i] is not None and moves(ins[i].shape, self.unlaid(ins[i].ndim)):
                given[i][...] = ins[i].transpose(self.unlaid(ins[i].ndim))
        self.plain.compute(given, targets, spare)
        for i in self.results:
            if i < len(outs) and outs[i] is not None and moves(outs[i].shape, self.unlaid(outs[i].ndim)):
                outs[i][...] = targets[i].transpose(self.laid(outs[i].ndim))

    def checks(self, ins: Types, outs: Types) -> tuple:
        return self.plain.checks(self.plain_types(ins, self.activations), self.plain_types(outs, self.results))

    def cost(self, ins: Types, outs: Types) -> Cost:
        """The plain operator's: a kernel does not copy."""
        return self.plain.cost(self.plain_types(ins, self.activations), self.plain_types(outs, self.results))

    def expand(self, b: OperatorBuilder, *inputs: Value | None) -> tuple[Value | None, ...] | None:
        values = [turn(b, v, self.unlaid(v.ndim)) if v and i in self.activations else v for i, v in enumerate(inputs)]
        count = len(self.plain.infer(*(None if v is None else v.type for v in values)))
        made = b.emit(self.plain, *values, want=count)
        made = (made,) if count == 1 else made
        return tuple(turn(b, v, self.laid(v.ndim)) if i in self.results else v for i, v in enumerate(made))

    def _turned(self, types: Types, which: Sequence[int]) -> list[TensorType]:
        """Types, in ONNX's layout, of the operands of `which` that need a copy."""
        present = [types[i] for i in which if i < len(types)]
        return [t for t in present if t is not None and moves(t.shape, self.laid(t.ndim))]

    @classmethod
    def laid_sample(cls, case: Case, form: Laid) -> Case:
        """A sample of the plain operator for this form; it appears behind autodiff: no gradient is checked."""
        inputs = tuple(
            a.transpose(cls.laid(a.ndim)).copy() if i in form.activations and a is not None else a
            for i, a in enumerate(case.inputs)
        )
        return dataclasses.replace(case, op=form, inputs=inputs, gradient=False)


class ChannelsLast(Laid, abstract=True):
    """The operator `plain_class` with its inputs `activations` and its outputs `results` channels-last."""

    laid, unlaid = staticmethod(to_last), staticmethod(to_first)

    def element(self, *inputs: Expr | None) -> Formula:
        """The plain operator's where its vectors broadcast along the last axis."""
        return self.plain.channel_element(*inputs)

    def again(self, ins: Values, outs: Values) -> Any:
        """The form of what makes the plain operator's output again."""
        pair = self.plain.again(ins, outs)
        form = None if pair is None else channels_last_form(pair[0])
        return None if pair is None or form is None else (form, pair[1])

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        """The plain operator's with turned inputs."""
        for case in cls.plain_class.samples(draw):
            form = channels_last_form(case.op)
            assert form is not None
            yield cls.laid_sample(case, form)


@functools.lru_cache(maxsize=4096)
def _plain(op: Laid) -> Op:
    return op.plain_class(**op.options(op.plain_class))


#: operator class → its channels-last form
FORMS: dict[type[Op], type[ChannelsLast]] = {}
C = TypeVar("C", bound=type[Op])


def copied_fields(cls: type[Op]) -> list[Any]:
    """The attributes of an operator, for `make_dataclass`."""
    fields: Any = option_fields(cls)
    return [(f.name, f.type, dataclasses.field(default=f.default, kw_only=f.kw_only)) for f in fields]


def channels_last(*, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Callable[[C], C]:
    """Registers the channels-last form of the operator below, of which these inputs and outputs are activations."""

    def register(cls: C) -> C:
        traits = ("required_outputs", "inplace", "inplace_output", "small_outputs", "moves_data")
        namespace = {name: getattr(cls, name) for name in traits}
        namespace |= {"plain_class": cls, "activations": inputs, "results": outputs, "__module__": cls.__module__}
        namespace["__doc__"] = f"{cls.__name__} with activations [n, spatial..., c]."
        name = f"ChannelsLast{cls.__name__}"
        fields, bases = copied_fields(cls), (ChannelsLast,)
        form = dataclasses.make_dataclass(name, fields, bases=bases, namespace=namespace, frozen=True)
        form.__module__ = cls.__module__
        setattr(sys.modules[cls.__module__], name, form)
        FORMS[cls] = form
        return cls

    return register


def channels_last_form(op: Op) -> ChannelsLast | None:
    """The channels-last form of an operator; None where it has none."""
    form = FORMS.get(type(op))
    return None if form is None else form(**op.options())
