"""The searched networks for CIFAR-10: NASNet-A (Zoph et al. 2017, arXiv 1707.07012), AmoebaNet-A (Real et al. 2018,
arXiv 1802.01548) and DARTS, second order (Liu et al. 2018, arXiv 1806.09055).

All three in the form in which the DARTS paper compares them: 20 cells, the first with 36 channels, each cell reading
the two before it; the channels double and the size halves at a third and two thirds of the depth. The auxiliary head
and the dropping of whole paths are left out.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..errors import UsageError
from ._cell_parts import Parts
from .common import Net
from .registry import Classifier, Variant, register

_STEM_MULTIPLIER = 3


@dataclass(frozen=True)
class _Cell:
    """A searched cell. States 0 and 1 are the two cells before; each pair of edges makes the next by adding up.

    `edges` are (operation, state) pairs written as words such as "sep3:1"; `gives` are the states side by side in
    the result.
    """

    edges: str
    gives: tuple[int, ...]

    def pairs(self) -> list[list[tuple[str, int]]]:
        """The two (operation, state) of every new state."""
        words = [word.partition(":") for word in self.edges.split()]
        edges = [(kind, int(state)) for kind, _, state in words]
        return [edges[at : at + 2] for at in range(0, len(edges), 2)]

    def build(self, parts: Parts, states: list[str], name: str, width: int, *, halves: bool) -> str:
        """The result, on the first two states; `halves`: the size."""
        for number, pair in enumerate(self.pairs(), start=2):
            sides = []
            for side, (kind, state) in zip("ab", pair, strict=True):
                stride = 2 if halves and state < 2 else 1
                sides.append(parts.edge(kind, states[state], f"{name}.state{number}.{side}", width, stride))
            states.append(parts.net.add("Add", sides, f"{name}.state{number}"))
        return parts.net.concat([states[number] for number in self.gives], f"{name}.out")


_NASNET = (
    _Cell("sep5:1 sep3:0 sep5:0 sep3:0 avg:1 skip:0 avg:0 avg:0 sep3:1 skip:1", (2, 3, 4, 5, 6)),
    _Cell("sep5:1 sep7:0 max:1 sep7:0 avg:1 sep5:0 skip:3 avg:2 sep3:2 max:1", (4, 5, 6)),
)
_AMOEBANET = (
    _Cell("avg:0 max:1 sep3:0 sep5:2 sep3:0 avg:3 sep3:1 skip:1 skip:0 avg:1", (4, 5, 6)),
    _Cell("avg:0 sep3:1 max:0 sep7:2 sep7:0 avg:1 max:0 max:1 rect7:0 sep3:5", (3, 4, 6)),
)
_DARTS = (
    _Cell("sep3:0 sep3:1 sep3:0 sep3:1 sep3:1 skip:0 skip:0 dil3:2", (2, 3, 4, 5)),
    _Cell("max:0 max:1 skip:2 max:1 max:0 skip:2 skip:2 max:1", (2, 3, 4, 5)),
)


@dataclass(frozen=True)
class _Searched(Classifier):
    """x float32 [N, 3, image, image] to logits float32 [N, classes].

    `cells` is the number of cells, `width` the channels of the first one's states; `image` a multiple of 4.
    """

    normal: ClassVar[_Cell]
    reduction: ClassVar[_Cell]

    cells: int = 20
    width: int = 36
    image: int = 32
    classes: int = 10

    def __post_init__(self) -> None:
        if self.cells < 3:
            raise UsageError(f"option 'cells' must be at least 3 (two of them halve the size), not {self.cells}")
        if self.image % 4:
            raise UsageError(f"option 'image' must be a multiple of 4 (it is halved twice), not {self.image}")

    def checkpoints(self) -> tuple[str, ...]:
        return ("stem.out", *(f"cell{index}.out" for index in range(self.cells)))

    def build(self, net: Net) -> None:
        parts, width = Parts(net), self.width
        size = width * _STEM_MULTIPLIER
        x = net.conv("x", "stem.conv", channels=(3, size), kernel=3, padding=1, bias=False, params="stem.0")
        x = net.batch_norm(x, "stem.out", channels=size, params="stem.1")
        states = [(x, size), (x, size)]
        halved = False
        for index in range(self.cells):
            halves = index in (self.cells // 3, 2 * self.cells // 3)
            width = width * 2 if halves else width
            cell = self.reduction if halves else self.normal
            name, ((x, size), (y, last)) = f"cell{index}", states
            first = (parts.halve if halved else parts.project)(x, f"{name}.pre0", channels=(size, width))
            pair = [first, parts.project(y, f"{name}.pre1", channels=(last, width))]
            out = cell.build(parts, pair, name, width, halves=halves)
            states, halved = [states[1], (out, width * len(cell.gives))], halves
        x, size = states[1]
        net.classifier(x, sizes=(size, self.classes), params="classifier")


@register(Variant("nasnet", "NASNet-A for 32x32 images (CIFAR-10)", 16, 64))
class NasNet(_Searched):
    """NASNet-A's cells."""

    normal, reduction = _NASNET


@register(Variant("amoebanet", "AmoebaNet-A for 32x32 images (CIFAR-10)", 16, 64))
class AmoebaNet(_Searched):
    """AmoebaNet-A's cells."""

    normal, reduction = _AMOEBANET


@register(Variant("darts", "DARTS (second order) for 32x32 images (CIFAR-10)", 16, 64))
class Darts(_Searched):
    """The cells of DARTS V2."""

    normal, reduction = _DARTS
