"""LeNet-5 for MNIST (LeCun et al. 1998), with ReLU and max pooling."""

from dataclasses import dataclass

from .common import BATCH, InputSpec, Net, glorot_uniform, he_uniform
from .registry import Classifier, Variant, register


@register(Variant("lenet", "LeNet-5 for 28x28 grey images (MNIST)", 16, 256))
@dataclass(frozen=True)
class LeNet(Classifier):
    """x float32 [N, 1, 28, 28] to logits float32 [N, classes]."""

    classes: int = 10

    def inputs(self) -> tuple[InputSpec, ...]:
        return (InputSpec("x", "float32", (BATCH, 1, 28, 28)),)

    def checkpoints(self) -> tuple[str, ...]:
        return ("pool1", "pool2")

    def build(self, net: Net) -> None:
        x = net.conv("x", "conv1", channels=(1, 6), kernel=5, padding=2)
        x = net.add("Relu", [x], "relu1")
        x = net.max_pool(x, "pool1", kernel=2, stride=2)
        x = net.conv(x, "conv2", channels=(6, 16), kernel=5)
        x = net.add("Relu", [x], "relu2")
        x = net.max_pool(x, "pool2", kernel=2, stride=2)
        x = net.add("Flatten", [x], "flat", axis=1)
        for index, sizes in ((1, (400, 120)), (2, (120, 84))):
            x = net.gemm(x, f"fc{index}", sizes=sizes, init=he_uniform(sizes[0]))
            x = net.add("Relu", [x], f"relu{index + 2}")
        init = glorot_uniform(84, self.classes)
        net.gemm(x, "logits", sizes=(84, self.classes), init=init, params="fc3")
        net.output("logits", (BATCH, self.classes))
