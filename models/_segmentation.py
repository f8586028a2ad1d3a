"""What the networks share that give each pixel a class."""

from dataclasses import dataclass
from typing import ClassVar

from ..errors import UsageError
from .common import BATCH, InputSpec, integers
from .registry import Family


@dataclass(frozen=True)
class Segmentation(Family):
    """x float32 [N, 3, height, width] to logits float32 [N, classes, height, width].

    `image` is (height, width), or one size for a square.
    """

    task: ClassVar[str] = "segmentation"

    image: tuple[int, ...] = (416, 608)
    classes: int = 21

    def inputs(self) -> tuple[InputSpec, ...]:
        return (InputSpec("x", "float32", (BATCH, 3, *self.image)),)

    def label(self) -> InputSpec:
        return integers("label", (BATCH, *self.image), high=self.classes)

    def need_multiple(self, of: int, why: str) -> None:
        """UsageError where a side of the image is no multiple of `of`."""
        if any(side % of for side in self.image):
            height, width = self.image
            raise UsageError(f"option 'image' must be multiples of {of} ({why}), not {height}x{width}")
