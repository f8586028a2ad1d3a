"""PSPNet (Zhao et al. 2016, arXiv 1612.01105) on a dilated ResNet, without the auxiliary loss.

The stem is three 3x3 convolutions, stages 3 and 4 keep an eighth of the image's size by dilation, and the pyramid
averages to 1, 2, 3 and 6 squares a side. The blocks have the names and layouts of torchvision's ResNet.
"""

from dataclasses import dataclass

from ..errors import UsageError
from ._segmentation import Segmentation
from .common import BATCH, Net
from .registry import Variant, register
from .resnet import EXPANSION, bottleneck, conv_bn

_BINS = (1, 2, 3, 6)
_STAGES = ((1, 1), (2, 1), (1, 2), (1, 4))  # stride, dilation


@register(
    Variant("pspnet", "PSPNet on ResNet-101 for segmentation", 1, 2),
    Variant("pspnet50", "PSPNet on ResNet-50 for segmentation", 1, 2, {"blocks": (3, 4, 6, 3), "image": (473, 473)}),
)
@dataclass(frozen=True)
class PspNet(Segmentation):
    """x float32 [N, 3, height, width] to logits float32 [N, classes, height, width].

    `blocks` is the number of blocks in each of the four stages, `width` the channels inside the first stage's. The
    default is Cityscapes' 19 classes at 713x713.
    """

    image: tuple[int, ...] = (713, 713)
    classes: int = 19
    blocks: tuple[int, ...] = (3, 4, 23, 3)
    width: int = 64
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if len(self.blocks) != 4 or min(self.blocks) < 1:
            raise UsageError(f"option 'blocks' must be four sizes of at least 1, not {self.blocks}")
        if min(self._sizes()) < max(_BINS):
            height, width = self.image
            raise UsageError(f"option 'image' must be at least 41x41 (the pyramid has 6 bins), not {height}x{width}")

    def _sizes(self) -> tuple[int, ...]:
        """An eighth of the image's, rounded up: three strides of 2."""
        return tuple((side + 7) // 8 for side in self.image)

    def checkpoints(self) -> tuple[str, ...]:
        stages = enumerate(self.blocks, start=1)
        return ("stem.pool", *(f"layer{stage}.{index}.out" for stage, count in stages for index in range(count)))

    def build(self, net: Net) -> None:
        x, size = "x", 3
        for index, width in enumerate((self.width, self.width, self.width * 2), start=1):
            stride = 2 if index == 1 else 1
            x = conv_bn(net, x, f"stem.{{}}{index}", channels=(size, width), kernel=3, stride=stride)
            x, size = net.add("Relu", [x], f"stem.relu{index}"), width
        x = net.max_pool(x, "stem.pool", kernel=3, stride=2, padding=1)
        for stage, (count, (stride, dilation)) in enumerate(zip(self.blocks, _STAGES, strict=True)):
            width = self.width << stage
            for index in range(count):
                sizes = (size, width, width * EXPANSION)
                step, name = stride if index == 0 else 1, f"layer{stage + 1}.{index}"
                x, size = bottleneck(net, x, name, sizes=sizes, stride=step, dilation=dilation), sizes[2]
        self._head(net, self._pyramid(net, x, size), size)

    def _pyramid(self, net: Net, x: str, size: int) -> str:
        """x beside its averages over coarse squares, each with a quarter of the channels, at x's size."""
        parts, (height, width) = [x], self._sizes()
        for bins in _BINS:
            name, part = f"pyramid{bins}", size // len(_BINS)
            stride = (height // bins, width // bins)
            kernel = (height - stride[0] * (bins - 1), width - stride[1] * (bins - 1))
            y = net.average_pool(x, f"{name}.pool", kernel=kernel, stride=stride)
            y = conv_bn(net, y, name + ".{}", channels=(size, part), kernel=1)
            y = net.add("Relu", [y], f"{name}.relu")
            parts.append(_resize(net, y, f"{name}.out", (height, width)))
        return net.concat(parts, "pyramid.out")

    def _head(self, net: Net, x: str, size: int) -> None:
        inner = size // len(_BINS)
        x = conv_bn(net, x, "head.{}", channels=(size + inner * len(_BINS), inner), kernel=3)
        x = net.add("Relu", [x], "head.relu")
        x = net.dropout(x, "head.dropout", ratio=self.dropout)
        x = net.conv(x, "head.score", channels=(inner, self.classes), kernel=1)
        _resize(net, x, "logits", self.image)
        net.output("logits", (BATCH, self.classes, *self.image))


def _resize(net: Net, x: str, name: str, sizes: tuple[int, ...]) -> str:
    """Bilinear, corner to corner, to (height, width)."""
    wanted = net.constant(f"{name}.sizes", sizes)
    mode = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    return net.add("Resize", [x, "", "", wanted], name, axes=[2, 3], **mode)
