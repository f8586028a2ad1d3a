"""AlexNet (Krizhevsky 2014, arXiv 1404.5997: "one weird trick"), the variant of one tower without normalisation.

Parameters have torchvision's names and layouts, so that its weights can be copied in by name (at image 224).
"""

from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .common import BATCH, Net, glorot_uniform, he_uniform, scaled
from .registry import Classifier, Variant, register

# (channels, kernel, stride, padding, the position in torchvision's Sequential, whether a pool follows)
_LAYERS = (
    (64, 11, 4, 2, 0, True),
    (192, 5, 1, 2, 3, True),
    (384, 3, 1, 1, 6, False),
    (256, 3, 1, 1, 8, False),
    (256, 3, 1, 1, 10, True),
)
_LEAST = 63


@register(Variant("alexnet", "AlexNet for images", 16, 1024))
@dataclass(frozen=True)
class AlexNet(Classifier):
    """x float32 [N, 3, image, image] to logits float32 [N, classes].

    `width` is the channels of the first convolution, the others in proportion; `hidden` those of the two dense
    layers. The image decides the size of the first dense layer (torchvision averages to 6x6, as 224 gives it).
    """

    width: int = 64
    hidden: int = 4096
    image: int = 224
    classes: int = 1000
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if self.image < _LEAST:
            raise UsageError(f"option 'image' must be at least {_LEAST}, or the last pool has no room: {self.image}")

    def checkpoints(self) -> tuple[str, ...]:
        return ("pool1", "pool2", "relu3", "relu4", "pool5")

    def build(self, net: Net) -> None:
        x, before, size = "x", 3, self.image
        for index, (full, kernel, stride, padding, position, pool) in enumerate(_LAYERS, start=1):
            channels = (before, scaled(full, self.width, 64))
            window: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding}
            x = net.conv(x, f"conv{index}", channels=channels, params=f"features.{position}", **window)
            x = net.add("Relu", [x], f"relu{index}")
            before, size = channels[1], (size + 2 * padding - kernel) // stride + 1
            if pool:
                x = net.max_pool(x, f"pool{index}", kernel=3, stride=2)
                size = (size - 3) // 2 + 1
        x = net.add("Flatten", [x], "flat", axis=1)
        self._classify(net, x, before * size * size)

    def _classify(self, net: Net, x: str, size: int) -> None:
        for index, position in ((1, 1), (2, 4)):
            x = net.dropout(x, f"classifier.dropout{index}", ratio=self.dropout)
            sizes = (size, self.hidden)
            params = f"classifier.{position}"
            x = net.gemm(x, f"classifier.fc{index}", sizes=sizes, init=he_uniform(size), params=params)
            x = net.add("Relu", [x], f"classifier.relu{index}")
            size = self.hidden
        init = glorot_uniform(size, self.classes)
        net.gemm(x, "logits", sizes=(size, self.classes), init=init, params="classifier.6")
        net.output("logits", (BATCH, self.classes))
