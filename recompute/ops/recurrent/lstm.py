"""LSTM, with peepholes, and its gradient."""

from __future__ import annotations

import numpy as np

from ..linear.half_products import halves_in_float32
from .parts import clear, cut, filled, logistic, store, times_slope, times_tanh_slope
from .shared import Recurrent, RecurrentGrad, active_rows, gradient_samples, recurrent_samples


@halves_in_float32
class LSTM(Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber 1997), gates in the order input, output, forget, cell.

    i, f, o = σ(x wᵀ + h rᵀ + b + p · c), g = tanh(...), c' = f · c + i · g, h' = o · tanh(c').
    Inputs (x, w, r, bias?, lengths?, initial_h?, initial_c?, peepholes?) → (Y, Y_h, Y_c, gates, cells): the last two
    hold i, o, f, g and c of each step, [D, T, N, 4H] and [D, T, N, H], for the gradient.
    """

    gates = 4
    arity = 8
    onnx_outputs = 3
    default_activations = ("Sigmoid", "Tanh", "Tanh")
    weights = (1, 2, 3, 7)

    def kept(self, steps, batch):
        lead = (self.directions, steps, batch)
        return [(*lead, 4 * self.hidden_size), (*lead, self.hidden_size)]

    @classmethod
    def more(cls, node):
        """No coupled input and forget gates."""
        if node.attributes.get("input_forget", 0):
            raise node.fail("couples its input and forget gates, which is not supported")
        return super().more(node)

    def scratch(self, ins, outs):
        """Gates (where they are not kept), a product, three states, the bias, rows that are active."""
        x, lengths = ins[0], filled(ins, 8)[4]
        steps, batch, _ = x.shape
        h = self.hidden_size
        gates = (steps, batch, 4 * h) if filled(outs, 5)[3] is None else (0,)
        shapes = [gates, (batch, 4 * h), (batch, h), (batch, h), (batch, h), (4 * h,)]
        return (*map(x.with_shape, shapes), active_rows(x, lengths))

    def compute(self, ins, outs, scratch):
        x, w, _, bias, *_ = inputs = filled(ins, 8)
        gates = filled(outs, 5)[3]
        for d in range(self.directions):
            pre = scratch[0] if gates is None else gates[d]
            total = None
            if bias is not None:
                total = np.add(bias[d, : w.shape[1]], bias[d, w.shape[1] :], out=scratch[5])
            self.project(x, w[d], total, pre)
            self._run(d, pre, inputs, filled(outs, 5), scratch)

    def _run(self, d, pre, given, outs, scratch):
        """The steps of one direction on the gates' inputs `pre`."""
        _, _, r, _, lengths, h0, c0, p = given
        y, last_h, last_c, _, cells = outs
        _, product, h, c, room, _, active = scratch
        n = self.hidden_size
        h[...] = 0 if h0 is None else h0[d]
        c[...] = 0 if c0 is None else c0[d]
        new = product[:, :n]  # the product is not needed when the new cell is made
        for t in self.order(d, pre.shape[0]):
            gates = pre[t]
            np.matmul(h, r[d].T, out=product)
            np.add(gates, product, out=gates)
            i, o, f, g = (gates[:, k * n : (k + 1) * n] for k in range(4))
            self._open(gates, c, None if p is None else p[d], room)
            np.tanh(g, out=g)
            np.multiply(i, g, out=room)
            np.multiply(f, c, out=new)
            np.add(new, room, out=new)
            if p is not None:
                np.multiply(new, p[d, n : 2 * n], out=room)
                np.add(o, room, out=o)
                logistic(o)
            if lengths is not None:
                np.greater(lengths, t, out=active)
            rows = None if lengths is None else active
            store(c, new, rows)
            np.tanh(new, out=room)
            np.multiply(room, o, out=y[t, d])
            store(h, y[t, d], rows)
            clear(y[t, d], rows)
            if cells is not None:
                cells[d, t] = c
        for last, state in ((last_h, h), (last_c, c)):
            if last is not None:
                last[d] = state

    def _open(self, gates, c, p, room):
        """The input and forget gates, and without peepholes (`p`) the output gate too."""
        n = self.hidden_size
        if p is None:
            logistic(gates[:, : 3 * n])
            return
        for k, part in ((0, p[:n]), (2, p[2 * n :])):
            gate = gates[:, k * n : (k + 1) * n]
            np.multiply(c, part, out=room)
            np.add(gate, room, out=gate)
            logistic(gate)

    def step(self, b, gx, state, r, biases, peepholes):
        """The equations."""
        h, c = state
        n = self.hidden_size
        total = b.Add(gx, b.MatMul(h, r, transB=1))
        if biases[0] is not None:
            total = b.Add(total, b.Add(*biases))
        i, o, f, g = b.Split(total, sizes=(n,) * 4, axis=1)
        p = [None] * 3 if peepholes is None else [cut(b, peepholes, k * n, (k + 1) * n, 0) for k in range(3)]
        i = b.Sigmoid(i if p[0] is None else b.Add(i, b.Mul(p[0], c)))
        f = b.Sigmoid(f if p[2] is None else b.Add(f, b.Mul(p[2], c)))
        g = b.Tanh(g)
        c = b.Add(b.Mul(f, c), b.Mul(i, g))
        o = b.Sigmoid(o if p[1] is None else b.Add(o, b.Mul(p[1], c)))
        return [b.Mul(o, b.Tanh(c)), c], [b.Concat(i, o, f, g, axis=1), None]

    @classmethod
    def samples(cls, draw):
        """Every direction; with and without bias, lengths, states and peepholes."""
        ops = [cls(2), cls(2, "bidirectional"), cls(1, "reverse"), cls(2, "reverse")]
        yield from recurrent_samples(draw, ops)


@halves_in_float32
class LSTMGrad(RecurrentGrad):
    """Backpropagation through time of LSTM; see RecurrentGrad.  Outputs: dx, dw, dr, dbias, dh0, dc0, dpeepholes."""

    of = LSTM

    def scratch(self, ins, outs):
        *types, active = self.rooms(ins, outs, 4 * self.hidden_size, 4)
        return [*types, ins[0].with_shape((self.hidden_size,)), active]

    def run_back(self, d, ins, outs, scratch):
        (_, _, r, _, lengths, _, c0, p), (_, gates, cells), (dy, dh_last, dc_last) = self.parts(ins)
        dg, _, _, dh, dc, a, e, row, active = scratch
        dh0, dc0, dp = outs[4:7]
        dh[...] = 0 if dh_last is None else dh_last[d]
        dc[...] = 0 if dc_last is None else dc_last[d]
        if dp is not None:
            dp[d] = 0
        order = self.forward().order(d, gates.shape[1])
        earlier = [*(cells[d, t] for t in reversed(order[:-1])), None if c0 is None else c0[d]][: len(order)]
        for before, (t, rows) in zip(earlier, self.steps_back(order, d, lengths, dy, (dh, a, active)), strict=True):
            self._step(dg[t], gates[d, t], (before, cells[d, t]), None if p is None else p[d], (dh, dc, a, e))
            clear(dg[t], rows)
            if dp is not None:
                self._peepholes(dp[d], dg[t], before, cells[d, t], a, row)
            store(dc, e, rows)
            np.matmul(dg[t], r[d], out=a)
            store(dh, a, rows)
        for first, state in ((dh0, dh), (dc0, dc)):
            if first is not None:
                first[d] = state

    def _step(self, dg, gates, cells, p, rooms):
        """The gradients of one step's gates, and in the last room that of the cell before it."""
        before, c = cells
        dh, dc, a, e = rooms
        n = self.hidden_size
        i, o, f, g = (gates[:, k * n : (k + 1) * n] for k in range(4))
        di, do, df, dgate = (dg[:, k * n : (k + 1) * n] for k in range(4))
        np.tanh(c, out=a)
        np.multiply(dh, a, out=do)
        times_slope(do, o, e)
        np.multiply(a, a, out=a)
        np.subtract(a.dtype.type(1), a, out=a)
        np.multiply(a, o, out=a)
        np.multiply(a, dh, out=a)
        np.add(a, dc, out=a)  # the cell's whole gradient
        if p is not None:
            np.multiply(do, p[n : 2 * n], out=e)
            np.add(a, e, out=a)
        np.multiply(a, g, out=di)
        times_slope(di, i, e)
        np.multiply(a, i, out=dgate)
        times_tanh_slope(dgate, g, e)
        if before is None:
            df.fill(0)
        else:
            np.multiply(a, before, out=df)
            times_slope(df, f, e)
        np.multiply(a, f, out=e)
        if p is not None:
            for gate, part in ((di, p[:n]), (df, p[2 * n :])):
                np.multiply(gate, part, out=a)
                np.add(e, a, out=e)

    def _peepholes(self, dp, dg, before, c, room, row):
        """Adds one step's part: gates' gradients times the cells that they saw."""
        n = self.hidden_size
        for k, cell in ((0, before), (1, c), (2, before)):
            if cell is not None:
                np.multiply(dg[:, k * n : (k + 1) * n], cell, out=room)
                np.sum(room, axis=0, out=row)
                np.add(dp[k * n : (k + 1) * n], row, out=dp[k * n : (k + 1) * n])

    @classmethod
    def samples(cls, draw):
        yield from gradient_samples(draw, [LSTM(2), LSTM(2, "bidirectional"), LSTM(1, "reverse"), LSTM(2, "reverse")])
