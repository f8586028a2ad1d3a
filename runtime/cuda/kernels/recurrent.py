"""LSTM, GRU and the simple recurrent network, and their gradients.

All steps' inputs are one product.  All steps are one kernel where their products are so small that launches would take
most of the time, and a device's registers hold the weights (code/resident.py); else each step is one more product (two
in GRU's older form) and a kernel over its elements.  Back the same way; the gradients of weights are products over all
steps.  The gradients of states are kept in float32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....language.types import TensorType, need
from ....ops.recurrent.shared import Recurrent, RecurrentGrad, filled
from ..code import recurrent as text
from ..code import resident
from ..convolution.text import adding
from ..convolution.tiles import wide
from ..device.kernel import C_TYPES, Buffer, Call, Copy, Fill, Kernel, Product
from ..families import Buffers, Family, family
from .loops import converted

if TYPE_CHECKING:
    from ....language.ir import Operator

FLOATS = ("f32", "f64", "f16", "bf16")


def product(
    a: Buffer, b: Buffer, c: Buffer, sizes: tuple[int, int, int], leads: tuple[int, int, int], *,
    ta: bool = False, tb: bool = False, add: bool = False,
) -> Product:  # fmt: skip
    """c (+)= op(a) · op(b); `sizes`: m, n, k; `leads`: elements from one row of a, b, c to the next."""
    return Product(a, b, c, *sizes, *leads, ta=ta, tb=tb, beta=1.0 if add else 0.0)


def _rest(x: Buffer, element: int) -> Buffer:
    return x.at(element, (x.size - element,))


class _Base(Family):
    """The base of both passes."""

    def accepts(self, op: Operator) -> bool:
        """Floats of any type, sizes of at least one; lengths of any integer type."""
        if any(not v.type.size for v in (*op.reads(), *op.writes())):
            return False
        lengths = op.inputs[4] if len(op.inputs) > 4 else None
        others = [v for i, v in enumerate(op.inputs) if v is not None and i != 4]
        counted = lengths is None or (lengths.dtype in C_TYPES and not lengths.type.is_float)
        return counted and all(v.dtype in FLOATS for v in (*others, *op.writes()))

    def rooms(self, op: Operator) -> dict[str, TensorType]:
        """The workspace by name."""
        raise NotImplementedError

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        return tuple(self.rooms(op).values())


@family("LSTM", "GRU", "RNN")
class Forward(_Base):
    """Step by step."""

    def rooms(self, op: Operator) -> dict[str, TensorType]:
        """Gates, cells (where they are not kept), products, the state where sequences differ in length."""
        assert isinstance(op.op, Recurrent) and op.inputs[0] is not None
        x, n, name = op.inputs[0].type, op.op.hidden_size, op.op.name
        steps, batch, _ = x.shape
        outs = filled(op.outputs, 5)
        found = {}
        if name != "LSTM" or outs[3] is None:
            found["gates"] = x.with_shape((steps, batch, op.op.gates * n))
        if name == "LSTM" and outs[4] is None:
            found["cell"] = x.with_shape((batch, n))
        lengths = len(op.inputs) > 4 and op.inputs[4] is not None
        if sizes := resident.sizes(op.op, x, masked=lengths):
            found["counters"] = sizes.counters(batch)
        elif name == "GRU":
            found["product"] = x.with_shape((batch, 3 * n))
            if not getattr(op.op, "linear_before_reset", 0):
                found["room"] = x.with_shape((batch, n))
        if lengths:
            found["h"] = x.with_shape((batch, n))
        return found

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rooms = dict(zip(self.rooms(op), scratch, strict=True))
        rule = op.of(Recurrent)
        return [c for d in range(rule.directions) for c in _Direction(rule, d, ins, outs, rooms).calls()]


class _Direction:
    """A direction of a recurrent operator."""

    def __init__(self, op: Recurrent, d: int, ins: Buffers, outs: Buffers, rooms: dict[str, Buffer]) -> None:
        self.op, self.d, self.rooms = op, d, rooms
        given = filled(ins, 8)[:8]
        x = need(given[0])
        self.x, self.lengths = x, given[4]
        self.counts = "i32" if self.lengths is None else self.lengths.dtype
        self.steps, self.batch, self.features = x.shape
        self.n = op.hidden_size
        self.width = op.gates * self.n
        self.w, self.r, self.bias, self.h0, self.c0, self.p = (self.part(given[i]) for i in (1, 2, 3, 5, 6, 7))
        self.y, self.last = outs[0], [self.part(v) for v in outs[1 : op.onnx_outputs]]
        self.kept = [self.part(v) for v in outs[op.onnx_outputs : op.onnx_outputs + 2]]
        self.gates = self.kept[0] if op.name == "LSTM" and self.kept[0] is not None else rooms["gates"]
        self.size = self.batch * self.n
        self.resident = resident.sizes(op, x.type, masked=self.lengths is not None)

    def part(self, v: Buffer | None) -> Any:
        """This direction's."""
        if v is None:
            return None
        size = v.size // v.shape[0]
        return v.at(self.d * size, v.shape[1:])

    def state(self, t: int) -> Buffer:
        """Y of a step."""
        assert self.y is not None
        return self.y.at((t * self.op.directions + self.d) * self.size, (self.batch, self.n))

    def step(self, v: Any, t: int) -> Any:
        """One step of a value whose first axis is the steps."""
        return None if v is None else v.at(t * (v.size // self.steps), (v.size // self.steps,))

    def run(self, name: str, *args: Any, t: int, activation: str = "") -> Call:
        """A kernel over the state's elements."""
        kernel: Kernel = text.step(name, self.x.dtype, self.counts, activation)
        return kernel(self.size, *args, self.lengths, t, self.n, self.size)

    def all_steps(self, name: str, args: Sequence[Any], falling: bool) -> list[Call]:
        """All steps by one kernel.  `args`: behind the weights; `falling`: from the last step to the first."""
        counters, sizes, activation = self.rooms["counters"], need(self.resident), getattr(self.op, "activation", "")
        args = (counters, self.lengths, self.r, *args)
        kernel = sizes.kernel(name, self.x.dtype, self.counts, activation, args)
        more = (self.batch, self.steps, int(falling), self.op.directions * self.batch, 0, self.steps)
        return [Fill(counters), kernel.blocks(*sizes.grid(self.batch), args=(*args, *more))]

    def calls(self) -> list[Call]:
        """The inputs' part of all gates, then the steps."""
        rows, f, width = self.steps * self.batch, self.features, self.width
        calls: list[Call] = [product(self.x, self.w, self.gates, (rows, width, f), (f, f, width), tb=True)]
        before, cell, h = self.h0, self.c0, self.rooms.get("h")
        order = self.op.order(self.d, self.steps)
        for t in () if self.resident else order:
            more, cell = getattr(self, f"_{self.op.name.lower()}")(t, before, cell)
            calls += more
            before = self.state(t) if h is None else h
        if self.resident:
            one = self.rooms.get("cell")  # else those of all steps are kept
            kept = one or next((v for v in self.kept[::-1] if v is not None), None)
            args = (self.gates, self.bias, self.p, self.c0, kept, self.h0, self.state(0), 0 if one else self.batch)
            calls += self.all_steps(self.op.name.lower(), args, self.op.backwards(self.d))
            before, cell = self.state(order[-1]), one or self.step(kept, order[-1])
        for target, source in zip(self.last, (before, cell), strict=False):
            if target is not None:
                calls.append(Copy(target, source))
        return calls

    def _met_state(self, name: str, args: Sequence[Any], before: Any, t: int, activation: str = "") -> list[Call]:
        """A step's kernel, after gates += h rᵀ."""
        n, width, found = self.n, self.width, self.run(name, *args, t=t, activation=activation)
        if before is None:
            return [found]
        return [product(before, self.r, args[0], (self.batch, width, n), (n, n, width), tb=True, add=True), found]

    def _lstm(self, t: int, before: Any, cell: Any) -> tuple[list[Call], Any]:
        gates, new = self.step(self.gates, t), self.rooms.get("cell")
        new = self.step(self.kept[1], t) if new is None else new
        args = (gates, self.bias, self.p, cell, new, before, self.state(t), self.rooms.get("h"))
        return self._met_state("lstm", args, before, t), new

    def _rnn(self, t: int, before: Any, cell: Any) -> tuple[list[Call], Any]:
        gates, f = self.step(self.gates, t), self.op.activation  # type: ignore[attr-defined]
        args = (gates, self.bias, before, self.state(t), self.rooms.get("h"))
        return self._met_state("rnn", args, before, t, f), None

    def _gru(self, t: int, before: Any, cell: Any) -> tuple[list[Call], Any]:
        gates, n, kept, h = self.step(self.gates, t), self.n, self.step(self.kept[0], t), self.rooms.get("h")
        q = self.rooms["product"]
        linear = int(bool(self.op.linear_before_reset))  # type: ignore[attr-defined]
        first = 3 * n if linear else 2 * n
        calls: list[Call] = []
        if before is not None:
            calls.append(product(before, self.r, q, (self.batch, first, n), (n, n, 3 * n), tb=True))
        if not linear:
            room = self.rooms["room"]
            calls.append(self.run("gru_open", gates, q, self.bias, before, room, t=t))
            if before is not None:
                new, r = _rest(q, 2 * n), _rest(self.r, 2 * n * n)
                calls.append(product(room, r, new, (self.batch, n, n), (n, n, 3 * n), tb=True))
        calls.append(self.run("gru", gates, q, self.bias, kept, before, self.state(t), h, linear, t=t))
        return calls, None


# -- gradients --------------------------------------------------------------------------------------------------------


@family("LSTMGrad", "GRUGrad", "RNNGrad")
class Backward(_Base):
    """From the last step to the first, then products over all of them."""

    def rooms(self, op: Operator) -> dict[str, TensorType]:
        """The gates' gradients, the states', states before each step where they do not lie in Y as they should."""
        assert isinstance(op.op, RecurrentGrad) and op.inputs[0] is not None
        forward = op.op.forward()
        x, n, name = op.inputs[0].type, op.op.hidden_size, forward.name
        steps, batch, _ = x.shape
        outs, width, state = filled(op.outputs, 7), _width(forward), TensorType(wide(x.dtype), (batch, n))
        states = state.with_shape((2, batch, n)) if name == "LSTM" else state  # dc behind dh
        found = {"dg": x.with_shape((steps, batch, width)), "dh": states}
        if name == "GRU" and not forward.linear_before_reset:
            found["v"] = state
        masked = _masked(forward, op.inputs)
        if sizes := resident.sizes(forward, x, masked=masked):
            found["counters"] = sizes.counters(batch)
        if masked or (outs[2] is not None and (forward.directions > 1 or "v" in found)):
            found["previous"] = x.with_shape((steps, batch, n))
        if outs[3] is not None or outs[6] is not None:
            found["sums"] = TensorType(wide(x.dtype), (_parts(steps * batch) + 1, width))
        return found

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rooms = dict(zip(self.rooms(op), scratch, strict=True))
        rule = op.of(RecurrentGrad)
        return [c for d in range(rule.forward().directions) for c in _Back(rule, d, ins, outs, rooms).calls()]


def _width(forward: Any) -> int:
    return int(forward.width if forward.name == "GRU" else forward.gates * forward.hidden_size)


def _masked(forward: Any, ins: Sequence[Any]) -> bool:
    """Whether the state before a step is not just that of the step before it: the initial one follows the last step."""
    given = filled(ins, 6)
    return forward.direction != "forward" and given[4] is not None and given[5] is not None


def _parts(rows: int) -> int:
    return min(max(rows // 128, 1), 32)


class _Back(_Direction):
    """A direction of a gradient."""

    def __init__(self, op: RecurrentGrad, d: int, ins: Buffers, outs: Buffers, rooms: dict[str, Buffer]) -> None:
        forward = op.forward()
        given, made, grads = op.parts(ins)
        rooms = {**rooms, "gates": rooms["dg"]}
        kept = [made[0], *[None] * (forward.onnx_outputs - 1), *made[1:], None, None]
        super().__init__(forward, d, given, kept, rooms)
        self.dy, self.dh_last = grads[0], self.part(grads[1])
        self.dc_last = self.part(grads[2]) if forward.name == "LSTM" else None
        self.dx = outs[0]
        self.dw, self.dr, self.db, self.dh0, self.dc0, self.dp = map(self.part, outs[1:7])
        self.dg, state, kind = rooms["dg"], rooms["dh"], (self.batch, self.n)
        self.dh, self.dc = state.at(0, kind), state.at(self.size, kind) if forward.name == "LSTM" else None
        self.columns = _width(forward)
        masked = _masked(forward, ins)
        self.resident = resident.sizes(forward, self.x.type, masked=masked)
        self.masked = masked and forward.backwards(d)

    def calls(self) -> list[Call]:
        """The steps, then what follows from the gates' gradients."""
        calls: list[Call] = [Fill(self.rooms["dh"])]
        if self.dh_last is not None or self.dc_last is not None:
            calls = [*self._copy(self.dh_last, self.dh), *(self._copy(self.dc_last, self.dc) if self.dc else ())]
        if self.masked:
            calls.append(self._shift())
        order, step = self.op.order(self.d, self.steps), getattr(self, f"_{self.op.name.lower()}_back")
        if self.resident:
            calls += self._resident_steps()
            calls += [self._through(*self._meeting(order[0]), self.dh)] * (self.dh0 is not None)
        for k in () if self.resident else range(self.steps - 1, -1, -1):
            calls += step(order[k], order[k - 1] if k else None)
        if self.dh0 is not None:
            calls += self._copy(self.dh, self.dh0)
        if self.dc0 is not None:
            calls += self._copy(self.dc, self.dc0)
        return [*calls, *self._inputs(), *self._states(), *self._bias(), *self._peepholes()]

    def _copy(self, source: Buffer | None, target: Any) -> list[Call]:
        """Element by element; zeros where there is no source."""
        return [Fill(target)] if source is None else converted(source.reshape(-1), target.reshape(-1))

    def _shift(self, factor: Buffer | None = None) -> Call:
        """The states before all steps, times one of the kept gates."""
        kernel, room = text.shifting(self.x.dtype, self.counts), self.rooms["previous"]
        width, apart, back = self.columns, self.op.directions * self.size, int(self.op.backwards(self.d))
        y = self.y.at(self.d * self.size, (self.y.size - self.d * self.size,))  # type: ignore[union-attr]
        return kernel(
            room.size, y, self.h0, factor, room, self.lengths, back, self.steps, self.n, width, self.size, apart
        )

    def _before(self, t: int, previous: int | None) -> Any:
        """The state before a step."""
        if self.masked:
            return self.step(self.rooms["previous"], t)
        return self.h0 if previous is None else self.state(previous)

    def _dy(self, t: int) -> Any:
        return None if self.dy is None else self.dy.at((t * self.op.directions + self.d) * self.size, (self.size,))

    def _through(self, dg: Buffer, r: Buffer, k: int, c: Buffer, *, add: bool = True) -> Call:
        """c (+)= dg · r for k of the gates' columns."""
        return product(dg, r, c, (self.batch, self.n, k), (self.columns, self.n, self.n), add=add)

    def _resident_steps(self) -> list[Call]:
        """All steps by one kernel, which reads of a step before its states; of an LSTM, its cells."""
        name = self.op.name.lower()
        states, first = (self.kept[1], self.c0) if name == "lstm" else (self.state(0), self.h0)
        args = (self.kept[0], self.p, first, states, self._dy(0), self.dh, self.dc, self.dg)
        return self.all_steps(f"{name}_back", args, not self.op.backwards(self.d))

    def _stepped(self, name: str, args: Sequence[Any], t: int, activation: str = "") -> list[Call]:
        """A step's kernel and its product."""
        return [self.run(name, *args, t=t, activation=activation), self._through(*self._meeting(t), self.dh)]

    def _meeting(self, t: int) -> tuple[Any, Any, int]:
        """The gates' gradients of a step that the state has met, r, and how many columns they are."""
        first = self.n if self.op.name == "GRU" else 0
        return _rest(self.step(self.dg, t), first), self.r, self.columns - first

    def _lstm_back(self, t: int, previous: int | None) -> list[Call]:
        gates, cells = self.kept[:2]
        before = self.c0 if previous is None else self.step(cells, previous)
        dg, cell = self.step(self.dg, t), self.step(cells, t)
        args = (self.step(gates, t), self.p, before, cell, self._dy(t), self.dh, self.dc, dg)
        return self._stepped("lstm_back", args, t)

    def _rnn_back(self, t: int, previous: int | None) -> list[Call]:
        dg, f = self.step(self.dg, t), self.op.activation  # type: ignore[attr-defined]
        return self._stepped("rnn_back", (self.state(t), self._dy(t), self.dh, dg), t, f)

    def _gru_back(self, t: int, previous: int | None) -> list[Call]:
        n, dg, kept = self.n, self.step(self.dg, t), self.step(self.kept[0], t)
        before, v = self._before(t, previous), self.rooms.get("v")
        if v is None:
            return self._stepped("gru_back", (kept, before, self._dy(t), self.dh, dg), t)
        return [
            self.run("gru_back_new", kept, before, self._dy(t), self.dh, dg, t=t),
            self._through(dg, _rest(self.r, 2 * n * n), n, v, add=False),
            self.run("gru_back_reset", kept, before, v, self.dh, dg, t=t),
            self._through(_rest(dg, n), self.r, 2 * n, self.dh),
        ]

    # -- over all steps ---------------------------------------------------------------------------------------------

    def _blocks(self) -> list[tuple[int, int, int]]:
        """(first column of the gates' gradients, first row of w, count) of what the inputs meet."""
        n = self.n
        return [(0, 0, self.width)] if self.op.name != "GRU" else [(n, 0, 2 * n), (0, 2 * n, n)]

    def _inputs(self) -> list[Call]:
        """dx = dg w, dw = dgᵀ x."""
        rows, f, calls = self.steps * self.batch, self.features, []
        for i, (column, row, count) in enumerate(self._blocks()):
            dg = _rest(self.dg, column)
            if self.dx is not None:
                w, leads = _rest(self.w, row * f), (self.columns, f, f)
                calls.append(product(dg, w, self.dx, (rows, f, count), leads, add=self.d + i > 0))
            if self.dw is not None:
                dw = _rest(self.dw, row * f)
                calls.append(product(dg, self.x, dw, (count, f, rows), (self.columns, f, f), ta=True))
        return list(calls)

    def _states(self) -> list[Call]:
        """dr = dgᵀ · the states before; in GRU's older form the last rows meet what the reset gate left of them."""
        if self.dr is None:
            return []
        n, older = self.n, "v" in self.rooms
        first = n if self.op.name == "GRU" else 0
        calls = self._met(first, self.columns - first)
        if older:
            calls.append(self._shift(_rest(self.kept[0], n)))
            rows, target = self.steps * self.batch, _rest(self.dr, 2 * n * n)
            leads = (self.columns, n, n)
            calls.append(product(self.dg, self.rooms["previous"], target, (n, n, rows), leads, ta=True))
        return calls

    def _met(self, first: int, count: int) -> list[Call]:
        """The first `count` rows of dr, from as many columns of the gates' gradients."""
        n, leads = self.n, (self.columns, self.n, self.n)
        if self.masked or self.op.directions > 1:
            calls: list[Call] = [] if self.masked else [self._shift()]
            room, rows = self.rooms["previous"], self.steps * self.batch
            return [*calls, product(_rest(self.dg, first), room, self.dr, (count, n, rows), leads, ta=True)]
        back, rows = self.op.backwards(0), (self.steps - 1) * self.batch
        assert self.y is not None
        y = _rest(self.y, self.size) if back and rows else self.y
        step = self.batch * self.columns
        dg, edge = (0, (self.steps - 1) * step) if back else (step, 0)
        calls = []
        if rows:
            calls.append(product(_rest(self.dg, dg + first), y, self.dr, (count, n, rows), leads, ta=True))
        if self.h0 is not None:
            sizes = (count, n, self.batch)
            calls.append(product(_rest(self.dg, edge + first), self.h0, self.dr, sizes, leads, ta=True, add=rows > 0))
        return calls or [Fill(self.dr.at(0, (count, n)))]

    def _sums(self, x: Buffer, rows: int, columns: int, place: int, factor: Buffer | None = None) -> Call:
        """Parts of sums over rows, from part number `place` on."""
        sums, parts = self.rooms["sums"], _parts(rows)
        kernel = text.column_sums(x.dtype, sums.dtype)
        args = (x, factor, _rest(sums, place * columns), rows, self.columns, columns)
        return kernel.blocks(-(-columns // 32), parts, args=args)

    def _bias(self) -> list[Call]:
        """The gates' gradients added up, where each bias stands."""
        if self.db is None:
            return []
        rows, blocks = self.steps * self.batch, [*range(self.op.gates)] * 2
        if self.op.name == "GRU":  # columns of the gates' gradients: new, update, reset, what the reset gate meets
            blocks = [1, 2, 0, 1, 2, 0 if "v" in self.rooms else 3]
        order = sum(block << 4 * i for i, block in enumerate(blocks))
        args = (self.rooms["sums"], self.db, self.columns, _parts(rows), self.n, order)
        return [
            self._sums(self.dg, rows, self.columns, 0),
            text.bias_sums(self.x.dtype)(self.db.size, *args, self.db.size),
        ]

    def _peepholes(self) -> list[Call]:
        """Gates' gradients times the cells that they saw, added up."""
        if self.dp is None:
            return []
        n, cells, rows, step = self.n, self.kept[1], self.steps * self.batch, self.batch * self.columns
        back = self.op.backwards(self.d)
        edge, rest = ((self.steps - 1) * step, 0) if back else (0, step)
        calls: list[Call] = []
        for k, own in ((0, False), (1, True), (2, False)):
            parts = 0
            if own:
                calls.append(self._sums(_rest(self.dg, k * n), rows, n, 0, cells))
                parts = _parts(rows)
            elif self.steps > 1:
                seen = _rest(cells, self.size) if back else cells
                calls.append(self._sums(_rest(self.dg, rest + k * n), rows - self.batch, n, 0, seen))
                parts = _parts(rows - self.batch)
            if not own and self.c0 is not None:
                x, columns, sums = _rest(self.dg, edge + k * n), -(-n // 32), self.rooms["sums"]
                args = (x, self.c0, _rest(sums, parts * n), self.batch, self.columns, n)
                calls.append(text.column_sums(x.dtype, sums.dtype).blocks(columns, 1, args=args))
                parts += 1
            target = self.dp.at(k * n, (n,))
            add = adding(self.x.dtype, False)(n, self.rooms["sums"], target, n, parts)
            calls.append(add if parts else Fill(target))
        return calls
