"""The provider "cuda": kernel families (see ../families.py), and expansions of operators without one."""

from __future__ import annotations

from ....language.ir import Operator
from ....language.kernels import register
from ...shared.families import FamilyProvider
from ..expanded import family_of
from ..families import Family


class Cuda(FamilyProvider):
    """The provider; see the module's text."""

    name = "cuda"

    def find(self, op: Operator) -> Family | None:
        return family_of(op)


register(Cuda())
