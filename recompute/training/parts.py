"""What a rank has of parameters and state that are divided among ranks (ZeRO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..language.ir import Value
from ..language.program import Program
from ..language.types import TensorType


def stored(program: Program) -> tuple[Value, ...]:
    """Parameters, buffers and state, as this process has them."""
    b = program.block
    return (*b.parameters, *b.buffers, *b.state)


@dataclass(frozen=True)
class Part:
    """What a rank has of a value that is divided among ranks (ZeRO): `count` of its elements, from `low` on.

    Zeros may follow them.  `whole`: the value's type where one process has all of it.
    """

    whole: TensorType
    low: int
    count: int

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The whole value from what all ranks have, in their order."""
        return np.concatenate(parts)[: self.whole.size].reshape(self.whole.shape)


def parts_of(program: Program) -> dict[str, Part]:
    """The parameters and state of which this rank has a part; the rest is the same on all ranks."""
    if program.division is None:
        return {}
    owners = sorted(program.sharded, key=len, reverse=True)
    own = {v.name: v.shape for v in program.block.parameters if v.name in program.sharded}
    found = {}
    for v in (*program.block.parameters, *program.block.state):
        owner = next((n for n in owners if f"{v.name}.".startswith(f"{n}.") and v.shape == own[n]), None)
        if owner is not None:
            whole = v.type.with_shape(program.sharded[owner].shape)
            low = min(program.division.rank * v.size, whole.size)
            found[v.name] = Part(whole, low, min(v.size, whole.size - low))
    return found


def whole_types(program: Program) -> dict[str, TensorType]:
    """The types of parameters, buffers and state as one process has them."""
    parts = parts_of(program)
    return {v.name: parts[v.name].whole if v.name in parts else v.type for v in stored(program)}
