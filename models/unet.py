"""U-Net (Ronneberger et al. 2015, arXiv 1505.04597): the paper's layers and widths, without normalisation."""

from dataclasses import dataclass

from ..errors import UsageError
from ._segmentation import Segmentation
from .common import BATCH, InputSpec, Net, integers
from .registry import Variant, register

_DEPTH = 4


@register(Variant("unet", "U-Net for segmentation", 1, 8))
@dataclass(frozen=True)
class UNet(Segmentation):
    """x float32 [N, channels, height, width] to logits float32 [N, classes, height, width].

    `width` is the channels of the first convolutions. `valid` leaves the convolutions unpadded and crops the skips,
    as the paper does (572x572 gives 388x388); else the image's sides are multiples of 16 and the logits have its size.
    """

    channels: int = 3
    classes: int = 2
    width: int = 64
    valid: bool = False

    def __post_init__(self) -> None:
        if not self.valid:
            self.need_multiple(1 << _DEPTH, "four pools halve them")
        elif any(_sizes(side) is None for side in self.image):
            height, width = self.image
            raise UsageError(f"option 'image': {height}x{width} does not halve four times in unpadded convolutions")

    def inputs(self) -> tuple[InputSpec, ...]:
        return (InputSpec("x", "float32", (BATCH, self.channels, *self.image)),)

    def label(self) -> InputSpec:
        return integers("label", (BATCH, *self._output()), high=self.classes)

    def checkpoints(self) -> tuple[str, ...]:
        down = [f"down{level}.out" for level in range(1, _DEPTH + 1)]
        return (*down, "middle.out", *(f"up{level}.relu1" for level in range(_DEPTH, 0, -1)))

    def _output(self) -> tuple[int, ...]:
        if not self.valid:
            return self.image
        return tuple((_sizes(side) or [0])[-1] for side in self.image)

    def build(self, net: Net) -> None:
        x, size, skips = "x", self.channels, []
        for level in range(1, _DEPTH + 1):
            width = self.width << level - 1
            x = self._double(net, x, f"down{level}", channels=(size, width))
            skips.append(x)
            x, size = net.max_pool(x, f"down{level}.pool", kernel=2, stride=2), width
        x = self._double(net, x, "middle", channels=(size, size * 2))
        for level in range(_DEPTH, 0, -1):
            width = self.width << level - 1
            up = net.conv_transpose(x, f"up{level}.deconv", channels=(width * 2, width), kernel=2, stride=2)
            skip = self._crop(net, skips[level - 1], level)
            x = net.concat([skip, up], f"up{level}.cat")
            x = self._double(net, x, f"up{level}", channels=(width * 2, width))
        net.conv(x, "logits", channels=(self.width, self.classes), kernel=1, params="classifier")
        net.output("logits", (BATCH, self.classes, *self._output()))

    def _double(self, net: Net, x: str, name: str, *, channels: tuple[int, int]) -> str:
        """Two 3x3 convolutions, a ReLU after each."""
        for index, relu in ((1, "relu1"), (2, "out")):
            padding = 0 if self.valid else 1
            x = net.conv(x, f"{name}.conv{index}", channels=channels, kernel=3, padding=padding)
            x, channels = net.add("Relu", [x], f"{name}.{relu}"), channels[1:] * 2
        return x

    def _crop(self, net: Net, x: str, level: int) -> str:
        """The middle of a skip, as large as what comes up."""
        if not self.valid:
            return x
        starts, ends = [], []
        for side in self.image:
            sizes = _sizes(side) or []
            have, want = sizes[level - 1], 2 * sizes[2 * _DEPTH - level]
            starts.append((have - want) // 2)
            ends.append((have - want) // 2 + want)
        name = f"up{level}.crop"
        bounds = [net.constant(f"{name}.{key}", at) for key, at in (("starts", starts), ("ends", ends))]
        return net.add("Slice", [x, *bounds, net.constant("crop.axes", [2, 3])], name)


def _sizes(side: int) -> list[int] | None:
    """The sides of an image after each level down, the middle and each level up of unpadded convolutions; or None."""
    sizes = []
    for _ in range(_DEPTH):
        sizes.append(side - 4)
        if side < 6 or sizes[-1] % 2:
            return None
        side = sizes[-1] // 2
    sizes.append(side - 4)
    for _ in range(_DEPTH):
        sizes.append(sizes[-1] * 2 - 4)
    return sizes if min(sizes) > 0 else None
