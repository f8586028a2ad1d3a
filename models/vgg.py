"""VGG (Simonyan and Zisserman 2014, arXiv 1409.1556), plain and with batch normalisation.

Parameters have torchvision's names and layouts, so that its weights can be copied in by name.
"""

from dataclasses import dataclass

from ..errors import UsageError
from .common import BATCH, Net, glorot_uniform, he_uniform
from .registry import Classifier, Variant, register

_CHANNELS = (64, 128, 256, 512, 512)
_BLOCKS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def _variants(*, batch_norm: bool) -> list[Variant]:
    suffix, words = ("_bn", " with batch normalization") if batch_norm else ("", "")
    return [
        Variant(
            f"vgg{depth}{suffix}", f"VGG-{depth}{words} for images", 4, 32, {"blocks": blocks, "batch_norm": batch_norm}
        )
        for depth, blocks in _BLOCKS.items()
    ]


@register(*_variants(batch_norm=False), *_variants(batch_norm=True))
@dataclass(frozen=True)
class Vgg(Classifier):
    """x float32 [N, 3, image, image] to logits float32 [N, classes].

    `blocks` is the number of convolutions before each of the five pools; `image` a multiple of 32.
    """

    blocks: tuple[int, ...] = (1, 1, 2, 2, 2)
    batch_norm: bool = False
    image: int = 224
    classes: int = 1000
    hidden: int = 4096
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if len(self.blocks) != len(_CHANNELS) or min(self.blocks) < 1:
            raise UsageError(f"option 'blocks' must be five sizes of at least 1, not {self.blocks}")
        if self.image % 32:
            raise UsageError(f"option 'image' must be a multiple of 32 (five pools halve it), not {self.image}")

    def checkpoints(self) -> tuple[str, ...]:
        return tuple(f"block{index}.pool" for index in range(1, len(_CHANNELS) + 1))

    def build(self, net: Net) -> None:
        x = self._features(net, "x")
        x = net.add("Flatten", [x], "flat", axis=1)
        size = _CHANNELS[-1] * (self.image // 32) ** 2
        # The numbers are the positions in torchvision's Sequential, where ReLU and Dropout count too.
        for index, position in ((1, 0), (2, 3)):
            x = net.gemm(
                x,
                f"classifier.fc{index}",
                sizes=(size, self.hidden),
                init=he_uniform(size),
                params=f"classifier.{position}",
            )
            x = net.add("Relu", [x], f"classifier.relu{index}")
            x = net.dropout(x, f"classifier.dropout{index}", ratio=self.dropout)
            size = self.hidden
        init = glorot_uniform(size, self.classes)
        net.gemm(x, "logits", sizes=(size, self.classes), init=init, params="classifier.6")
        net.output("logits", (BATCH, self.classes))

    def _features(self, net: Net, x: str) -> str:
        position, size = 0, 3
        stride = 3 if self.batch_norm else 2
        for block, (count, channels) in enumerate(zip(self.blocks, _CHANNELS, strict=True), start=1):
            for index in range(1, count + 1):
                x = self._conv(net, x, f"block{block}", index, channels=(size, channels), position=position)
                position, size = position + stride, channels
            x = net.max_pool(x, f"block{block}.pool", kernel=2, stride=2)
            position += 1
        return x

    def _conv(self, net: Net, x: str, block: str, index: int, *, channels: tuple[int, int], position: int) -> str:
        params = f"features.{position}"
        x = net.conv(x, f"{block}.conv{index}", channels=channels, kernel=3, padding=1, params=params)
        if self.batch_norm:
            params = f"features.{position + 1}"
            x = net.batch_norm(x, f"{block}.bn{index}", channels=channels[1], params=params)
        return net.add("Relu", [x], f"{block}.relu{index}")
