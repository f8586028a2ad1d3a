"""DS-CNN (Zhang et al. 2017, arXiv 1711.07128), small: spots keywords in a second of sound, on microcontrollers."""

from dataclasses import dataclass
from typing import Any, ClassVar

from .common import BATCH, InputSpec, Net, integers
from .registry import Family, Variant, register


@register(Variant("ds_cnn", "depthwise-separable convolutions that spot keywords", 16, 256))
@dataclass(frozen=True)
class DsCnn(Family):
    """x float32 [N, 1, frames, coefficients], cepstra of a second, to logits float32 [N, classes]."""

    task: ClassVar[str] = "classification"

    width: int = 64
    frames: int = 49
    coefficients: int = 10
    classes: int = 12

    def inputs(self) -> tuple[InputSpec, ...]:
        return (InputSpec("x", "float32", (BATCH, 1, self.frames, self.coefficients)),)

    def label(self) -> InputSpec:
        return integers("label", (BATCH,), high=self.classes)

    def checkpoints(self) -> tuple[str, ...]:
        return tuple(f"block{i}.point.conv" for i in range(1, 5))

    def build(self, net: Net) -> None:
        size = self.width
        x = net.conv("x", "stem.conv", channels=(1, size), kernel=(10, 4), stride=2, padding=(5, 1), bias=False)
        x = net.batch_norm(x, "stem.bn", channels=size)
        x = net.add("Relu", [x], "stem.relu")
        for i in range(1, 5):
            for part, kernel, groups in (("depth", 3, size), ("point", 1, 1)):
                name, padding = f"block{i}.{part}", kernel // 2
                window: dict[str, Any] = {"kernel": kernel, "padding": padding, "groups": groups}
                x = net.conv(x, f"{name}.conv", channels=(size, size), bias=False, **window)
                x = net.batch_norm(x, f"{name}.bn", channels=size)
                x = net.add("Relu", [x], f"{name}.relu")
        net.classifier(x, sizes=(size, self.classes), params="fc")
