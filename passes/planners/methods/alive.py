"""Bytes alive at the slots of a schedule, for `moves.py`: one call of NumPy each.

Compiled, all of them work on blocks of slots: see runtime/cpu/planner_moves.py.
"""

from __future__ import annotations

from ....language.types import Array
from .layout import ENTER, LIFT, MOST


def lift(alive: Array, begin: int, stop: int, size: int) -> None:
    """Adds bytes to what is alive at slots begin to stop."""
    alive[:LIFT, begin:stop] += size


def entered(alive: Array, t: int) -> int:
    """The bytes alive at the entry of slot t."""
    return int(alive[ENTER, t])


def set_most(alive: Array, t: int, most: int) -> None:
    """Sets the most bytes alive within slot t."""
    alive[MOST, t] = most


def highest(alive: Array, stop: int) -> int:
    """The most bytes alive within slots 0 to stop, which are all."""
    return int(alive[MOST, :stop].max(initial=0))


def settle(alive: Array) -> None:
    """Adds to each slot what was added to its block."""
