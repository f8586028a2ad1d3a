"""The exact packer's search (passes/memory/branching.py), compiled and kept like kernels.

The functions are those that Python runs where numba is missing.  The packer gets this by `packing_exact.compile_with`
from above, as passes know no runtime.
"""

from __future__ import annotations

import ctypes
import functools
import types
from typing import Any

from ...language.types import Array
from ...passes.memory import branching
from ...passes.memory.packing_exact import Search
from .device import jit, native

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def compiled(*arrays: Array) -> Search | None:
    """The search, compiled, on the arrays of `branching.search`; None where Python does it."""
    kinds = tuple((x.dtype.name, x.ndim) for x in arrays)
    if native.unavailable() or (not _kernel().kept(kinds) and jit.unavailable()):
        return None
    call = _kernel().call(*arrays, work=0)
    words = call.words(arrays[0])
    function = _SIGNATURE(call.address)

    def run(begin: int, stop: int) -> None:
        assert call.operands  # the arrays are there as long as this function is
        function(words.ctypes.data, begin, stop)

    return run


@functools.cache
def _kernel() -> jit.Kernel:
    """`branching.search`, with all functions that it calls marked for numba."""
    names: dict[str, Any] = dict(vars(branching))
    functions = {n: f.__code__ for n, f in names.items() if isinstance(f, types.FunctionType)}
    names |= {n: jit.inline(types.FunctionType(code, names, n)) for n, code in functions.items()}
    return jit.kernel(names["search"].function)
