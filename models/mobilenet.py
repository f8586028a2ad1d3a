"""MobileNet v1 (Howard et al. 2017, arXiv 1704.04861) and v2 (Sandler et al. 2018, arXiv 1801.04381).

The parameters of v2 have torchvision's names and layouts, so that its weights can be copied in by name. Width
multipliers are said by the channels of the first convolution: 32 is 1.0, 16 is 0.5; all layers follow it.
"""

from dataclasses import dataclass
from typing import Any

from .common import ONES, Init, Net, scaled
from .registry import Classifier, Variant, register

_STEM = 32
# v1: channels and stride of each block; v2: expansion, channels, repeats, first stride.
_V1 = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
# The last norm of a residual block starts lower, as in resnet.py.
_BRANCH = Init("constant", 0.5)


@dataclass(frozen=True)
class _MobileNet(Classifier):
    """x float32 [N, 3, image, image] to logits float32 [N, classes]; `width` is the channels of the stem."""

    width: int = _STEM
    image: int = 224
    classes: int = 1000

    def channels(self, full: int) -> int:
        """What a layer with `full` channels has at this width."""
        return scaled(full, self.width, _STEM)


@register(Variant("mobilenet_v1", "MobileNet v1 for images", 16, 272))
@dataclass(frozen=True)
class MobileNetV1(_MobileNet):
    """Pairs of a depthwise 3x3 and a 1x1 convolution, each with a norm and ReLU6 (as Keras has it)."""

    dropout: float = 0.001

    def checkpoints(self) -> tuple[str, ...]:
        # Convolutions rather than what follows them: norms and ReLU6 are cheap to run again.
        return tuple(f"block{index}.point.conv" for index in range(1, len(_V1) + 1))

    def build(self, net: Net) -> None:
        size = self.channels(_STEM)
        x = _conv_bn(net, "x", "stem.{}", channels=(3, size), kernel=3, stride=2)
        x = _relu6(net, x, "stem.relu")
        for index, (full, stride) in enumerate(_V1, start=1):
            name = f"block{index}"
            x = _conv_bn(net, x, name + ".depth.{}", channels=(size, size), kernel=3, stride=stride, groups=size)
            x = _relu6(net, x, f"{name}.depth.relu")
            x = _conv_bn(net, x, name + ".point.{}", channels=(size, self.channels(full)), kernel=1)
            x, size = _relu6(net, x, f"{name}.out"), self.channels(full)
        net.classifier(x, sizes=(size, self.classes), params="fc", dropout=self.dropout)


@register(Variant("mobilenet_v2", "MobileNet v2 for images", 16, 272))
@dataclass(frozen=True)
class MobileNetV2(_MobileNet):
    """Inverted residuals: 1x1 to six times the channels, depthwise 3x3, 1x1 back without an activation."""

    dropout: float = 0.2

    def checkpoints(self) -> tuple[str, ...]:
        count = sum(repeats for _, _, repeats, _ in _V2)
        later = (f"block{index}.{part}.conv" for index in range(2, count + 1) for part in ("expand", "point"))
        return ("block1.point.conv", *later)

    def build(self, net: Net) -> None:
        size, index = self.channels(_STEM), 0
        x = _conv_bn(net, "x", "stem.{}", channels=(3, size), kernel=3, stride=2, params="features.0.{}")
        x = _relu6(net, x, "stem.relu")
        for expansion, full, repeats, first in _V2:
            for stride in (first, *[1] * (repeats - 1)):
                index += 1
                block = _Inverted(index, (size, self.channels(full)), expansion, stride)
                x, size = block.build(net, x), block.channels[1]
        last = self.channels(1280)
        x = _conv_bn(net, x, "last.{}", channels=(size, last), kernel=1, params=f"features.{index + 1}.{{}}")
        x = _relu6(net, x, "last.relu")
        net.classifier(x, sizes=(last, self.classes), params="classifier.1", dropout=self.dropout)


def _conv_bn(
    net: Net,
    x: str,
    name: str,
    *,
    channels: tuple[int, int],
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    init: Init = ONES,
    params: str | None = None,
) -> str:
    """`name` such as "block1.depth.{}" becomes block1.depth.conv and .bn, `params` numbers 0 and 1."""
    convolution, norm = (params.format(0), params.format(1)) if params else (None, None)
    window: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": kernel // 2, "groups": groups}
    x = net.conv(x, name.format("conv"), channels=channels, bias=False, params=convolution, **window)
    return net.batch_norm(x, name.format("bn"), channels=channels[1], init=init, params=norm)


def _relu6(net: Net, x: str, name: str) -> str:
    return net.add("Clip", [x, net.constant("relu6.min", 0.0), net.constant("relu6.max", 6.0)], name)


@dataclass(frozen=True)
class _Inverted:
    """A block that is wide inside: `expansion` times its first channels; it adds what it was given where that fits."""

    index: int
    channels: tuple[int, int]
    expansion: int
    stride: int

    def build(self, net: Net, x: str) -> str:
        """The block's result."""
        name, params = f"block{self.index}", f"features.{self.index}.conv"
        (first, out), stride = self.channels, self.stride
        inner, at, y = first * self.expansion, 0, x
        if self.expansion != 1:
            y = _conv_bn(net, y, name + ".expand.{}", channels=(first, inner), kernel=1, params=f"{params}.0.{{}}")
            y, at = _relu6(net, y, f"{name}.expand.relu"), 1
        where = f"{params}.{at}.{{}}"
        y = _conv_bn(
            net, y, name + ".depth.{}", channels=(inner, inner), kernel=3, stride=stride, groups=inner, params=where
        )
        y = _relu6(net, y, f"{name}.depth.relu")
        joins = stride == 1 and first == out
        y = net.conv(y, f"{name}.point.conv", channels=(inner, out), kernel=1, bias=False, params=f"{params}.{at + 1}")
        norm, init = f"{name}.point.bn" if joins else f"{name}.out", _BRANCH if joins else ONES
        y = net.batch_norm(y, norm, channels=out, init=init, params=f"{params}.{at + 2}")
        return net.add("Add", [x, y], f"{name}.out") if joins else y
