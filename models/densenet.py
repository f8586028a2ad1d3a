"""DenseNet-BC (Huang et al. 2016, arXiv 1608.06993).

Parameters have torchvision's names and layouts, so that its weights can be copied in by name. Each layer reads the
maps of all layers before it, side by side: keeping the narrow maps and rebuilding the wide ones is what recomputation
does best here.
"""

from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .common import Net
from .registry import Classifier, Variant, register

_BOTTLENECK = 4
_BLOCKS = {121: (6, 12, 24, 16), 161: (6, 12, 36, 24), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}
_TABLE = {121: 32, 161: 16, 169: 32, 201: 16}


def _variant(depth: int) -> Variant:
    options: dict[str, Any] = {"blocks": _BLOCKS[depth]}
    if depth == 161:
        options.update(growth=48, width=96)
    return Variant(f"densenet{depth}", f"DenseNet-{depth} for images", 8, _TABLE[depth], options)


@register(*map(_variant, _BLOCKS))
@dataclass(frozen=True)
class DenseNet(Classifier):
    """x float32 [N, 3, image, image] to logits float32 [N, classes].

    `blocks` is the number of layers in each dense block, `growth` the channels that a layer adds, `width` those of
    the stem.
    """

    blocks: tuple[int, ...] = (6, 12, 24, 16)
    growth: int = 32
    width: int = 64
    image: int = 224
    classes: int = 1000

    def __post_init__(self) -> None:
        if not self.blocks or min(self.blocks) < 1:
            raise UsageError(f"option 'blocks' must be sizes of at least 1, not {self.blocks}")
        if self.image < 4 << len(self.blocks) - 1:
            raise UsageError(f"option 'image' ({self.image}) is too small for {len(self.blocks)} blocks")

    def checkpoints(self) -> tuple[str, ...]:
        names = []
        for block, count in enumerate(self.blocks, start=1):
            names.append("stem.pool" if block == 1 else f"transition{block - 1}.pool")
            names += [f"block{block}.layer{layer}.out" for layer in range(1, count + 1)]
        return tuple(names)

    def build(self, net: Net) -> None:
        window: dict[str, Any] = {"kernel": 7, "stride": 2, "padding": 3}
        x = net.conv("x", "stem.conv", channels=(3, self.width), bias=False, params="features.conv0", **window)
        x = _norm_relu(net, x, "stem.{}", channels=self.width, params="features.norm0")
        x = net.max_pool(x, "stem.pool", kernel=3, stride=2, padding=1)
        channels = self.width
        for block, count in enumerate(self.blocks, start=1):
            x = self._block(net, x, block, channels)
            channels += count * self.growth
            if block < len(self.blocks):
                x = _transition(net, x, block, channels)
                channels //= 2
        x = _norm_relu(net, x, "final.{}", channels=channels, params="features.norm5")
        net.classifier(x, sizes=(channels, self.classes), params="classifier")

    def _block(self, net: Net, x: str, block: int, channels: int) -> str:
        """A layer: all maps so far, norm, 1x1 to 4 growths, norm, 3x3 to one growth."""
        maps, inner = [x], _BOTTLENECK * self.growth
        for layer in range(1, self.blocks[block - 1] + 1):
            name, params = f"block{block}.layer{layer}", f"features.denseblock{block}.denselayer{layer}"
            y = net.concat(maps, f"{name}.cat") if len(maps) > 1 else x
            y = _norm_relu(net, y, name + ".{}1", channels=channels, params=f"{params}.norm1")
            sizes, where = (channels, inner), f"{params}.conv1"
            y = net.conv(y, f"{name}.conv1", channels=sizes, kernel=1, bias=False, params=where)
            y = _norm_relu(net, y, name + ".{}2", channels=inner, params=f"{params}.norm2")
            sizes, where = (inner, self.growth), f"{params}.conv2"
            maps.append(net.conv(y, f"{name}.out", channels=sizes, kernel=3, padding=1, bias=False, params=where))
            channels += self.growth
        return net.concat(maps, f"block{block}.out")


def _norm_relu(net: Net, x: str, name: str, *, channels: int, params: str) -> str:
    """`name` such as "stem.{}" becomes stem.bn and stem.relu."""
    x = net.batch_norm(x, name.format("bn"), channels=channels, params=params)
    return net.add("Relu", [x], name.format("relu"))


def _transition(net: Net, x: str, index: int, channels: int) -> str:
    """Half the channels, half the size."""
    name, params = f"transition{index}", f"features.transition{index}"
    x = _norm_relu(net, x, name + ".{}", channels=channels, params=f"{params}.norm")
    sizes, where = (channels, channels // 2), f"{params}.conv"
    x = net.conv(x, f"{name}.conv", channels=sizes, kernel=1, bias=False, params=where)
    return net.average_pool(x, f"{name}.pool", kernel=2, stride=2)
