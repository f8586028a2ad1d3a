"""The provider "cuda": kernel families, and traced numerics for operators without one (see ../families.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....language.kernels import register
from ...shared.families import FamilyProvider
from ..families import FAMILIES, Family
from ..traced.family import TRACED

if TYPE_CHECKING:
    from ....language.ir import Operator


def family_of(op: Operator) -> Family | None:
    """The family that runs an operator; None where there is none."""
    return FAMILIES.find(op) or (TRACED if TRACED.accepts(op) else None)


class Cuda(FamilyProvider):
    """The provider; see the module's text."""

    name = "cuda"

    def find(self, op: Operator) -> Family | None:
        """The family of the operator, or `TRACED`."""
        return family_of(op)


register(Cuda())
