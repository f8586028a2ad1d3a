"""Data for training: datasets of arrays, files and other libraries' objects, fitted to a program's inputs."""

from __future__ import annotations

from .batches import check_npz, npz_batches, synthetic_batch
from .combining import encoded, mapped, select, split, subset
from .dataset import Dataset, Stream, dataset
from .fitting import check_values, fitted
from .images import ImageFolder
from .limits import Limit, limits_of
from .padding import MaskOf, Pad
from .pixels import Pixels
from .text import Tokenized

__all__ = [
    "Dataset",
    "ImageFolder",
    "Limit",
    "MaskOf",
    "Pad",
    "Pixels",
    "Stream",
    "Tokenized",
    "check_npz",
    "check_values",
    "dataset",
    "encoded",
    "fitted",
    "limits_of",
    "mapped",
    "npz_batches",
    "select",
    "split",
    "subset",
    "synthetic_batch",
]
