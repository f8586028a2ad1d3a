"""The moves of planners' local search (passes/planners/methods/moves.py), compiled and kept like kernels.

The functions are those that Python runs where numba is missing; two of them, which are one call of NumPy there, are
loops here.  Planners get them by `flat.compile_with` from above, as passes know no runtime.
"""

from __future__ import annotations

import ctypes
import functools
import types
from collections.abc import Callable
from typing import Any

from ...passes.planners.methods import moves, twister
from ...passes.planners.methods.flat import Arrays, Run
from .device import jit, native

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
#: problems of fewer nodes are searched by Python for less time than numba takes to compile
_WORTH_COMPILING = 128


def compiled(nodes: int) -> Callable[[Arrays], Run] | None:
    """What binds compiled moves to the arrays of a problem of so many nodes; None where Python shall make them."""
    if native.unavailable():
        return None
    kernel = _kernel()
    if not kernel.kept(_KINDS) and (nodes < _WORTH_COMPILING or jit.unavailable()):
        return None
    return _bound


_KINDS = (("int64", 1), ("float64", 1), ("int64", 2), ("int64", 1))


def _bound(arrays: Arrays) -> Run:
    """The moves on these arrays."""
    call = _kernel().call(*arrays, work=0)
    words = call.words(arrays[0])
    function = _SIGNATURE(call.address)

    def run(begin: int, stop: int) -> None:
        assert call.operands  # the arrays are there as long as this function is
        function(words.ctypes.data, begin, stop)

    return run


def _lift(alive: Any, begin: int, stop: int, size: int) -> None:
    for t in range(begin, stop):
        alive[0, t] += size
        alive[1, t] += size


def _highest(alive: Any, stop: int) -> int:
    most = 0
    for t in range(stop):
        most = max(most, alive[1, t])
    return most


@functools.cache
def _kernel() -> jit.Kernel:
    """`moves.moves`, with all functions that it calls marked for numba."""
    names: dict[str, Any] = {**vars(twister), **vars(moves)}
    functions = {n: f.__code__ for n, f in names.items() if isinstance(f, types.FunctionType)}
    functions |= {"lift": _lift.__code__, "highest": _highest.__code__}
    names |= {n: jit.inline(types.FunctionType(code, names, n)) for n, code in functions.items()}
    return jit.kernel(names["moves"].function)
