"""Searches in plain functions over arrays (planner_moves.py, packing_search.py), compiled and kept like kernels."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Mapping
from typing import Any

from ...language.types import Array
from ..shared.texts import inline
from .device import jit

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def kernel(name: str, module: Mapping[str, Any], instead: Mapping[str, types.CodeType] | None = None) -> jit.Kernel:
    """The function `name` of a module's names, with all functions beside it marked for numba; `instead`: others."""
    names = dict(module)
    functions = {n: f.__code__ for n, f in names.items() if isinstance(f, types.FunctionType)} | dict(instead or {})
    names |= {n: inline(types.FunctionType(code, names, n)) for n, code in functions.items()}
    return jit.kernel(names[name].function, here=True)


def bound(found: jit.Kernel, *arrays: Array) -> Callable[[int, int], None]:
    """A kernel on these arrays, as a function of the steps from and to which it runs."""
    call = found.call(*arrays, work=0)
    words = call.words(arrays[0])
    function = _SIGNATURE(call.address)

    def run(begin: int, stop: int) -> None:
        assert call.operands  # the arrays are there as long as this function is
        function(words.ctypes.data, begin, stop)

    return run
