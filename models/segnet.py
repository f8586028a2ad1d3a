"""SegNet (Badrinarayanan et al. 2015, arXiv 1511.00561): VGG-16 with norms, then the same upside down.

The decoder puts each value back where the encoder's pool took it from (MaxUnpool).
"""

from dataclasses import dataclass

from ._segmentation import Segmentation
from .common import BATCH, Net, scaled
from .registry import Variant, register

_STEM = 64
_BLOCKS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))


@register(Variant("segnet", "SegNet for segmentation", 1, 8))
@dataclass(frozen=True)
class SegNet(Segmentation):
    """x float32 [N, 3, height, width] to logits float32 [N, classes, height, width].

    `width` is the channels of the first convolution, the others in proportion. The default is CamVid's 11 classes.
    """

    classes: int = 11
    width: int = _STEM

    def __post_init__(self) -> None:
        self.need_multiple(32, "five pools halve them")

    def checkpoints(self) -> tuple[str, ...]:
        return (*(f"down{level}.pool" for level in range(1, 6)), *(f"up{level}.out" for level in range(5, 1, -1)))

    def build(self, net: Net) -> None:
        x, size, indices = "x", 3, []
        for level, (count, full) in enumerate(_BLOCKS, start=1):
            for index in range(1, count + 1):
                width = scaled(full, self.width, _STEM)
                x = _layer(net, x, f"down{level}", index, channels=(size, width), last=False)
                size = width
            name = f"down{level}.pool"
            window = {"kernel_shape": [2, 2], "strides": [2, 2]}
            x, pooled = net.add_many("MaxPool", [x], [name, f"{name}.indices"], name=name, **window)
            indices.append(pooled)
        for level in range(5, 0, -1):
            window = {"kernel_shape": [2, 2], "strides": [2, 2]}
            x = net.add("MaxUnpool", [x, indices[level - 1]], f"up{level}.unpool", **window)
            x, size = self._up(net, x, level, size)
        net.conv(x, "logits", channels=(size, self.classes), kernel=3, padding=1, params="up1.conv1")
        net.output("logits", (BATCH, self.classes, *self.image))

    def _up(self, net: Net, x: str, level: int, size: int) -> tuple[str, int]:
        """The layers of a block backwards; the last one has the channels of the level above."""
        count = _BLOCKS[level - 1][0]
        above = scaled(_BLOCKS[level - 2][1], self.width, _STEM)
        for index in range(count, 0, -1):
            if level == 1 and index == 1:
                break  # the logits
            width = above if index == 1 else size
            x = _layer(net, x, f"up{level}", index, channels=(size, width), last=index == 1)
            size = width
        return x, size


def _layer(net: Net, x: str, name: str, index: int, *, channels: tuple[int, int], last: bool) -> str:
    """A 3x3 convolution, norm and ReLU."""
    x = net.conv(x, f"{name}.conv{index}", channels=channels, kernel=3, padding=1)
    x = net.batch_norm(x, f"{name}.bn{index}", channels=channels[1])
    return net.add("Relu", [x], f"{name}.out" if last else f"{name}.relu{index}")
