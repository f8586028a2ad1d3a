"""ResNet v1.5 (He et al. 2015, arXiv 1512.03385; the stride is in the 3x3 convolution of the bottleneck).

Parameters have torchvision's names and layouts, so that its weights can be copied in by name.
"""

from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .common import BATCH, ONES, Init, Net, glorot_uniform
from .registry import Classifier, Variant, register

EXPANSION = 4
# Before training has measured any statistics the norms do nothing, and each block would add to the stream as
# much as it found there. Starting the last norm of a block lower keeps even an untrained ResNet-152 in range.
_BRANCH = Init("constant", 0.25)


def _variant(depth: int, blocks: tuple[int, ...], *, bottleneck: bool, table_batch: int) -> Variant:
    options = {"blocks": blocks, "bottleneck": bottleneck}
    description = f"ResNet-{depth} v1.5 for images"
    return Variant(f"resnet{depth}", description, 8, table_batch, options)


@register(
    _variant(18, (2, 2, 2, 2), bottleneck=False, table_batch=64),
    _variant(34, (3, 4, 6, 3), bottleneck=False, table_batch=64),
    _variant(50, (3, 4, 6, 3), bottleneck=True, table_batch=32),
    _variant(101, (3, 4, 23, 3), bottleneck=True, table_batch=32),
    _variant(152, (3, 8, 36, 3), bottleneck=True, table_batch=32),
)
@dataclass(frozen=True)
class ResNet(Classifier):
    """x float32 [N, 3, image, image] to logits float32 [N, classes].

    `blocks` is the number of blocks in each of the four stages; `width` the channels of the first.
    """

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    bottleneck: bool = False
    width: int = 64
    image: int = 224
    classes: int = 1000

    def __post_init__(self) -> None:
        if len(self.blocks) != 4 or min(self.blocks) < 1:
            raise UsageError(f"option 'blocks' must be four sizes of at least 1, not {self.blocks}")

    def checkpoints(self) -> tuple[str, ...]:
        stages = enumerate(self.blocks, start=1)
        return tuple(f"layer{stage}.{index}.out" for stage, count in stages for index in range(count))

    def build(self, net: Net) -> None:
        x, size = trunk(net, self.blocks, bottlenecks=self.bottleneck, width=self.width)[-1]
        x = net.add("GlobalAveragePool", [x], "pool")
        x = net.add("Flatten", [x], "flat", axis=1)
        init = glorot_uniform(size, self.classes)
        net.gemm(x, "logits", sizes=(size, self.classes), init=init, params="fc")
        net.output("logits", (BATCH, self.classes))


def trunk(net: Net, blocks: tuple[int, ...], *, bottlenecks: bool, width: int) -> list[tuple[str, int]]:
    """The stem and the stages on the input "x": the output of each stage, at 1/4, 1/8, ... of the size, with its
    channels."""
    x = net.conv("x", "stem.conv", channels=(3, width), kernel=7, stride=2, padding=3, bias=False, params="conv1")
    x = net.batch_norm(x, "stem.bn", channels=width, params="bn1")
    x = net.add("Relu", [x], "stem.relu")
    x = net.max_pool(x, "stem.pool", kernel=3, stride=2, padding=1)
    block = bottleneck if bottlenecks else _basic
    size, stages = width, []
    for stage, count in enumerate(blocks):
        inner = width << stage
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            out = inner * EXPANSION if bottlenecks else inner
            x = block(net, x, f"layer{stage + 1}.{index}", sizes=(size, inner, out), stride=stride)
            size = out
        stages.append((x, size))
    return stages


def conv_bn(
    net: Net,
    x: str,
    name: str,
    *,
    channels: tuple[int, int],
    kernel: int,
    stride: int = 1,
    dilation: int = 1,
    init: Init = ONES,
) -> str:
    """`name` such as "layer1.0.{}1" becomes the convolution layer1.0.conv1 and the norm layer1.0.bn1."""
    window: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": kernel // 2 * dilation}
    x = net.conv(x, name.format("conv"), channels=channels, dilation=dilation, bias=False, **window)
    return net.batch_norm(x, name.format("bn"), channels=channels[1], init=init)


def _basic(net: Net, x: str, name: str, *, sizes: tuple[int, int, int], stride: int) -> str:
    """Two 3x3 convolutions; `sizes` is (in, inner, out) channels."""
    first, inner, out = sizes
    y = conv_bn(net, x, name + ".{}1", channels=(first, inner), kernel=3, stride=stride)
    y = net.add("Relu", [y], f"{name}.relu1")
    y = conv_bn(net, y, name + ".{}2", channels=(inner, out), kernel=3, init=_BRANCH)
    return _join(net, x, y, name, channels=(first, out), stride=stride)


def bottleneck(net: Net, x: str, name: str, *, sizes: tuple[int, int, int], stride: int, dilation: int = 1) -> str:
    """1x1, 3x3 (with the stride, dilated) and 1x1 convolutions; `sizes` is (in, inner, out) channels."""
    first, inner, out = sizes
    y = conv_bn(net, x, name + ".{}1", channels=(first, inner), kernel=1)
    y = net.add("Relu", [y], f"{name}.relu1")
    y = conv_bn(net, y, name + ".{}2", channels=(inner, inner), kernel=3, stride=stride, dilation=dilation)
    y = net.add("Relu", [y], f"{name}.relu2")
    y = conv_bn(net, y, name + ".{}3", channels=(inner, out), kernel=1, init=_BRANCH)
    return _join(net, x, y, name, channels=(first, out), stride=stride)


def _join(net: Net, x: str, y: str, name: str, *, channels: tuple[int, int], stride: int) -> str:
    """The shortcut (projected when the shape changes), the sum and the last ReLU of a block."""
    if stride != 1 or channels[0] != channels[1]:
        short = f"{name}.downsample"
        x = net.conv(x, f"{short}.conv", channels=channels, kernel=1, stride=stride, bias=False, params=f"{short}.0")
        x = net.batch_norm(x, f"{short}.bn", channels=channels[1], params=f"{short}.1")
    y = net.add("Add", [y, x], f"{name}.add")
    return net.add("Relu", [y], f"{name}.out")
