"""The moves of planners' local search (passes/planners/methods/moves.py), compiled and kept like kernels.

The functions are those that Python runs where numba is missing.  Five of them, which work on all slots by one call of
NumPy there, work on blocks of slots here: a long life is added to whole blocks, and the peak is the highest of them.
Planners get them by `flat.compile_with` from above, as passes know no runtime.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...passes.planners.methods import layout, moves, twister
from ...passes.planners.methods.flat import Arrays, Run
from ...passes.planners.methods.layout import ENTER, HIGH, LIFT, MOST
from . import searches
from .device import jit, native

#: problems of fewer nodes are searched by Python for less time than numba takes to compile
_WORTH_COMPILING = 128
#: slots in a block
_BLOCK = 128


def compiled(nodes: int) -> Callable[[Arrays], Run] | None:
    """The function that binds compiled moves to the arrays of a problem of so many nodes; None: use Python's."""
    if native.unavailable():
        return None
    kernel = _kernel()
    if not kernel.kept(_KINDS) and (nodes < _WORTH_COMPILING or jit.unavailable()):
        return None
    return _bound


_KINDS = (("int64", 1), ("float64", 1), ("int64", 2), ("int64", 1))


def _bound(arrays: Arrays) -> Run:
    """The moves on these arrays."""
    return searches.bound(_kernel(), *arrays)


def _lift(alive: Any, begin: int, stop: int, size: int) -> None:
    while begin < stop:
        b = begin // _BLOCK
        end = min(stop, (b + 1) * _BLOCK)
        if end - begin == _BLOCK:
            alive[LIFT, b] += size
            alive[HIGH, b] += size
        else:
            for t in range(begin, end):
                alive[ENTER, t] += size
                alive[MOST, t] += size
            _look_again(alive, b)
        begin = end


def _look_again(alive: Any, b: int) -> None:
    most, stop = 0, min((b + 1) * _BLOCK, alive.shape[1] - 1)
    for t in range(b * _BLOCK, stop):
        most = max(most, alive[MOST, t] + alive[LIFT, b])
    alive[HIGH, b] = most


def _entered(alive: Any, t: int) -> int:
    return alive[ENTER, t] + alive[LIFT, t // _BLOCK]


def _set_most(alive: Any, t: int, most: int) -> None:
    alive[MOST, t] = most - alive[LIFT, t // _BLOCK]
    _look_again(alive, t // _BLOCK)


def _highest(alive: Any, stop: int) -> int:
    most = 0
    for b in range((stop + _BLOCK - 1) // _BLOCK):
        most = max(most, alive[HIGH, b])
    return most


def _settle(alive: Any) -> None:
    for b in range((alive.shape[1] + _BLOCK - 1) // _BLOCK):
        added = alive[LIFT, b]
        if added:
            for t in range(b * _BLOCK, min((b + 1) * _BLOCK, alive.shape[1])):
                alive[ENTER, t] += added
                alive[MOST, t] += added
            alive[LIFT, b] = 0


#: replacements of the functions of `alive.py`, of the same names without the underscore
_ON_BLOCKS = (_lift, _entered, _set_most, _highest, _settle)


@functools.cache
def _kernel() -> jit.Kernel:
    """`moves.moves`, with all functions that it calls marked for numba."""
    names: dict[str, Any] = {**vars(layout), **vars(twister), **vars(moves), "_BLOCK": _BLOCK}
    instead = {f.__name__[1:]: f.__code__ for f in _ON_BLOCKS} | {"_look_again": _look_again.__code__}
    return searches.kernel("moves", names, instead)
