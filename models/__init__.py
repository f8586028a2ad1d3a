"""A zoo of real networks, built as ONNX models with nothing but numpy and onnx.

>>> from recompute import models
>>> model = models.build("bert-base", batch=8, weights=False, seq=256)

`names()` lists the zoo, `info(name)` describes an entry, `build(name)` makes the model.
To add a network, add one file with a class decorated by `registry.register`.
"""

from importlib import import_module
from pkgutil import iter_modules

from .common import InputSpec, parameters
from .registry import ZooEntry, build, info, names

__all__ = ["InputSpec", "ZooEntry", "build", "info", "names", "parameters"]

for _module in iter_modules(__path__):
    if not _module.name.startswith("_"):
        import_module(f"{__name__}.{_module.name}")
del _module
