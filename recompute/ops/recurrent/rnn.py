"""The simple recurrent network (Elman 1990) and its gradient."""

from __future__ import annotations

import numpy as np

from ..linear.half_products import halves_in_float32
from .parts import clear, filled, logistic, store, times_slope, times_tanh_slope
from .shared import DIRECTIONS, Recurrent, RecurrentGrad, active_rows, gradient_samples, recurrent_samples

ACTIVATIONS = ("Tanh", "Relu", "Sigmoid")


@halves_in_float32
class RNN(Recurrent):
    """h' = f(x wᵀ + h rᵀ + b), f the same in both directions: Tanh, Relu or Sigmoid.

    Inputs (x, w, r, bias?, lengths?, initial_h?) → (Y, Y_h); the gradient needs no more.
    """

    activation: str = "Tanh"
    gates = 1
    weights = (1, 2, 3)

    def infer(self, *inputs):
        if self.activation not in ACTIVATIONS:
            raise self.fail(f"activation '{self.activation}' is none of {', '.join(ACTIVATIONS)}", *inputs)
        return super().infer(*inputs)

    def onnx_attributes(self):
        attributes = super().onnx_attributes()
        activation = attributes.pop("activation")
        return {**attributes, "activations": [activation] * self.directions}

    @classmethod
    def more(cls, node):
        count = DIRECTIONS.get(node.attributes.get("direction", "forward"), 1)
        activations = {str(a).capitalize() for a in node.attributes.get("activations", ("Tanh",) * count)}
        if len(activations) != 1 or not activations.issubset(ACTIVATIONS):
            raise node.fail(f"has activations {sorted(activations)}; one of {', '.join(ACTIVATIONS)} is supported")
        return (activations.pop(),)

    def scratch(self, ins, outs):
        """Inputs' part, a product, the state, the bias, rows that are active."""
        x, lengths = ins[0], filled(ins, 6)[4]
        steps, batch, _ = x.shape
        n = self.hidden_size
        shapes = [(steps, batch, n), (batch, n), (batch, n), (n,)]
        return (*map(x.with_shape, shapes), active_rows(x, lengths))

    def compute(self, ins, outs, scratch):
        x, w, r, bias, lengths, h0 = filled(ins, 6)
        y, last = filled(outs, 2)
        pre, product, h, total, active = scratch
        for d in range(self.directions):
            if bias is not None:
                np.add(bias[d, : self.hidden_size], bias[d, self.hidden_size :], out=total)
            self.project(x, w[d], None if bias is None else total, pre)
            h[...] = 0 if h0 is None else h0[d]
            for t in self.order(d, pre.shape[0]):
                np.matmul(h, r[d].T, out=product)
                np.add(pre[t], product, out=product)
                self._activate(product)
                rows = None if lengths is None else np.greater(lengths, t, out=active)
                store(h, product, rows)
                y[t, d] = product
                clear(y[t, d], rows)
            if last is not None:
                last[d] = h

    def _activate(self, x):
        if self.activation == "Tanh":
            np.tanh(x, out=x)
        elif self.activation == "Relu":
            np.maximum(x, x.dtype.type(0), out=x)
        else:
            logistic(x)

    def step(self, b, gx, state, r, biases, peepholes):
        total = b.Add(gx, b.MatMul(state[0], r, transB=1))
        if biases[0] is not None:
            total = b.Add(total, b.Add(*biases))
        return [getattr(b, self.activation)(total)], []

    @classmethod
    def samples(cls, draw):
        yield from recurrent_samples(draw, _cases())


def _cases():
    return [RNN(2), RNN(2, "bidirectional"), RNN(2, "reverse", "Relu"), RNN(1, "reverse", "Sigmoid")]


@halves_in_float32
class RNNGrad(RecurrentGrad):
    """Backpropagation through time of RNN; see RecurrentGrad.  Outputs: dx, dw, dr, dbias, dh0."""

    activation: str = "Tanh"
    of = RNN

    def scratch(self, ins, outs):
        return self.rooms(ins, outs, self.hidden_size, 2)

    def run_back(self, d, ins, outs, scratch):
        (_, _, r, _, lengths, _), (y,), (dy, dh_last) = self.parts(ins)
        dg, _, _, dh, a, active = scratch
        dh[...] = 0 if dh_last is None else dh_last[d]
        for t, rows in self.steps_back(self.forward().order(d, y.shape[0]), d, lengths, dy, (dh, a, active)):
            dg[t] = dh
            if self.activation == "Tanh":
                times_tanh_slope(dg[t], y[t, d], a)
            elif self.activation == "Relu":
                np.greater(y[t, d], y.dtype.type(0), out=a)
                np.multiply(dg[t], a, out=dg[t])
            else:
                times_slope(dg[t], y[t, d], a)
            clear(dg[t], rows)
            np.matmul(dg[t], r[d], out=a)
            store(dh, a, rows)
        if outs[4] is not None:
            outs[4][d] = dh

    @classmethod
    def samples(cls, draw):
        yield from gradient_samples(draw, _cases())
