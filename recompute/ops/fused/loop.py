"""Loop: element-wise operators, and column sums behind them, as one operator that reads and writes each value once."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...language.element import DEVICE_ONLY, Expr, argument, nodes, substitute
from ...language.formulas import formula
from ...language.ir import Operator
from ...language.kernels import enough
from ...language.op import Cost, Op
from ...language.text import parse_applied, show_applied
from ...language.types import TensorType, Types, need
from ..common import normal_axes
from ..reduction.sums import Reduce, ReduceMean, ReduceSum
from ..shape.reshape import Expand
from ..tiles import TILE

#: elements from which on an operator is worth a loop on the processor; smaller ones are left to their own numerics
SMALLEST = 1 << 14


@dataclass(frozen=True)
class Member:
    """One operator of a body: positions of its inputs (None: absent) and of its result."""

    op: Op
    inputs: tuple[int | None, ...]
    result: int

    @property
    def sums(self) -> bool:
        """Whether it is a column sum."""
        return isinstance(self.op, Reduce)


@functools.lru_cache(maxsize=1 << 14)
def members(body: str) -> tuple[Member, ...]:
    """The operators of a body, in order."""
    result = []
    for text in body.split("; "):
        name, op, inputs = parse_applied(text)
        result.append(Member(op, tuple(None if n is None else int(n) for n in inputs), int(name)))
    return tuple(result)


def show_body(found: Sequence[Member]) -> str:
    """The text of members: `%2 = Add(%0, %1); %3 = Relu(%2)`."""
    return "; ".join(
        f"%{m.result} = {show_applied(m.op, ['_' if i is None else f'%{i}' for i in m.inputs])}" for m in found
    )


def is_column_sum(op: Op, x: TensorType) -> bool:
    """Whether it sums (or averages) over all axes but the last."""
    if not isinstance(op, (ReduceSum, ReduceMean)) or x.ndim < 2 or not x.is_float:
        return False
    return normal_axes(op.axes, x.ndim, op) == tuple(range(x.ndim - 1))


def iteration(op: Op, ins: Types, outs: Types) -> tuple[int, ...]:
    """The shape over which an element-wise operator, a column sum or a Loop runs."""
    if isinstance(op, Loop):
        return op.iteration(*ins)
    t = need(ins[0] if isinstance(op, Reduce) else outs[0])
    return t.shape


def loops(op: Operator, *, device: bool = False) -> bool:
    """Whether an operator is run by a generated loop, alone or in a Loop; depends on it and its types only.

    `device`: by one for a GPU, which takes every function and any size.
    """
    types, outs = op.types
    if not outs or outs[0] is None or op.op.random:
        return False
    if isinstance(op.op, Loop):
        return device or not _device_only(op.op.expressions(_dtypes(types)))
    least = 0 if device else enough(SMALLEST)
    if isinstance(op.op, Reduce):
        x = types[0]
        return x is not None and x.size >= least and x.is_float and is_column_sum(op.op, x)
    if op.views() or any((t is None and not device) or (t and t.shape != outs[0].shape) for t in outs):
        return False
    if outs[0].size < (min(least, 1) if op.op.updates else least):  # updates: the same code for all parameters
        return False
    exprs = formula(op.op, _dtypes(types))
    if exprs is None:
        return False
    return device or not _device_only([x for x in exprs if x is not None])


def _device_only(roots: Sequence[Expr]) -> bool:
    return any(x.fn in DEVICE_ONLY for x in nodes(roots))


def _dtypes(types: Types) -> tuple[str | None, ...]:
    return tuple(None if t is None else t.dtype for t in types)


def tiles(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Stretches of a row-major shape of about TILE elements, whole in all dimensions but one; the first is largest."""
    if not math.prod(shape):
        return
    axis = next((a for a in range(len(shape)) if math.prod(shape[a + 1 :]) <= TILE), len(shape))
    if axis == len(shape):
        yield ()
        return
    step = max(TILE // math.prod(shape[axis + 1 :]), 1)
    inner = (slice(None),) * (len(shape) - axis - 1)
    for outer in itertools.product(*(range(d) for d in shape[:axis])):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            yield (*(slice(i, i + 1) for i in outer), slice(start, stop), *inner)


class Loop(Op):
    """One pass over a shape to which its inputs broadcast.

    `body`: element-wise operators, and sums over all axes but the last, in order: `%2 = Add(%0, %1); %3 = Relu(%2)`,
    %0, %1, ... being the inputs.  `yields`: the results that are outputs.  Every operator has the same shape; sums are
    read by none.
    """

    body: str
    yields: tuple[int, ...]

    @property
    def required_outputs(self):
        """All outputs are required: their number."""
        return len(self.yields)

    @property
    def members(self) -> tuple[Member, ...]:
        """The operators of the body."""
        return members(self.body)

    @property
    def makers(self) -> tuple[Member, ...]:
        """The member that makes each output."""
        by_result = {m.result: m for m in self.members}
        return tuple(by_result[y] for y in self.yields)

    def overwrites(self, output):
        """Any input of an output's type: it is read at the same place only.  A sum takes no one's place."""
        return () if self.makers[output].sums else tuple(range(self.members[0].result))

    @property
    def inplace_output(self):
        """The first that is no sum."""
        return next((i for i, m in enumerate(self.makers) if not m.sums), 0)

    @property
    def inplace(self):
        """The inputs that the output at `inplace_output` may overwrite."""
        return self.overwrites(self.inplace_output)

    def types(self, inputs: Types, tile: Sequence[int] | None = None) -> dict[int, TensorType | None]:
        """Position → type, for inputs and results.  TypeRuleError where a member does not belong here.

        `tile`: the shape of a part of the loop, whose inputs these are.
        """
        result: dict[int, TensorType | None] = dict(enumerate(inputs))
        shape: tuple[int, ...] | None = None
        summed: set[int] = set()
        for m in self.members:
            if m.result in result or any(i is not None and i not in result for i in m.inputs):
                raise self.fail(f"%{m.result} is numbered wrongly, or reads a later result", *inputs)
            if not summed.isdisjoint(m.inputs):
                raise self.fail(f"%{m.result} reads a sum", *inputs)
            ins = [None if i is None else result[i] for i in m.inputs]
            outputs = _within(m.op, tile).infer(*ins)
            whole = need(ins[0] if m.sums else outputs[0])
            if m.sums and not is_column_sum(m.op, whole):
                raise self.fail(f"%{m.result} is no sum over all axes but the last", *inputs)
            if len(outputs) != 1 or shape not in (None, whole.shape):
                raise self.fail(f"%{m.result} has another shape", *inputs)
            shape = whole.shape
            result[m.result] = outputs[0]
            summed |= {m.result} if m.sums else set()
        return result

    def iteration(self, *inputs: TensorType | None) -> tuple[int, ...]:
        """The shape of the loop."""
        values = self.types(inputs)
        m = self.members[0]
        whole = need(values[m.inputs[0] or 0] if m.sums else values[m.result])
        return whole.shape

    def infer(self, *inputs):
        self.need(*inputs, count=len(inputs))
        values = self.types(inputs)
        if len(inputs) != self.members[0].result:
            raise self.fail(f"its body takes {self.members[0].result} inputs", *inputs)
        results = {m.result for m in self.members}
        if not self.yields or len({*self.yields}) < len(self.yields) or not results.issuperset(self.yields):
            raise self.fail(
                f"it yields {list(self.yields)}: each must be a result of the body, and none twice", *inputs
            )
        return tuple(values[y] for y in self.yields)

    def expressions(self, dtypes: Sequence[str | None]) -> list[Expr]:
        """The expression of each output for inputs of these element types; of a sum: what is summed."""
        values: dict[int, Expr] = {i: argument(i, t) for i, t in enumerate(dtypes) if t is not None}
        for m in self.members:
            operands = [None if i is None else values[i] for i in m.inputs]
            if m.sums:
                assert operands[0] is not None
                values[m.result] = operands[0]
                continue
            exprs = formula(m.op, tuple(None if x is None else x.dtype for x in operands))
            assert exprs is not None and exprs[0] is not None, f"{m.op.name} has no element"
            values[m.result] = substitute([exprs[0]], operands)[0]
        return [values[y] for y in self.yields]

    def element(self, *inputs):
        """The formulas of its outputs; None where one is a sum."""
        if any(m.sums for m in self.members):
            return None
        return tuple(substitute(self.expressions([None if x is None else x.dtype for x in inputs]), inputs))

    def expand(self, b, *inputs):
        values = dict(enumerate(inputs))
        for m in self.members:
            values[m.result] = b.emit(m.op, *(None if i is None else values[i] for i in m.inputs))
        return tuple(values[y] for y in self.yields)

    def cost(self, ins, outs):
        """The members' operations; the bytes of what comes from outside and goes there."""
        types = self.types(ins)
        flops = sum(
            m.op.cost([None if i is None else types[i] for i in m.inputs], [types[m.result]]).flops
            for m in self.members
        )
        return Cost(flops, super().cost(ins, outs).bytes)

    def scratch(self, ins, outs):
        """For a tile: each member's result and temporaries; for a sum the tile's and the total in float64."""
        shape = self.iteration(*ins)
        return tuple(itertools.chain.from_iterable(self._buffers(ins, shape, _first(shape))))

    def _buffers(self, ins: Types, shape: tuple[int, ...], tile: tuple[slice, ...]) -> list[list[TensorType]]:
        """For each member, the buffers of a tile."""
        lengths = [len(range(*s.indices(d))) for s, d in zip(tile, shape, strict=True)]
        types = self.types([t and t.with_shape(_cut_shape(t.shape, lengths)) for t in ins], lengths)
        result: list[list[TensorType]] = []
        for m in self.members:
            output = need(types[m.result])
            if m.sums:
                result.append([TensorType("f64", output.shape)] * 2)
            else:
                operands = [None if i is None else types[i] for i in m.inputs]
                result.append([output, *_within(m.op, lengths).scratch(operands, [output])])
        return result

    def compute(self, ins, outs, scratch):
        """Tile by tile, each member by its own numerics; outputs are written when a tile is done with its inputs."""
        types = [None if a is None else TensorType.of(a) for a in ins]
        shape = self.iteration(*types)
        spare = iter(scratch)
        buffers = [[next(spare) for _ in some] for some in self._buffers(types, shape, _first(shape))]
        for m, (total, *_) in zip(self.members, buffers, strict=True):
            if m.sums:
                total.fill(0)
        for tile in tiles(shape):
            inputs = [None if a is None else a[_cut(a.shape, tile)] for a in ins]
            values = self._tile(inputs, buffers, self._buffers(types, shape, tile))
            for m, out in zip(self.makers, outs, strict=True):
                if not m.sums:
                    out[tile] = values[m.result]
        for m, out in zip(self.makers, outs, strict=True):
            if m.sums:
                total = buffers[self.members.index(m)][0]
                if isinstance(m.op, ReduceMean):
                    np.divide(total, math.prod(shape[:-1]), out=total)
                out[...] = total.reshape(out.shape)

    def _tile(
        self, ins: Sequence[Any], buffers: Sequence[Sequence[Any]], wanted: Sequence[Sequence[TensorType]]
    ) -> dict[int, Any]:
        """All members on one tile, in parts of the buffers of these types; position → array."""
        values: dict[int, Any] = dict(enumerate(ins))
        for m, types, held in zip(self.members, wanted, buffers, strict=True):
            operands: list[Any] = [None if i is None else values[i] for i in m.inputs]
            if m.sums:
                total, part = held
                x: Any = operands[0]
                np.sum(x, axis=tuple(range(x.ndim - 1)), dtype=part.dtype, out=part.reshape(-1))
                np.add(total, part, out=total)
                continue
            result, *temporaries = (a.reshape(-1)[: t.size].reshape(t.shape) for a, t in zip(held, types, strict=True))
            _within(m.op, result.shape).compute(operands, [result], temporaries)
            values[m.result] = result
        return values

    @classmethod
    def samples(cls, draw):
        """A chain, operands of every kind, two outputs, column sums; in place; more than a tile."""
        chain = cls(body="%2 = Add(%0, %1); %3 = Tanh(%2)", yields=(3,))
        yield draw.case(chain, draw("f64[3,4]"), draw("f64[4]"))
        yield draw.case(chain, draw("f64[]"), draw("f64[2,3,1]"))
        yield draw.case(chain, draw("f64[0,3]"), draw("f64[3]"))
        yield draw.case(chain, draw("f32[70,1000]"), draw("f32[70,1]"))
        wide = cls(body="%2 = Expand(%0) {shape=[70,1000]}; %3 = ReluGrad(%1, %2)", yields=(3,))
        yield draw.case(wide, draw("f32[70,1]"), draw("f32[70,1000]"))
        two = cls(body="%3 = Mul(%0, %1); %4 = Sub(%3, %2); %5 = Exp(%4)", yields=(3, 5))
        yield draw.case(two, draw("f64[2,3,4]"), draw("f64[3,1]"), draw("f64[2,3,4]"))
        sums = cls(
            body="%2 = SigmoidGrad(%0, %1); %3 = ReduceSum(%2) {axes=[0,1], keepdims=0}; "
            "%4 = Mul(%2, %0); %5 = ReduceMean(%4) {axes=[0,1]}",
            yields=(2, 3, 5),
        )
        yield draw.case(sums, draw("f64[2,3,4]"), draw("f64[2,3,4]"))
        yield draw.case(sums, draw("f32[9,50,100]"), draw("f32[9,50,100]"))
        yield draw.case(sums, draw("f16[2,3,4]"), draw("f16[2,3,4]"))
        mixed = cls(body='%2 = Cast(%0) {to="f16"}; %3 = Mul(%2, %1); %4 = Cast(%3) {to="f32"}', yields=(2, 4))
        yield draw.case(mixed, draw("f32[3,40]"), draw("f16[40]"))
        only = cls(body="%1 = ReduceSum(%0) {axes=[0], keepdims=0}", yields=(1,))
        yield draw.case(only, draw("f64[5,3]"))


def _first(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The first tile, empty where there is none."""
    return next(tiles(shape), tuple(slice(0, d) for d in shape))


def _within(op: Op, tile: Sequence[int] | None) -> Op:
    """The operator as it is on a tile: one that names its shape names the tile's."""
    return op if tile is None or not isinstance(op, Expand) else Expand(shape=tuple(tile))


def _cut(shape: Sequence[int], tile: tuple[slice, ...]) -> tuple[slice, ...]:
    """The part of an operand of this shape that a tile reads."""
    lead = len(tile) - len(shape)
    return tuple(slice(None) if d == 1 else s for d, s in zip(shape, tile[lead:], strict=False))


def _cut_shape(shape: Sequence[int], lengths: Sequence[int]) -> list[int]:
    lead = len(lengths) - len(shape)
    return [1 if d == 1 else n for d, n in zip(shape, lengths[lead:], strict=False)]
