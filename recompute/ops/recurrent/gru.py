"""GRU, in both forms of its reset gate, and its gradient."""

from __future__ import annotations

import numpy as np

from ..linear.half_products import halves_in_float32
from .parts import clear, column_sums, cut, filled, logistic, store, times_slope, times_tanh_slope
from .shared import Recurrent, RecurrentGrad, active_rows, gradient_samples, recurrent_samples


@halves_in_float32
class GRU(Recurrent):
    """Gated recurrent unit (Cho et al. 2014), gates in the order update, reset, hidden.

    z, r = σ(x wᵀ + h rᵀ + b), n = tanh(x wₕᵀ + b + (r · h) rₕᵀ + b'), or with `linear_before_reset` (as cuDNN and
    PyTorch) n = tanh(x wₕᵀ + b + r · (h rₕᵀ + b')); h' = (1 - z) · n + z · h.
    Inputs (x, w, r, bias?, lengths?, initial_h?) → (Y, Y_h, gates): the last holds z, r, n of each step, and with
    `linear_before_reset` h rₕᵀ + b' too, [D, T, N, 3H or 4H], for the gradient.
    """

    linear_before_reset: int = 0
    gates = 3
    default_activations = ("Sigmoid", "Tanh")
    weights = (1, 2, 3)

    @property
    def width(self):
        """Columns that are kept of each step."""
        return (4 if self.linear_before_reset else 3) * self.hidden_size

    def kept(self, steps, batch):
        return [(self.directions, steps, batch, self.width)]

    @classmethod
    def more(cls, node):
        """The form of the reset gate."""
        super().more(node)
        return (int(bool(node.attributes.get("linear_before_reset", 0))),)

    def export(self, g, ins, outs):
        """ONNX's GRU, but unrolled in f64, for which ONNX Runtime has no kernel."""
        return g.type(ins[0]).dtype != "f64" and super().export(g, ins, outs)

    def scratch(self, ins, outs):
        """Inputs' part of the gates, products, the state, room, the bias, rows that are active."""
        x, lengths = ins[0], filled(ins, 6)[4]
        steps, batch, _ = x.shape
        n = self.hidden_size
        shapes = [(steps, batch, 3 * n), (batch, 3 * n), (batch, n), (batch, n), (3 * n,)]
        return (*map(x.with_shape, shapes), active_rows(x, lengths))

    def compute(self, ins, outs, scratch):
        """One direction after the other; biases of both products together, where they may be."""
        x, w, _, bias, *_ = inputs = filled(ins, 6)
        n = self.hidden_size
        for d in range(self.directions):
            total = None
            if bias is not None:
                total = scratch[4]
                total[...] = bias[d, : 3 * n]
                joined = 2 * n if self.linear_before_reset else 3 * n
                np.add(total[:joined], bias[d, 3 * n : 3 * n + joined], out=total[:joined])
            self.project(x, w[d], total, scratch[0])
            self._run(d, inputs, filled(outs, 3), scratch)

    def _run(self, d, given, outs, scratch):
        _, _, r, bias, lengths, h0 = given
        y, last, kept = outs
        pre, product, h, room, _, active = scratch
        n = self.hidden_size
        h[...] = 0 if h0 is None else h0[d]
        for t in self.order(d, pre.shape[0]):
            gates = pre[t]
            z, reset, new = (gates[:, k * n : (k + 1) * n] for k in range(3))
            hidden = product[:, 2 * n :]
            if self.linear_before_reset:
                np.matmul(h, r[d].T, out=product)
                if bias is not None:
                    np.add(hidden, bias[d, 5 * n :], out=hidden)
            else:
                np.matmul(h, r[d, : 2 * n].T, out=product[:, : 2 * n])
            np.add(gates[:, : 2 * n], product[:, : 2 * n], out=gates[:, : 2 * n])
            logistic(gates[:, : 2 * n])
            if self.linear_before_reset:
                np.multiply(reset, hidden, out=room)
            else:
                np.multiply(reset, h, out=room)
                np.matmul(room, r[d, 2 * n :].T, out=hidden)
                room[...] = hidden
            np.add(new, room, out=new)
            np.tanh(new, out=new)
            if kept is not None:
                kept[d, t, :, : 3 * n] = gates
                kept[d, t, :, 3 * n :] = hidden[:, : kept.shape[3] - 3 * n]
            np.subtract(h, new, out=room)
            np.multiply(room, z, out=room)
            np.add(room, new, out=y[t, d])
            rows = None if lengths is None else np.greater(lengths, t, out=active)
            store(h, y[t, d], rows)
            clear(y[t, d], rows)
        if last is not None:
            last[d] = h

    def step(self, b, gx, state, r, biases, peepholes):
        """The equations."""
        h, n = state[0], self.hidden_size
        first, second = b.Split(gx, sizes=(2 * n, n), axis=1)
        opened = b.Add(first, b.MatMul(h, cut(b, r, 0, 2 * n, 0), transB=1))
        inner = None
        if biases[0] is not None:
            both = [cut(b, v, 0, 2 * n, 0) for v in biases]
            opened = b.Add(opened, b.Add(*both))
            second = b.Add(second, cut(b, biases[0], 2 * n, 3 * n, 0))
            inner = cut(b, biases[1], 2 * n, 3 * n, 0)
        opened = b.Sigmoid(opened)
        z, reset = b.Split(opened, sizes=(n, n), axis=1)
        hidden = b.MatMul(h if self.linear_before_reset else b.Mul(reset, h), cut(b, r, 2 * n, 3 * n, 0), transB=1)
        if inner is not None:
            hidden = b.Add(hidden, inner)
        new = b.Tanh(b.Add(second, b.Mul(reset, hidden) if self.linear_before_reset else hidden))
        kept = [opened, new, hidden] if self.linear_before_reset else [opened, new]
        return [b.Add(new, b.Mul(z, b.Sub(h, new)))], [b.Concat(*kept, axis=1)]

    @classmethod
    def samples(cls, draw):
        yield from recurrent_samples(draw, _cases())


def _cases():
    ops = [GRU(2, linear_before_reset=1), GRU(2, "bidirectional", 1), GRU(2, "reverse"), GRU(1, "reverse", 1)]
    return [*ops, GRU(2, "forward"), GRU(2, "bidirectional", 0)]


@halves_in_float32
class GRUGrad(RecurrentGrad):
    """Backpropagation through time of GRU; see RecurrentGrad.  Outputs: dx, dw, dr, dbias, dh0."""

    linear_before_reset: int = 0
    of = GRU

    def scratch(self, ins, outs):
        """The steps read the states before them too."""
        types = self.rooms(ins, outs, self.forward().width, 5)
        types[1] = ins[0].with_shape((*ins[0].shape[:2], self.hidden_size))
        return types

    def bias_gradient(self, dg, db, width):
        super().bias_gradient(dg, db, width)
        if self.linear_before_reset:
            column_sums(dg[:, width:], db[5 * self.hidden_size :])

    def state_gradients(self, d, dg, given, made, dr, scratch):
        previous, n = scratch[1], self.hidden_size
        before = previous.reshape(-1, n)
        np.matmul(dg[:, : 2 * n].T, before, out=dr[: 2 * n])
        if not self.linear_before_reset:
            np.multiply(previous, made[1][d, :, :, n : 2 * n], out=previous)
        np.matmul(dg[:, -n:].T, before, out=dr[2 * n :])

    def run_back(self, d, ins, outs, scratch):
        (_, _, r, _, lengths, h0), (y, kept), (dy, dh_last) = self.parts(ins)
        dg, previous, _, dh, a, e, u, v, active = scratch
        self.fill_previous(previous, y, d, h0, lengths, active)
        dh[...] = 0 if dh_last is None else dh_last[d]
        for t, rows in self.steps_back(self.forward().order(d, kept.shape[1]), d, lengths, dy, (dh, a, active)):
            self._step(dg[t], kept[d, t], previous[t], r[d], (dh, a, e, u, v))
            clear(dg[t], rows)
            store(dh, a, rows)
        if outs[4] is not None:
            outs[4][d] = dh

    def _step(self, dg, kept, h, r, rooms):
        """The gradients of one step's gates, and in the second room that of the state before it."""
        dh, a, e, u, v = rooms
        n = self.hidden_size
        z, reset, new = (kept[:, k * n : (k + 1) * n] for k in range(3))
        dz, dreset, dnew = (dg[:, k * n : (k + 1) * n] for k in range(3))
        np.subtract(h, new, out=dz)
        np.multiply(dz, dh, out=dz)
        times_slope(dz, z, e)
        np.multiply(dh, z, out=a)
        np.subtract(dh, a, out=dnew)
        times_tanh_slope(dnew, new, e)
        if self.linear_before_reset:
            np.multiply(dnew, kept[:, 3 * n :], out=dreset)
            inner = dg[:, 3 * n :]
            np.multiply(dnew, reset, out=inner)
            times_slope(dreset, reset, e)
            np.matmul(inner, r[2 * n :], out=u)
        else:
            np.matmul(dnew, r[2 * n :], out=v)
            np.multiply(v, h, out=dreset)
            times_slope(dreset, reset, e)
            np.multiply(v, reset, out=u)
        np.add(a, u, out=a)
        np.matmul(dg[:, : 2 * n], r[: 2 * n], out=u)
        np.add(a, u, out=a)

    @classmethod
    def samples(cls, draw):
        yield from gradient_samples(draw, _cases())
