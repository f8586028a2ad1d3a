"""Trained values, written back to the module."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..language.program import Program
from .call import tensors_of

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["write_back"]


def write_back(program: Program, module: Module) -> int:
    """Copies trained parameters, and buffers such as running statistics, into the module; returns how many tensors.

    Tensors keep their device and element type.  UsageError where a shape differs, or nothing of the program is the
    module's.
    """
    tensors = tensors_of(module)
    arrays = {}
    for name, tensor in tensors.items():
        alias = str(program.aliases.get(name, name))
        if alias in program.data:
            arrays[name] = np.asarray(program.data[alias])
            if tuple(arrays[name].shape) != tuple(tensor.shape):
                raise UsageError(
                    f"'{name}' has shape {list(tensor.shape)} in the module, {list(arrays[name].shape)} in the "
                    "program; nothing was written"
                )
    if not arrays:
        raise UsageError("no parameter or buffer of the module is in the program: was it made by from_torch?")
    for name, array in arrays.items():
        if _is(tensors[name], array):
            continue
        if array.dtype.kind not in "biuf" or array.dtype.itemsize == 2:  # bfloat16 is not NumPy's own
            array = array.astype(np.float32)
        tensors[name].data.copy_(tensors[name].new_tensor(array, device="cpu"))
    _count_batches(program, tensors)
    return len(arrays)


def _is(tensor: Any, array: np.ndarray) -> bool:
    """Whether a tensor is the array itself (`from_torch(share=True)`)."""
    return hasattr(tensor, "data_ptr") and tensor.is_contiguous() and tensor.data_ptr() == array.ctypes.data


#: steps of a program that are counted in modules already
_COUNTED: weakref.WeakKeyDictionary[Program, int] = weakref.WeakKeyDictionary()


def _count_batches(program: Program, tensors: Mapping[str, Any]) -> None:
    """Adds the steps since the last time to `num_batches_tracked` of the normalisations that follow the batches."""
    if "step" not in program.data:
        return
    steps = int(program.data["step"])
    new = steps - _COUNTED.get(program, 0)
    _COUNTED[program] = steps
    updated = Counter(v.name for op in program.logical.operators if op.op.updates for v in op.writes())
    for name, tensor in tensors.items():
        mean = name.removesuffix("num_batches_tracked") + "running_mean"
        if name.endswith("num_batches_tracked"):
            tensor.data.add_(new * updated[program.aliases.get(mean, mean)])
