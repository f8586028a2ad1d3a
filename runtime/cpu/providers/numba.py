"""The provider "numba": hand-written kernels, in families by operator (runtime/cpu/kernels)."""

from __future__ import annotations

from typing import Any

from ....language.ir import Operator
from ....language.kernels import register
from ...shared.families import FamilyProvider
from ..device import jit
from ..families import FAMILIES


class Numba(FamilyProvider):
    """The provider; see the module's text."""

    name = "numba"

    def find(self, op: Operator) -> Any:
        """The family of the operator, where it accepts it."""
        return FAMILIES.find(op)


if not jit.unavailable():
    register(Numba())
