"""A stack of ONNX LSTM operators over a sequence of vectors (Hochreiter and Schmidhuber 1997)."""

import math
from dataclasses import dataclass

from .common import BATCH, ZEROS, Init, InputSpec, Net, glorot_uniform
from .registry import Classifier, Variant, register


@register(Variant("lstm", "Two LSTM layers over a sequence, classified by the last state", 16, 256))
@dataclass(frozen=True)
class Lstm(Classifier):
    """x float32 [N, seq, features] to logits float32 [N, classes].

    The parameters are ONNX's own: `lstm.0.weight_ih` [1, 4 hidden, in], `weight_hh` [1, 4 hidden, hidden] and
    `bias` [1, 8 hidden], with the gates in the order input, output, forget, cell.
    """

    seq: int = 32
    features: int = 32
    hidden: int = 64
    layers: int = 2
    classes: int = 10

    def inputs(self) -> tuple[InputSpec, ...]:
        return (InputSpec("x", "float32", (BATCH, self.seq, self.features)),)

    def checkpoints(self) -> tuple[str, ...]:
        return tuple(f"lstm.{index}.out" for index in range(self.layers))

    def build(self, net: Net) -> None:
        x = net.add("Transpose", ["x"], "x.rows", perm=[1, 0, 2])
        size = self.features
        for index in range(self.layers):
            x = self._layer(net, x, f"lstm.{index}", size=size, last=index == self.layers - 1)
            size = self.hidden
        init = glorot_uniform(size, self.classes)
        net.gemm(x, "logits", sizes=(size, self.classes), init=init, params="fc")
        net.output("logits", (BATCH, self.classes))

    def _layer(self, net: Net, x: str, name: str, *, size: int, last: bool) -> str:
        """[seq, N, size] to all states [seq, N, hidden]; in the last layer the last one [N, hidden]."""
        gates, init = 4 * self.hidden, Init("uniform", 1.0 / math.sqrt(self.hidden))
        params = [
            net.parameter(f"{name}.weight_ih", (1, gates, size), init),
            net.parameter(f"{name}.weight_hh", (1, gates, self.hidden), init),
            net.parameter(f"{name}.bias", (1, 2 * gates), ZEROS),
        ]
        outputs, axis = (["", f"{name}.last"], 0) if last else ([f"{name}.states"], 1)
        net.add_many("LSTM", [x, *params], outputs, name=name, hidden_size=self.hidden)
        axes = net.constant("last.axes" if last else "states.axes", [axis])
        return net.add("Squeeze", [outputs[-1], axes], f"{name}.out")
