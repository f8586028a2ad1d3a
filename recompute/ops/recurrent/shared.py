"""Shared parts of recurrent operators: types, directions, sequence lengths, import, export and unrolled form.

The equations are those of the ONNX operators RNN, GRU and LSTM.  Shapes: x [T, N, in], w [D, gates·H, in],
r [D, gates·H, H], bias [D, 2·gates·H], lengths i32 [N], initial state [D, N, H]; Y [T, D, N, H].  D is 2 where both
directions run.  Each operator runs fused: one matrix product for all inputs, then one for each step.  Outputs after
ONNX's own hold what the gradient needs, and are made only where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from ...language.factors import SUM, Factor, Where, factor
from ...language.op import Case, Cost, Draw, FunctionWriter, Imported, ImportedNode, Op, OperatorBuilder
from ...language.types import Array, Operands, TensorType, Types, Value, Values, need, present
from ..shape.reshape import reshape
from .parts import clear, column_sums, cut, filled, joint, row
from .unrolled import unrolled

DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


def batch_factor(ins: Types, more: Sequence[Where], outs: Sequence[Where | str]) -> Factor:
    """The batch of (x, w, r, bias?, lengths?, initial_h?, ...)."""
    x = need(ins[0])
    return factor(x.shape[1], [1, None, None, None, 0, 1, *more], outs)


class Recurrent(Op, abstract=True):
    """A recurrent operator: (x, w, r, bias?, lengths?, initial_h?, ...) → (Y, Y_h, ..., what the gradient needs)."""

    autocast = "low"
    hidden_size: int
    direction: str = "forward"
    #: gates computed from x and h
    gates: ClassVar[int]
    #: how many inputs, and how many outputs are ONNX's
    arity: ClassVar[int] = 6
    onnx_outputs: ClassVar[int] = 2

    @property
    def directions(self) -> int:
        """1, or 2 where both directions run."""
        return DIRECTIONS[self.direction]

    def backwards(self, d: int) -> bool:
        """Whether direction number `d` goes from the last step to the first."""
        return self.direction == "reverse" or d == 1

    def order(self, d: int, steps: int) -> list[int]:
        """The steps in the order in which direction `d` takes them."""
        return list(range(steps))[:: -1 if self.backwards(d) else 1]

    def kept(self, steps: int, batch: int) -> list[tuple[int, ...]]:
        """Shapes of what is kept for the gradient."""
        return []

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        """Y, the last state(s), and what the gradient needs.  TypeRuleError where shapes do not fit."""
        x, w, r, bias, lengths, *states = filled(inputs, self.arity)
        if w is None or r is None:
            raise self.fail("needs x, w and r", *inputs)
        if self.direction not in DIRECTIONS or x.ndim != 3:
            raise self.fail(f"direction '{self.direction}' is unknown, or x is not [steps, batch, features]", *inputs)
        if not x.is_float:
            raise self.fail("needs floats", *inputs)
        steps, batch, features = x.shape
        d, h, g = self.directions, self.hidden_size, self.gates * self.hidden_size
        wanted = [(w, (d, g, features)), (r, (d, g, h)), (bias, (d, 2 * g)), *((s, (d, batch, h)) for s in states[:2])]
        wanted += [(p, (d, 3 * h)) for p in states[2:]]
        for t, shape in wanted:
            if t is not None and (t.shape != shape or t.dtype != x.dtype):
                raise self.fail(f"{t} should be {x.with_shape(shape)}", *inputs)
        if lengths is not None and lengths.shape != (batch,):
            raise self.fail(f"sequence lengths should have shape [{batch}]", *inputs)
        last = [x.with_shape((d, batch, h))] * (self.onnx_outputs - 1)
        return (x.with_shape((steps, d, batch, h)), *last, *map(x.with_shape, self.kept(steps, batch)))

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...] | None:
        last, kept = [1] * (self.onnx_outputs - 1), [2] * (len(outs) - self.onnx_outputs)
        return (batch_factor(ins, [1], [2, *last, *kept]),)

    def cost(self, ins: Types, outs: Types) -> Cost:
        """Two flops for each weight, step and row."""
        x, w, r = present(*ins[:3])
        return Cost(2 * x.shape[0] * x.shape[1] * (w.size + r.size), super().cost(ins, outs).bytes)

    def project(self, x: Array, w: Array, bias: Array | None, out: Array) -> None:
        """out [T, N, gates·H] = x wᵀ + bias, for one direction."""
        np.matmul(x.reshape(-1, x.shape[2]), w.T, out=out.reshape(-1, w.shape[0]))
        if bias is not None:
            np.add(out, bias, out=out)

    def gradient(self, b: OperatorBuilder, ins: Values, outs: Sequence[Value], grads: Values) -> Values:
        """The fused gradient; what it does not serve, by the unrolled form."""
        if any(g is not None for g in grads[self.onnx_outputs :]):
            return super().gradient(b, ins, outs, grads)
        op = GRADIENTS[self.name](**self.options())
        kept = [outs[0], *outs[self.onnx_outputs :]]
        inputs = [*filled(ins, self.arity), *kept, *grads[: self.onnx_outputs]]
        gradients = list(b.emit(op, *inputs, want=self.arity - 1))
        gradients.insert(4, None)  # lengths
        return [None if v is None else g for v, g in zip(ins, gradients, strict=False)]

    def export(self, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
        """ONNX's own operator, unless what the gradient needs is asked for: then the unrolled form."""
        if any(outs[self.onnx_outputs :]):
            return False
        g.node(self.name, ins, outs[: self.onnx_outputs], **self.onnx_attributes())
        return True

    def onnx_attributes(self) -> dict[str, Any]:
        """Attributes as ONNX has them."""
        return self.options()

    # -- unrolled --------------------------------------------------------------------------------------------------

    def expand(self, b: OperatorBuilder, *inputs: Value | None) -> tuple[Value | None, ...] | None:
        """One matrix product for all inputs, then the steps one after the other."""
        runs = [self._unrolled(b, d, filled(inputs, self.arity)) for d in range(self.directions)]
        return tuple(
            parts[0] if len(parts) == 1 else b.Concat(*parts, axis=1 if i == 0 else 0)
            for i, parts in enumerate(zip(*runs, strict=True))
        )

    def _unrolled(self, b: OperatorBuilder, d: int, inputs: Sequence[Any]) -> list[Value]:
        x, w, r, bias, lengths, *states = inputs
        steps, batch, features = x.shape
        width = self.gates * self.hidden_size
        w, r, bias = row(b, w, d), row(b, r, d), None if bias is None else row(b, bias, d)
        h, *others = (None if v is None else row(b, v, d) for v in states)
        zero = b.Fill(dtype=x.dtype, shape=(batch, self.hidden_size))
        biases = (None, None) if bias is None else (cut(b, bias, 0, width, 0), cut(b, bias, width, 2 * width, 0))
        projected = b.MatMul(b.Reshape(x, shape=(steps * batch, features)), w, transB=1)
        state = [zero if h is None else h]
        if self.onnx_outputs == 3:
            state.append(zero if others[0] is None else others[0])
        found: list[dict[int, Any]] = [{} for _ in range(1 + len(self.kept(steps, batch)))]
        for t in self.order(d, steps):
            gx = cut(b, projected, t * batch, (t + 1) * batch, 0)
            new, kept = self.step(b, gx, state, r, biases, others[1] if len(others) > 1 else None)
            y = new[0]
            if lengths is not None:
                active = b.Greater(reshape(b, lengths, (batch, 1)), b.constant(t, lengths.dtype))
                new = [b.Where(active, n, s) for n, s in zip(new, state, strict=True)]
                y = b.Where(active, y, zero)
            for place, value in zip(found, [y, *(new[1] if k is None else k for k in kept)], strict=True):
                place[t] = value
            state = new
        shapes = [(steps, 1, batch, self.hidden_size), *((1, *k[1:]) for k in self.kept(steps, batch))]
        y, *kept = (
            b.Reshape(joint(b, [place[t] for t in range(steps)]), shape=shape) if steps
            else b.Fill(dtype=x.dtype, shape=shape) for place, shape in zip(found, shapes, strict=True)
        )  # fmt: skip
        return [y, *(b.Reshape(s, shape=(1, *s.shape)) for s in state), *kept]

    def step(
        self, b: OperatorBuilder, gx: Any, state: Any, r: Any, biases: Any, peepholes: Any
    ) -> tuple[list[Any], list[Any]]:
        """New states, and what is kept of one step (None: the new second state)."""
        raise NotImplementedError

    # -- import ----------------------------------------------------------------------------------------------------

    @classmethod
    def from_onnx(cls, node: ImportedNode) -> Imported:
        """Batch-first layouts by transposing; zero initial states and full lengths are left out."""
        attributes = node.attributes
        if attributes.get("clip"):
            raise node.fail("clips its gates, which is not supported")
        batch_first = bool(attributes.get("layout", 0))
        x_type = node.need_type(0)
        steps = x_type.shape[1 if batch_first else 0]
        inputs = [None if _absent(node, i, steps) else node.input(i) for i in range(cls.arity)]
        hidden = attributes.get("hidden_size") or node.need_type(2).shape[-1]
        make: Any = cls
        op = make(hidden, attributes.get("direction", "forward"), *cls.more(node))
        if batch_first:
            for i, perm in ((0, (1, 0, 2)), (5, (1, 0, 2)), (6, (1, 0, 2))):
                if i < len(inputs) and inputs[i] is not None:
                    inputs[i] = node.builder.Transpose(inputs[i], perm=perm)
        want = max((i + 1 for i in range(cls.onnx_outputs) if node.wants(i)), default=1)
        if node.unrolled(steps):
            results = unrolled(op, node.builder, inputs, node.base, want)
        else:
            results = node.emit(op, *inputs, want=want)
            results = list(results) if isinstance(results, tuple) else [results]
        if batch_first:
            results = [node.builder.Transpose(v, perm=(1, 0, 2) if i else (2, 0, 1, 3)) for i, v in enumerate(results)]
        return tuple(results)

    @classmethod
    def more(cls, node: ImportedNode) -> tuple[Any, ...]:
        """Further attributes; a ModelError where activations are not the default ones."""
        wanted = cls.default_activations * DIRECTIONS.get(node.attributes.get("direction", "forward"), 1)
        activations = tuple(str(a).capitalize() for a in node.attributes.get("activations", wanted))
        if activations != tuple(wanted):
            raise node.fail(f"has activations {list(activations)}; only {list(wanted)} are supported")
        return ()

    default_activations: ClassVar[tuple[str, ...]] = ()


def _absent(node: ImportedNode, i: int, steps: int) -> bool:
    """Whether optional input `i` says nothing: full sequence lengths, or a state that starts at zero."""
    lengths = node.constant(i)
    if lengths is None or i < 4:
        return node.type(i) is None
    if i == 4:
        return bool((lengths == steps).all())
    return node.origin(i) != "initializer" and not lengths.any()


#: operator → its gradient operator
GRADIENTS: dict[str, Any] = {}


class RecurrentGrad(Op, abstract=True):
    """(the operator's inputs, Y, what was kept, dY?, dY_h?, ...) → gradients of x, w, r, bias, initial states, ...

    Backpropagation through time, fused.  All outputs are optional.
    """

    required_outputs = 0
    hidden_size: int
    direction: str = "forward"
    #: the operator whose gradient this is
    of: ClassVar[type[Recurrent]]

    def __init_subclass__(cls, **kw: Any) -> None:
        """Registers it as the gradient of `of`."""
        super().__init_subclass__(**kw)
        if hasattr(cls, "of"):
            GRADIENTS[cls.of.__name__] = cls

    def forward(self) -> Any:
        """The operator whose gradient this is."""
        return self.of(**self.options())

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        """The types of the inputs; of those that are absent, what they would be."""
        op, arity = self.forward(), self.of.arity
        x, w, r = present(*inputs[:3])
        outs = op.infer(*inputs[:arity])
        kept = (outs[0], *outs[op.onnx_outputs :])
        if tuple(inputs[arity : arity + len(kept)]) != kept:
            raise self.fail(f"does not fit the results of {op.name}", *inputs)
        for t, g in zip(outs, inputs[arity + len(kept) :], strict=False):
            if g is not None and g != t:
                raise self.fail("a gradient does not fit", *inputs)
        d, width = w.shape[:2]
        bias, state = x.with_shape((d, 2 * width)), outs[1]
        return (x, w, r, bias, state, state, x.with_shape((d, 3 * self.hidden_size)))[: arity - 1]

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...] | None:
        """The batch, over which gradients of weights are summed."""
        op = self.forward()
        kept = len(op.kept(1, 1))
        results = [2] * (1 + kept), [2, *[1] * (op.onnx_outputs - 1)]
        axes = [*([1, None] if op.arity > 6 else []), *results[0], *results[1]]
        return (batch_factor(ins, axes, [1, SUM, SUM, SUM, 1, 1, SUM]),)

    def cost(self, ins: Types, outs: Types) -> Cost:
        return Cost(2 * self.forward().cost(ins, outs).flops, super().cost(ins, outs).bytes)

    def parts(self, ins: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The operator's inputs, what it made (Y first), the gradients that flow in."""
        op = self.of
        kept = 1 + len(self.forward().kept(1, 1))
        values = filled(ins, op.arity + kept + op.onnx_outputs)
        return values[: op.arity], values[op.arity : op.arity + kept], values[op.arity + kept :]

    def expand(self, b: OperatorBuilder, *inputs: Value | None) -> tuple[Value | None, ...] | None:
        """The unrolled operator, differentiated; no gradients of inputs that are absent."""
        operands, _, grads = self.parts(inputs)
        gradients = [*b.gradient_of_expansion(self.forward(), operands, grads)]
        for i, (v, g) in enumerate(zip(operands, gradients, strict=True)):
            if g is None and v is not None and v.type.is_float:
                gradients[i] = b.fill(0.0, v)
        return (*gradients[:4], *gradients[5:])

    def rooms(self, ins: Sequence[Any], outs: Types, width: int, states: int) -> list[TensorType]:
        """The temporaries that all have: gates' gradients, of `width` columns, the states before each step, x's second
        part, as many `states`; the rows that are active come last."""
        x, (steps, batch, features) = ins[0], ins[0].shape
        dx, _, dr = filled(outs, 3)[:3]
        both = self.forward().directions == 2
        shapes = [
            (steps, batch, width),
            (steps, batch, self.hidden_size) if dr is not None else (0,),
            (steps, batch, features) if dx is not None and both else (0,),
            *[(batch, self.hidden_size)] * states,
        ]
        return [*map(x.with_shape, shapes), active_rows(x, ins[4])]

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """Each direction: the steps from the last to the first, then matrix products over all of them."""
        operands, saved, _ = self.parts(ins)
        x, w = operands[:2]
        outs = filled(outs, 7)
        for d in range(w.shape[0]):
            self.run_back(d, ins, outs, scratch)
            flat = scratch[0].reshape(-1, scratch[0].shape[2])
            self.input_gradients(d, flat[:, : w.shape[1]], x, w, outs, scratch[2])
            if outs[2] is not None:
                self.state_gradients(d, flat, operands, saved, outs[2][d], scratch)
            if outs[3] is not None:
                self.bias_gradient(flat, outs[3][d], w.shape[1])

    def bias_gradient(self, dg: Array, db: Array, width: int) -> None:
        """Writes the gradient of the second product's bias; the first one's is in db's first `width` elements."""
        db[width:] = db[:width]

    def run_back(self, d: int, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """The gates' gradients of all steps of direction `d`, into scratch[0], and those of the initial states."""
        raise NotImplementedError

    def steps_back(
        self, order: Sequence[int], d: int, lengths: Array | None, dy: Array | None, scratch: Operands
    ) -> Iterator[tuple[int, Array | None]]:
        """Steps from the last to the first, and their active rows, when dy has been added to the state's gradient:
        `scratch` has that and room for one."""
        dh, room, active = scratch
        for t in reversed(order):
            rows = None if lengths is None else np.greater(lengths, t, out=active)
            if dy is not None:
                room[...] = dy[t, d]
                clear(room, rows)
                np.add(dh, room, out=dh)
            yield t, rows

    def state_gradients(
        self, d: int, dg: Array, given: Sequence[Any], made: Sequence[Any], dr: Array, scratch: Operands
    ) -> None:
        """dr from the gates' gradients dg [T·N, gates·H] of direction `d`."""
        self.fill_previous(scratch[1], made[0], d, given[5], given[4], scratch[-1])
        np.matmul(dg.T, scratch[1].reshape(-1, self.hidden_size), out=dr)

    def fill_previous(
        self, room: Array, y: Array, d: int, h0: Array | None, lengths: Array | None, active: Array
    ) -> None:
        """room[t] = the state before step t in direction `d`."""
        steps, back = room.shape[0], self.forward().backwards(d)
        if not steps:
            return
        first = steps - 1 if back else 0
        room[first] = 0 if h0 is None else h0[d]
        if back:
            room[:-1] = y[1:, d]
        else:
            room[1:] = y[:-1, d]
        if back and lengths is not None and h0 is not None:
            for t in range(steps - 1):  # where step t is a sequence's last, the initial state comes before it
                np.less_equal(lengths, t + 1, out=active)
                np.copyto(room[t], h0[d], where=active[:, None])

    def input_gradients(self, d: int, dg: Array, x: Array, w: Array, outs: Operands, room: Array) -> None:
        """dx, dw and the input bias' gradient of direction `d` from the gates' gradients dg [T·N, gates·H]."""
        dx, dw, _, db = outs[:4]
        if dx is not None:
            target = dx if d == 0 else room
            np.matmul(dg, w[d], out=target.reshape(-1, x.shape[2]))
            if d == 1:
                np.add(dx, room, out=dx)
        if dw is not None:
            np.matmul(dg.T, x.reshape(-1, x.shape[2]), out=dw[d])
        if db is not None:
            column_sums(dg, db[d, : w.shape[1]])


def active_rows(x: TensorType, lengths: Any) -> TensorType:
    """Room for which rows of a batch a step is for, where there are lengths."""
    return TensorType("bool", (x.shape[1] if lengths is not None else 0,))


def sample_inputs(draw: Draw, op: Recurrent, optional: Sequence[int], dtype: str = "f64") -> list[np.ndarray | None]:
    """Inputs of 3 steps, 2 rows and 3 features; of the optional ones (3 and up) those in `optional`."""
    steps, batch, features = 3, 2, 3
    d, h, g = op.directions, op.hidden_size, op.gates * op.hidden_size
    shapes = [(steps, batch, features), (d, g, features), (d, g, h), (d, 2 * g), None, (d, batch, h), (d, batch, h)]
    shapes.append((d, 3 * h))
    arrays: list[np.ndarray | None] = []
    for i, shape in enumerate(shapes[: op.arity]):
        if i > 2 and i not in optional:
            arrays.append(None)
        elif shape is None:
            arrays.append(np.array([steps, 2], np.int32)[:batch])
        else:
            arrays.append(draw(f"{dtype}[{','.join(map(str, shape))}]"))
    while arrays[-1] is None:
        arrays.pop()
    return arrays


def recurrent_samples(draw: Draw, ops: Sequence[Recurrent]) -> Iterator[Case]:
    """Forward samples: the outputs that ONNX has (with gradients), and all (without: they are kept for gradients)."""
    last = ops[0].arity
    for i, op in enumerate(ops):
        optional = [(3, 5), (3, 4, 5, 6, 7), (5, 6), (3, 4, 7)][i % 4]
        inputs = sample_inputs(draw, op, [o for o in optional if o < last])
        yield draw.case(op, *inputs, want=op.onnx_outputs)
        yield draw.case(op, *inputs, gradient=False)
    yield draw.case(ops[0], *sample_inputs(draw, ops[0], (), "f32"), want=1)


def gradient_samples(draw: Draw, ops: Sequence[Recurrent]) -> Iterator[Case]:
    """Samples of gradient operators, on results that belong to their inputs.

    Their own derivatives treat what was kept as a function of the other inputs, which a check that moves each input
    by itself cannot; the second derivatives of the operators' samples cover them.
    """
    for i, op in enumerate(ops):
        optional = [o for o in [(3, 5, 6), (3, 4, 5, 6, 7), (3,), ()][i % 4] if o < op.arity]
        inputs = sample_inputs(draw, op, optional)
        types = [None if a is None else TensorType.of(a) for a in inputs]
        outs = [np.empty(t.shape, t.numpy) for t in op.infer(*types)]
        room = [np.empty(t.shape, t.numpy) for t in op.scratch(types, [TensorType.of(o) for o in outs])]
        op.compute(inputs, outs, room)  # type: ignore[arg-type]
        grads: list[Array | None] = [draw(f"f64[{','.join(map(str, o.shape))}]") for o in outs[: op.onnx_outputs]]
        grad = GRADIENTS[op.name](**op.options())
        if i == 1:
            grads[1] = None
        kept = [outs[0], *outs[op.onnx_outputs :]]
        want = 3 + sum(o != 4 for o in optional)
        yield draw.case(grad, *filled(inputs, op.arity), *kept, *grads, want=want, gradient=False)
