"""The two multi-layer perceptrons of Paddle's documentation of recompute."""

from dataclasses import dataclass
from typing import ClassVar

from .common import BATCH, InputSpec, Net, glorot_uniform, he_uniform
from .registry import Classifier, Family, Variant, register

# Paddle's log_loss keeps the logarithm away from zero by this much.
_EPSILON = 1e-4


@register(Variant("mlp", "Paddle's documentation MLP: two linear layers and a softmax", 16, 1024))
@dataclass(frozen=True)
class Mlp(Classifier):
    """x float32 [N, features] to pred float32 [N, classes], probabilities."""

    output: ClassVar[str] = "pred"

    features: int = 32
    hidden: int = 128
    classes: int = 2

    def inputs(self) -> tuple[InputSpec, ...]:
        return (InputSpec("x", "float32", (BATCH, self.features)),)

    def checkpoints(self) -> tuple[str, ...]:
        return ("fc_1", "pred")

    def build(self, net: Net) -> None:
        init = glorot_uniform(self.features, self.hidden)
        x = net.gemm("x", "fc_1", sizes=(self.features, self.hidden), init=init)
        init = glorot_uniform(self.hidden, self.classes)
        x = net.gemm(x, "pred.logits", sizes=(self.hidden, self.classes), init=init, params="pred")
        net.add("Softmax", [x], "pred", axis=-1)
        net.output("pred", (BATCH, self.classes))


@register(Variant("mlp4", "Paddle's recompute figure: four linear layers with the log loss inside", 16, 1024))
@dataclass(frozen=True)
class Mlp4(Family):
    """x float32 [N, features] and label float32 [N, 1] (0 or 1) to loss float32 []."""

    task: ClassVar[str] = "binary"
    output: ClassVar[str] = "loss"

    features: int = 32
    hidden: int = 128

    def inputs(self) -> tuple[InputSpec, ...]:
        label = InputSpec("label", "float32", (BATCH, 1), 0, 2, True)
        return (InputSpec("x", "float32", (BATCH, self.features)), label)

    def label(self) -> None:
        return None

    def checkpoints(self) -> tuple[str, ...]:
        return ("relu_1", "relu_2", "relu_3")

    def build(self, net: Net) -> None:
        x, size = "x", self.features
        for index in (1, 2, 3):
            x = net.gemm(x, f"fc_{index}", sizes=(size, self.hidden), init=he_uniform(size))
            x = net.add("Relu", [x], f"relu_{index}")
            size = self.hidden
        x = net.gemm(x, "fc_4", sizes=(size, 1), init=glorot_uniform(size, 1))
        net.add("Sigmoid", [x], "pred")
        _log_loss(net)
        net.output("loss", ())


def _log_loss(net: Net) -> None:
    """loss = mean(-label log(pred + eps) - (1 - label) log(1 - pred + eps))."""
    one = net.constant("one", 1.0)
    epsilon = net.constant("epsilon", _EPSILON)
    log = net.add("Log", [net.add("Add", ["pred", epsilon], "pred.shifted")], "pred.log")
    positive = net.add("Mul", ["label", log], "loss.positive")
    other = net.add("Sub", [one, "pred"], "other")
    log = net.add("Log", [net.add("Add", [other, epsilon], "other.shifted")], "other.log")
    negative = net.add("Mul", [net.add("Sub", [one, "label"], "other.label"), log], "loss.negative")
    likelihood = net.add("Add", [positive, negative], "loss.likelihood")
    losses = net.add("Neg", [likelihood], "loss.each")
    net.add("ReduceMean", [losses], "loss", keepdims=0)
