"""The exact packer's search (passes/memory/branching.py), compiled and kept like kernels.

The functions are those that Python runs where numba is missing.  The packer gets this by `packing_exact.compile_with`
from above, as passes know no runtime.
"""

from __future__ import annotations

import functools

from ...language.types import Array
from ...passes.memory import branching
from ...passes.memory.packing_exact import Search
from . import searches
from .device import jit, native


def compiled(*arrays: Array) -> Search | None:
    """The search, compiled, on the arrays of `branching.search`; None where Python does it."""
    kinds = tuple((x.dtype.name, x.ndim) for x in arrays)
    if native.unavailable() or (not _kernel().kept(kinds) and jit.unavailable()):
        return None
    return searches.bound(_kernel(), *arrays)


@functools.cache
def _kernel() -> jit.Kernel:
    """`branching.search`, with all functions that it calls marked for numba."""
    return searches.kernel("search", vars(branching))
