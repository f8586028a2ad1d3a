"""Inception v3 (Szegedy et al. 2015, arXiv 1512.00567), without the auxiliary head.

Parameters have torchvision's names and layouts, so that its weights can be copied in by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .common import Net, scaled
from .googlenet import conv_bn
from .registry import Classifier, Variant, register

_STEM = 32
_LEAST = 75


@register(Variant("inception_v3", "Inception v3 for images", 8, 32))
@dataclass(frozen=True)
class InceptionV3(Classifier):
    """x float32 [N, 3, image, image] to logits float32 [N, classes]; `width` is the channels of the stem."""

    width: int = _STEM
    image: int = 299
    classes: int = 1000
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if self.image < _LEAST:
            raise UsageError(f"option 'image' must be at least {_LEAST} (the stem is not padded), not {self.image}")

    def checkpoints(self) -> tuple[str, ...]:
        return ("pool1", "pool2", *(f"Mixed_{name}.out" for name, _, _ in _MODULES))

    def build(self, net: Net) -> None:
        branches = _Branches(net, self.width)
        x, size = branches.stem()
        for name, module, option in _MODULES:
            branches.start(x, size, f"Mixed_{name}")
            x, size = module(branches, option)
        net.classifier(x, sizes=(size, self.classes), params="fc", dropout=self.dropout)


class _Branches:
    """The branches of one module: what they read, and what they give."""

    def __init__(self, net: Net, width: int) -> None:
        self.net, self.width = net, width

    def channels(self, full: int) -> int:
        """What a layer with `full` channels has at this width."""
        return scaled(full, self.width, _STEM)

    def stem(self) -> tuple[str, int]:
        """From the image to 192 channels at an eighth of its size."""
        net, x, size = self.net, "x", 3
        layers = (
            ("1a_3x3", 32, 3, 2, 0), ("2a_3x3", 32, 3, 1, 0), ("2b_3x3", 64, 3, 1, 1),
            ("3b_1x1", 80, 1, 1, 0), ("4a_3x3", 192, 3, 1, 0),
        )  # fmt: skip
        for name, full, kernel, stride, padding in layers:
            channels = (size, self.channels(full))
            window: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding}
            x, size = conv_bn(net, x, f"Conv2d_{name}", channels=channels, **window), channels[1]
            if name in ("2b_3x3", "4a_3x3"):
                x = net.max_pool(x, "pool1" if name == "2b_3x3" else "pool2", kernel=3, stride=2)
        return x, size

    def start(self, x: str, size: int, name: str) -> None:
        """A new module on x, which has `size` channels."""
        self.x, self.size, self.name = x, size, name
        self.found: list[tuple[str, int]] = []

    def conv(self, given: tuple[str, int], branch: str, full: int, kernel: Any = 1, stride: int = 1) -> tuple[str, int]:
        """A convolution, norm and ReLU; padded to keep the size unless it has a stride."""
        (x, size), out = given, self.channels(full)
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if stride > 1 else (sides[0] // 2, sides[1] // 2)
        name = f"{self.name}.{branch}"
        window: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding}
        return conv_bn(self.net, x, name, channels=(size, out), **window), out

    def chain(self, *steps: tuple[Any, ...]) -> tuple[str, int]:
        """Convolutions one behind the other, from x; each (branch, channels, kernel, stride)."""
        at = (self.x, self.size)
        for step in steps:
            at = self.conv(at, *step)
        return at

    def branch(self, *steps: tuple[Any, ...]) -> None:
        """A chain that the module gives."""
        self.found.append(self.chain(*steps))

    def pooled(self, full: int) -> None:
        """A branch behind a 3x3 average."""
        x = self.net.average_pool(self.x, f"{self.name}.pool", kernel=3, stride=1, padding=1, include_pad=True)
        self.found.append(self.conv((x, self.size), "branch_pool", full))

    def shrunk(self) -> None:
        """A branch that is the largest of 3x3, at half the size."""
        self.found.append((self.net.max_pool(self.x, f"{self.name}.pool", kernel=3, stride=2), self.size))

    def fork(self, given: tuple[str, int], branch: str, full: int) -> None:
        """1x3 and 3x1 side by side."""
        self.found.append(self.conv(given, f"{branch}a", full, (1, 3)))
        self.found.append(self.conv(given, f"{branch}b", full, (3, 1)))

    def join(self) -> tuple[str, int]:
        """All branches side by side."""
        out = self.net.concat([x for x, _ in self.found], f"{self.name}.out")
        return out, sum(size for _, size in self.found)


def _module_a(m: _Branches, behind: int) -> tuple[str, int]:
    """35x35: 1x1, 5x5, two 3x3, a pool with `behind` channels."""
    m.branch(("branch1x1", 64))
    m.branch(("branch5x5_1", 48), ("branch5x5_2", 64, 5))
    m.branch(("branch3x3dbl_1", 64), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3))
    m.pooled(behind)
    return m.join()


def _module_b(m: _Branches, _: int) -> tuple[str, int]:
    """35x35 to 17x17."""
    m.branch(("branch3x3", 384, 3, 2))
    m.branch(("branch3x3dbl_1", 64), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3, 2))
    m.shrunk()
    return m.join()


def _module_c(m: _Branches, inner: int) -> tuple[str, int]:
    """17x17: 7x7 as 1x7 and 7x1, once and twice, with `inner` channels between."""
    wide, tall = (1, 7), (7, 1)
    m.branch(("branch1x1", 192))
    m.branch(("branch7x7_1", inner), ("branch7x7_2", inner, wide), ("branch7x7_3", 192, tall))
    m.branch(
        ("branch7x7dbl_1", inner),
        ("branch7x7dbl_2", inner, tall),
        ("branch7x7dbl_3", inner, wide),
        ("branch7x7dbl_4", inner, tall),
        ("branch7x7dbl_5", 192, wide),
    )
    m.pooled(192)
    return m.join()


def _module_d(m: _Branches, _: int) -> tuple[str, int]:
    """17x17 to 8x8."""
    m.branch(("branch3x3_1", 192), ("branch3x3_2", 320, 3, 2))
    m.branch(
        ("branch7x7x3_1", 192),
        ("branch7x7x3_2", 192, (1, 7)),
        ("branch7x7x3_3", 192, (7, 1)),
        ("branch7x7x3_4", 192, 3, 2),
    )
    m.shrunk()
    return m.join()


def _module_e(m: _Branches, _: int) -> tuple[str, int]:
    """8x8: branches that fork."""
    m.branch(("branch1x1", 320))
    m.fork(m.chain(("branch3x3_1", 384)), "branch3x3_2", 384)
    m.fork(m.chain(("branch3x3dbl_1", 448), ("branch3x3dbl_2", 384, 3)), "branch3x3dbl_3", 384)
    m.pooled(192)
    return m.join()


_MODULES: tuple[tuple[str, Callable[[_Branches, int], tuple[str, int]], int], ...] = (
    ("5b", _module_a, 32),
    ("5c", _module_a, 64),
    ("5d", _module_a, 64),
    ("6a", _module_b, 0),
    ("6b", _module_c, 128),
    ("6c", _module_c, 160),
    ("6d", _module_c, 160),
    ("6e", _module_c, 192),
    ("7a", _module_d, 0),
    ("7b", _module_e, 0),
    ("7c", _module_e, 0),
)
