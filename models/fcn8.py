"""FCN-8s on VGG-16 (Long et al. 2014, arXiv 1411.4038).

The convolutions of VGG have torchvision's names and layouts. The first one is padded by 1, not by 100, so that the
image's sides must be multiples of 32; what scales the scores up is learned from random weights.
"""

from dataclasses import dataclass

from ._segmentation import Segmentation
from .common import BATCH, Net, scaled
from .registry import Variant, register

_STEM = 64
_BLOCKS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))


@register(Variant("fcn8", "FCN-8s on VGG-16 for segmentation", 1, 8))
@dataclass(frozen=True)
class Fcn8(Segmentation):
    """x float32 [N, 3, height, width] to logits float32 [N, classes, height, width].

    `width` is the channels of the first convolution, the others in proportion; `hidden` those of the two layers that
    were VGG's dense ones.
    """

    width: int = _STEM
    hidden: int = 4096
    dropout: float = 0.5

    def __post_init__(self) -> None:
        self.need_multiple(32, "five pools halve them")

    def checkpoints(self) -> tuple[str, ...]:
        return (*(f"block{index}.pool" for index in range(1, 6)), "fc6.relu", "fc7.relu")

    def build(self, net: Net) -> None:
        x, size, position, pools = "x", 3, 0, []
        for block, (count, full) in enumerate(_BLOCKS, start=1):
            for index in range(1, count + 1):
                channels = (size, scaled(full, self.width, _STEM))
                params = f"features.{position}"
                x = net.conv(x, f"block{block}.conv{index}", channels=channels, kernel=3, padding=1, params=params)
                x, size, position = net.add("Relu", [x], f"block{block}.relu{index}"), channels[1], position + 2
            x, position = net.max_pool(x, f"block{block}.pool", kernel=2, stride=2), position + 1
            pools.append((x, size))
        for name, kernel in (("fc6", 7), ("fc7", 1)):
            x = net.conv(x, name, channels=(size, self.hidden), kernel=kernel, padding=kernel // 2)
            x, size = net.add("Relu", [x], f"{name}.relu"), self.hidden
            x = net.dropout(x, f"{name}.dropout", ratio=self.dropout)
        self._scores(net, x, pools[3], pools[2])

    def _scores(self, net: Net, x: str, *pools: tuple[str, int]) -> None:
        """Scores at 1/32 of the size, doubled and added to those of pool 4 and of pool 3, then at full size."""
        both = (self.classes, self.classes)
        x = net.conv(x, "score_fr", channels=(self.hidden, self.classes), kernel=1)
        for index, (pool, size) in zip((4, 3), pools, strict=True):
            up = net.conv_transpose(x, f"upscore_pool{index}", channels=both, kernel=4, stride=2, bias=False)
            score = net.conv(pool, f"score_pool{index}", channels=(size, self.classes), kernel=1)
            x = net.add("Add", [up, score], f"fuse_pool{index}")
        net.conv_transpose(x, "logits", channels=both, kernel=16, stride=8, bias=False, params="upscore8")
        net.output("logits", (BATCH, self.classes, *self.image))
