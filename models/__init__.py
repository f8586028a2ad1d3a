"""A zoo of real networks, built as ONNX models with nothing but numpy and onnx.

>>> from recompute import models
>>> model = models.build("bert-base", batch=8, weights=False, seq=256)

`names()` lists the zoo, `info(name)` describes an entry, `build(name)` makes the model.
To add a network, add one file with a class decorated by `registry.register`.
"""

from ..support.plug_ins import import_all
from .common import InputSpec, parameters
from .registry import ZooEntry, build, info, names

__all__ = ["InputSpec", "ZooEntry", "build", "info", "names", "parameters"]

import_all(__name__)
