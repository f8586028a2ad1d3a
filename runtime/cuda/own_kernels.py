"""The provider "cuda": kernels of our own, and recorded numerics where there is none (see families.py)."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...language.kernels import register
from ...language.types import TensorType
from .families import FAMILIES, Buffers, Family
from .kernel import Buffer, Call
from .traced import TRACED

if TYPE_CHECKING:
    from ...language.ir import Operator


@functools.cache
def families() -> dict[str, list[Family]]:
    """The whole table."""
    for module in sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)])):
        if module.startswith("kernels_"):
            importlib.import_module(f"{__package__}.{module}")
    return FAMILIES


def family_of(op: Operator) -> Family | None:
    """Who runs an operator; None: nobody."""
    table = families()
    found = next((f for name in ("*", op.op.name) for f in table.get(name, ()) if f.accepts(op)), None)
    if found is not None:
        return found
    return TRACED if TRACED.accepts(op) else None


class Cuda:
    """The provider; see families.py."""

    name = "cuda"

    def find(self, op: Operator) -> Family | None:
        """Who runs an operator."""
        return family_of(op)

    def accepts(self, op: Operator) -> bool:
        """Whether a family does."""
        return self.find(op) is not None

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """As the family says."""
        found = self.find(op)
        assert found is not None
        return found.scratch(op)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """The family's calls."""
        found = self.find(op)
        assert found is not None
        return found.bind(op, (*ins, *(None,) * 8), (*outs, *(None,) * 8), scratch)


register(Cuda())
