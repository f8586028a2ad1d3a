"""GoogLeNet (Szegedy et al. 2014, arXiv 1409.4842) with batch normalisation, without the auxiliary heads.

Parameters have torchvision's names and layouts, so that its weights can be copied in by name. As there, the branch
that the paper gives a 5x5 kernel has a 3x3 one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .common import Net, Size, scaled
from .registry import Classifier, Variant, register

# 1x1, 3x3 (reduced to, to), "5x5" (reduced to, to), behind the pool.
_MODULES: dict[str, tuple[int, ...]] = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
_POOLS = {"3b": ("pool3", 3), "4e": ("pool4", 2)}
_STEM = 64


@register(Variant("googlenet", "GoogLeNet (Inception v1) for images", 16, 256))
@dataclass(frozen=True)
class GoogLeNet(Classifier):
    """x float32 [N, 3, image, image] to logits float32 [N, classes]; `width` is the channels of the stem."""

    width: int = _STEM
    image: int = 224
    classes: int = 1000
    dropout: float = 0.2

    def checkpoints(self) -> tuple[str, ...]:
        return ("pool1", "pool2", *(f"inception{module}.out" for module in _MODULES))

    def build(self, net: Net) -> None:
        first, second = scaled(64, self.width, _STEM), scaled(192, self.width, _STEM)
        x = conv_bn(net, "x", "conv1", channels=(3, first), kernel=7, stride=2, padding=3)
        x = net.max_pool(x, "pool1", kernel=3, stride=2, ceil_mode=True)
        x = conv_bn(net, x, "conv2", channels=(first, first), kernel=1)
        x = conv_bn(net, x, "conv3", channels=(first, second), kernel=3, padding=1)
        x, size = net.max_pool(x, "pool2", kernel=3, stride=2, ceil_mode=True), second
        for module, full in _MODULES.items():
            widths = [scaled(channels, self.width, _STEM) for channels in full]
            x = _inception(net, x, f"inception{module}", size, widths)
            size = widths[0] + widths[2] + widths[4] + widths[5]
            if module in _POOLS:
                name, kernel = _POOLS[module]
                x = net.max_pool(x, name, kernel=kernel, stride=2, ceil_mode=True)
        net.classifier(x, sizes=(size, self.classes), params="fc", dropout=self.dropout)


def conv_bn(
    net: Net, x: str, name: str, *, channels: tuple[int, int], kernel: Size, stride: int = 1, padding: Size = 0
) -> str:
    """A convolution, its norm and a ReLU: name.conv, name.bn, name.relu."""
    window: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding}
    x = net.conv(x, f"{name}.conv", channels=channels, bias=False, **window)
    x = net.batch_norm(x, f"{name}.bn", channels=channels[1], epsilon=1e-3)
    return net.add("Relu", [x], f"{name}.relu")


def _inception(net: Net, x: str, name: str, size: int, widths: Sequence[int]) -> str:
    """Four branches side by side; `size` is the channels of x."""
    one, reduce3, three, reduce5, five, behind = widths
    branches = [conv_bn(net, x, f"{name}.branch1", channels=(size, one), kernel=1)]
    for index, (inner, out) in ((2, (reduce3, three)), (3, (reduce5, five))):
        y = conv_bn(net, x, f"{name}.branch{index}.0", channels=(size, inner), kernel=1)
        branches.append(conv_bn(net, y, f"{name}.branch{index}.1", channels=(inner, out), kernel=3, padding=1))
    y = net.max_pool(x, f"{name}.branch4.pool", kernel=3, stride=1, padding=1, ceil_mode=True)
    branches.append(conv_bn(net, y, f"{name}.branch4.1", channels=(size, behind), kernel=1))
    return net.concat(branches, f"{name}.out")
