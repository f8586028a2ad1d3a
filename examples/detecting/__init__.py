"""Object detection on the data side: targets from boxes, boxes from outputs, scenes, COCO's files and figures."""

from .average_precision import MeanAveragePrecision
from .coco import CocoBoxes
from .decoding import Decoder, Detections, overlaps, suppress
from .scenes import SHAPES, Scenes
from .targets import Locations

__all__ = [
    "SHAPES",
    "CocoBoxes",
    "Decoder",
    "Detections",
    "Locations",
    "MeanAveragePrecision",
    "Scenes",
    "overlaps",
    "suppress",
]
