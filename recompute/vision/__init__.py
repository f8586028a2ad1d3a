"""Object detection on the data side, in NumPy: targets from boxes, boxes from outputs, scenes and COCO's files."""

from .boxes import Decoder, suppress
from .coco import CocoBoxes
from .scenes import SHAPES, Scenes
from .targets import Locations

__all__ = ["SHAPES", "CocoBoxes", "Decoder", "Locations", "Scenes", "suppress"]
