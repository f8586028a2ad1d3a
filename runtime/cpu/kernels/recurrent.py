"""LSTM and GRU, and their gradients: one loop a row for the gates of a step, BLAS for products over all steps.

The steps of a sequence are one native call in float32, in which each thread takes its rows through all of them (see
runtime/cpu/code/row_products.py); in float64 a list of calls, with NumPy's BLAS.  Sequences of different lengths,
peepholes and GRU's older form (the reset gate before the product) stay on NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.types import Operands, TensorType, present
from ....ops.recurrent.gru import GRU
from ....ops.recurrent.lstm import LSTM
from ....ops.recurrent.shared import RecurrentGrad
from ...shared.mathematics import sigmoid, tanh
from ..code.row_products import room
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, enough, family, parts
from ..providers import products
from .copy import copying, filling, words
from .recurrent_steps import Products, Steps, times
from .reduce import add_column_parts, column_parts, pieces

if TYPE_CHECKING:
    from ....language.ir import Operator


@kernel
def add_biases(bias, total, count, begin, end):
    """The two halves of `bias` added up where they may be: the first `count` elements; the rest of the first half."""
    n = total.size
    for j in range(n):
        total[j] = bias[j] + bias[n + j] if j < count else bias[j]


@kernel
def lstm_cell(gates, before, after, y, has_before, begin, end):
    """Gates [N, 4H] from their inputs, cells [N, H] after one step, and its output."""
    n = y.shape[1]
    for r in range(begin, end):
        a, c, d, h = gates[r], before[r], after[r], y[r]
        for j in range(3 * n):
            a[j] = sigmoid(a[j])
        for j in range(3 * n, 4 * n):
            a[j] = tanh(a[j])
        if has_before:
            for j in range(n):
                d[j] = a[2 * n + j] * c[j] + a[j] * a[3 * n + j]
        else:
            for j in range(n):
                d[j] = a[j] * a[3 * n + j]
        for j in range(n):
            h[j] = a[n + j] * tanh(d[j])


@kernel
def _lstm_cell_gradient(gates, before, after, dy, dh, dc, dg, has_before, has_dy, begin, end):
    """The gradients dg [N, 4H] of one step's gates, and in dc that of the cells before; dh is read."""
    n = dh.shape[1]
    one = dh.dtype.type(1)
    for r in range(begin, end):
        a, c, g = gates[r], after[r], dg[r]
        e, f = dh[r], dc[r]
        if has_dy:
            d = dy[r]
            for j in range(n):
                e[j] += d[j]
        for j in range(n):
            t, o = tanh(c[j]), a[n + j]
            g[n + j] = e[j] * t * o * (one - o)
            f[j] += (one - t * t) * o * e[j]
        for j in range(n):
            i, k = a[j], a[3 * n + j]
            g[j] = f[j] * k * i * (one - i)
        for j in range(n):
            i, k = a[j], a[3 * n + j]
            g[3 * n + j] = f[j] * i * (one - k * k)
        if has_before:
            b = before[r]
            for j in range(n):
                k = a[2 * n + j]
                g[2 * n + j] = f[j] * b[j] * k * (one - k)
        else:
            for j in range(n):
                g[2 * n + j] = 0
        for j in range(n):
            f[j] *= a[2 * n + j]


@kernel
def gru_cell(gates, product, bias, before, y, kept, has_before, begin, end):
    """One step from the gates' inputs [N, 3H] (update, reset, new) and the state's products; `kept`: all of them."""
    n = y.shape[1]
    for r in range(begin, end):
        a, p, h, b = gates[r], product[r], y[r], before[r]
        if has_before:
            for j in range(2 * n):
                a[j] += p[j]
            for j in range(n):
                p[2 * n + j] += bias[j]
        else:
            for j in range(n):
                p[2 * n + j] = bias[j]
        for j in range(2 * n):
            a[j] = sigmoid(a[j])
        for j in range(n):
            a[2 * n + j] = tanh(a[2 * n + j] + a[n + j] * p[2 * n + j])
        if kept.shape[0]:
            k = kept[r]
            for j in range(3 * n):
                k[j] = a[j]
            for j in range(n):
                k[3 * n + j] = p[2 * n + j]
        if has_before:
            for j in range(n):
                h[j] = (b[j] - a[2 * n + j]) * a[j] + a[2 * n + j]
        else:
            for j in range(n):
                h[j] = (-a[2 * n + j]) * a[j] + a[2 * n + j]


@kernel
def gru_cell_gradient(kept, before, dy, dh, dgx, dgh, has_before, has_dy, begin, end):
    """Gradients of the gates as x and as the state feed them (both [N, 3H]); dh becomes its part past the products."""
    n = dh.shape[1]
    one = dh.dtype.type(1)
    for r in range(begin, end):
        a, e, g, q = kept[r], dh[r], dgx[r], dgh[r]
        if has_dy:
            d = dy[r]
            for j in range(n):
                e[j] += d[j]
        if has_before:
            b = before[r]
            for j in range(n):
                z = a[j]
                g[j] = e[j] * (b[j] - a[2 * n + j]) * z * (one - z)
        else:
            for j in range(n):
                z = a[j]
                g[j] = e[j] * -a[2 * n + j] * z * (one - z)
        for j in range(n):
            v = a[2 * n + j]
            g[2 * n + j] = e[j] * (one - a[j]) * (one - v * v)
        for j in range(n):
            k = a[n + j]
            g[n + j] = g[2 * n + j] * a[3 * n + j] * k * (one - k)
        for j in range(n):
            q[2 * n + j] = g[2 * n + j] * a[n + j]
        for j in range(2 * n):
            q[j] = g[j]
        for j in range(n):
            e[j] *= a[j]


def _copied(x: np.ndarray, y: np.ndarray) -> Call:
    return copying(words(x), words(y), ((x.size,), (1,), (1,), 0, 0))


def _both(value: Any, d: int) -> Any:
    """A state's part for one direction."""
    return None if value is None else value[d]


def _sizes(op: Operator) -> tuple[TensorType, int, int, int, int, int]:
    """The type of x, steps, batch, features, elements of a row of gates and of a state."""
    x, w, r = present(*op.inputs[:3])
    steps, batch, features = x.shape
    return x.type, steps, batch, features, w.shape[1], r.shape[2]


class Sequences(Family):
    """The base of the four families."""

    optional: tuple[int, ...] = ()

    def accepts(self, op: Operator) -> bool:
        """Where BLAS is, sequences of one length, and enough to do."""
        rule: Any = op.op
        x: Any = op.inputs[0]
        absent = all(len(op.inputs) <= i or op.inputs[i] is None for i in self.optional)
        newer = bool(getattr(rule, "linear_before_reset", 1))
        large = x.shape[0] * x.shape[1] * rule.hidden_size >= enough() and 0 not in x.shape
        return absent and newer and large and x.dtype in ("f32", "f64") and products.available(x.dtype)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        todo = Products(self.room(scratch))
        for d in range(ins[1].shape[0]):
            self.direction(todo, op, d, ins, outs, scratch)
        return todo.calls

    def room(self, scratch: Operands) -> Any:
        """The part of the workspace that is for products of matrices; None where there is none."""
        return None

    def direction(self, todo: Products, op: Operator, d: int, ins: Any, outs: Any, scratch: Any) -> None:
        """The calls of direction number `d`."""
        raise NotImplementedError


@family("LSTM")
class LSTMs(Sequences):
    """(x, w, r, bias?, -, initial_h?, initial_c?) → Y, Y_h?, Y_c?, gates?, cells?"""

    optional = (4, 7)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Gates and a cell state where they are not kept, a bias, and r packed."""
        x, steps, batch, features, wide, n = _sizes(op)
        outs = (*op.outputs, *(None,) * 5)
        gates = (0,) if outs[3] is not None else (steps, batch, wide)
        cells = (0,) if outs[4] is not None else (batch, n)
        packed = room(x, (n, wide, batch), (features, wide, steps * batch))
        return (*map(x.with_shape, (gates, cells, (wide,))), packed)

    def direction(self, todo: Products, op: Operator, d: int, ins: Any, outs: Any, scratch: Any) -> None:
        """The gates from all inputs, then the steps."""
        rule = op.of(LSTM)
        x, w, r, bias, _, h0, c0 = ins[:7]
        y, last_h, last_c, kept, cells = outs[:5]
        steps, batch, width = x.shape[0], x.shape[1], w.shape[1]
        gates = scratch[0] if kept is None else kept[d]
        if bias is not None:
            todo.add(add_biases.call(bias[d], scratch[2], width, work=1, parallel=False))
        total = None if bias is None else scratch[2]
        flat = x.reshape(steps * batch, -1)
        times(todo, flat, w[d], gates.reshape(-1, width), scratch[3], turned=True, more=total)
        each = Steps(todo, r[d], scratch[3], batch, turned=True)
        h, c = _both(h0, d), _both(c0, d)
        for t in rule.order(d, steps):
            if h is not None:
                each.product(h, gates[t], more=True)
            h, after = y[t, d], scratch[1] if cells is None else cells[d, t]
            before = after if c is None else c
            each.add(lstm_cell.call(gates[t], before, after, h, int(c is not None), work=batch))
            c = after
        each.finish()
        for last, state in ((last_h, h), (last_c, c)):
            if last is not None:
                todo.add(_copied(state, last[d]))


@family("GRU")
class GRUs(Sequences):
    """(x, w, r, bias?, -, initial_h?) → Y, Y_h?, kept?"""

    optional = (4,)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Gates, products, biases, and r packed."""
        x, steps, batch, features, wide, n = _sizes(op)
        packed = room(x, (n, wide, batch), (features, wide, steps * batch))
        return (*map(x.with_shape, ((steps, batch, wide), (batch, wide), (wide,), (n,))), packed)

    def direction(self, todo: Products, op: Operator, d: int, ins: Any, outs: Any, scratch: Any) -> None:
        """The gates from all inputs, then the steps."""
        rule = op.of(GRU)
        x, w, r, bias, _, h0 = ins[:6]
        y, last, kept = outs[:3]
        gates, product, total, inner, packed = scratch
        steps, batch, n = x.shape[0], x.shape[1], r.shape[2]
        if bias is None:
            total = None
            todo.add(filling(inner, 0))
        else:
            todo.add(add_biases.call(bias[d], total, 2 * n, work=1, parallel=False))
            todo.add(_copied(bias[d, 5 * n :], inner))
        flat = x.reshape(steps * batch, -1)
        times(todo, flat, w[d], gates.reshape(-1, 3 * n), packed, turned=True, more=total)
        each = Steps(todo, r[d], packed, batch, turned=True)
        h = _both(h0, d)
        for t in rule.order(d, steps):
            if h is not None:
                each.product(h, product)
            keep = np.empty((0, 4 * n), x.dtype) if kept is None else kept[d, t]
            before = y[t, d] if h is None else h
            rows = (gates[t], product, inner, before, y[t, d], keep)
            each.add(gru_cell.call(*rows, int(h is not None), work=batch))
            h = y[t, d]
        each.finish()
        if last is not None:
            todo.add(_copied(h, last[d]))


class SequenceGradients(Sequences):
    """The steps from the last to the first, then products over all of them, from the gates' gradients."""

    def own(self, gates: tuple[int, ...], state: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes of the workspace of the steps: gates' gradients as x feeds them (and as h does), states."""
        raise NotImplementedError

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The steps' own, the states before where there are two directions, sums of columns, and r packed."""
        x, steps, batch, features, wide, n = _sizes(op)
        before = (steps, batch, n) if op.inputs[2].shape[0] > 1 else (0, 0, 0)  # type: ignore[union-attr]
        sums = (parts(steps * batch), wide)
        shapes = self.own((steps, batch, wide), (batch, n))
        packed = room(x, (wide, n, batch), (wide, features, steps * batch))
        multiplied = products.room(x.dtype, (wide, max(features, n), steps * batch))
        return (*map(x.with_shape, (*shapes, before, sums)), TensorType("f64", sums), packed, multiplied)

    def room(self, scratch: Operands) -> Any:
        return scratch[-1]

    def direction(self, todo: Products, op: Operator, d: int, ins: Any, outs: Any, scratch: Any) -> None:
        """dx, dw, dr and the biases' gradients, and those of the initial states."""
        rule = op.of(RecurrentGrad)
        operands = rule.parts(ins[: len(op.inputs)])
        previous, block, sums, packed = scratch[3:7]
        gates = self.steps(todo, rule, d, operands, outs, scratch)
        (x, w, _, _, _, h0, *_), (y, *_), _ = operands
        dx, dw, dr, db = outs[:4]
        flat = x.reshape(-1, x.shape[2])
        # where x and h feed the gates alike there is one gradient of both
        by_x, by_h = (g.reshape(-1, g.shape[2]) for g in (gates[0], gates[-1]))
        if dx is not None:
            target = dx.reshape(flat.shape)
            times(todo, by_x, w[d], target, packed, more=target if d else None)
        if dw is not None:
            todo.product(by_x.T, flat, dw[d])
        if dr is not None:
            self._recurrent(todo, d, (by_h, y, h0, rule.forward().backwards(d)), previous, dr[d])
        if db is not None:
            halves = db[d].reshape(2, -1)
            self._column_sums(todo, by_x, halves[0], sums, block)
            if len(gates) > 1:
                self._column_sums(todo, by_h, halves[1], sums, block)
            else:
                todo.add(_copied(halves[0], halves[1]))

    def steps(self, todo: Products, rule: Any, d: int, given: Any, outs: Any, scratch: Any) -> Sequence[Any]:
        """Adds the steps; the gates' gradients that they give, as x feeds them and, if others, as h does."""
        raise NotImplementedError

    def _recurrent(self, todo: Products, d: int, given: Any, previous: Any, dr: Any) -> None:
        """The gradient of r: each step's gates by the state before it, which is another step's output, or `h0`."""
        by_h, y, h0, backwards = given
        steps, directions, batch, n = y.shape
        first = by_h[-batch:] if backwards else by_h[:batch]
        others = by_h[:-batch] if backwards else by_h[batch:]
        rest = y[1:] if backwards else y[:-1]
        if h0 is not None:
            todo.product(first.T, h0[d], dr)
        elif steps == 1:
            todo.add(filling(dr, 0))
        if steps > 1:
            if directions > 1:  # the outputs of both stand side by side
                each = batch * n
                grid = ((steps - 1, each), (y[0].size, 1), (each, 1), d * each, 0)
                todo.add(copying(words(rest), words(previous), grid))
                rest = previous[: steps - 1]
            todo.product(others.T, rest.reshape(-1, n), dr, None if h0 is None else dr)

    def _column_sums(self, todo: Products, x: Any, y: Any, sums: Any, block: Any) -> None:
        """Sums over the rows of x [rows, width]."""
        width = x.shape[1]
        todo.add(
            column_parts.call(x[None], block[None], sums[None], 0, work=sums.shape[0] * pieces(width)),
            add_column_parts.call(sums[None], y, 1, 0, work=width),
        )


def _from_the_last(order: list[int]) -> Iterator[tuple[int, int | None]]:
    """(step, the one before it) from the last to the first, which has none before it."""
    return zip(order[::-1], [*order[-2::-1], None], strict=True)


@family("LSTMGrad")
class LSTMGradients(SequenceGradients):
    """(the operator's inputs, Y, gates, cells, dY?, dY_h?, dY_c?) → dx, dw, dr, dbias, dh0, dc0, each optional."""

    optional = (4, 7)

    def own(self, gates: tuple[int, ...], state: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return gates, state, state

    def steps(self, todo: Products, rule: Any, d: int, given: Any, outs: Any, scratch: Any) -> Sequence[Any]:
        """dg, dh and dc, and the initial states' gradients from the last two."""
        (x, _, r, _, _, _, c0, _), (_, gates, cells), (dy, dh_last, dc_last) = given
        dg, dh, dc = scratch[:3]
        for state, last in ((dh, dh_last), (dc, dc_last)):
            todo.add(filling(state, 0) if last is None else _copied(last[d], state))
        each = Steps(todo, r[d], scratch[6], x.shape[1], turned=False)
        for t, earlier in _from_the_last(rule.forward().order(d, x.shape[0])):
            before = _both(c0, d) if earlier is None else cells[d, earlier]
            rows = (gates[d, t], cells[d, t] if before is None else before, cells[d, t], dh if dy is None else dy[t, d])
            flags = (int(before is not None), int(dy is not None))
            each.add(_lstm_cell_gradient.call(*rows, dh, dc, dg[t], *flags, work=x.shape[1]))
            if earlier is not None or outs[4] is not None:
                each.product(dg[t], dh)
        each.finish()
        for first, state in ((outs[4], dh), (outs[5], dc)):
            if first is not None:
                todo.add(_copied(state, first[d]))
        return (dg,)


@family("GRUGrad")
class GRUGradients(SequenceGradients):
    """(the operator's inputs, Y, kept, dY?, dY_h?) → dx, dw, dr, dbias, dh0, each optional."""

    optional = (4,)

    def own(self, gates: tuple[int, ...], state: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The gates' gradients twice, a state."""
        return gates, gates, state

    def steps(self, todo: Products, rule: Any, d: int, given: Any, outs: Any, scratch: Any) -> Sequence[Any]:
        """dgx, dgh and dh, and the initial state's gradient from the last."""
        (x, _, r, _, _, h0), (y, kept), (dy, dh_last) = given
        dgx, dgh, dh = scratch[:3]
        todo.add(filling(dh, 0) if dh_last is None else _copied(dh_last[d], dh))
        each = Steps(todo, r[d], scratch[6], x.shape[1], turned=False)
        for t, earlier in _from_the_last(rule.forward().order(d, x.shape[0])):
            before = _both(h0, d) if earlier is None else y[earlier, d]
            rows = (kept[d, t], dh if before is None else before, dh if dy is None else dy[t, d], dh)
            flags = (int(before is not None), int(dy is not None))
            each.add(gru_cell_gradient.call(*rows, dgx[t], dgh[t], *flags, work=x.shape[1]))
            if earlier is not None or outs[4] is not None:
                each.product(dgh[t], dh, more=True)
        each.finish()
        if outs[4] is not None:
            todo.add(_copied(dh, outs[4][d]))
        return dgx, dgh
