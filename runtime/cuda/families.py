"""Kernel families for CUDA devices, by operator, which the provider "cuda" runs.

A family is a class in a module of `runtime/cuda/kernels`; see runtime/shared/families.py.  No kernel uses atomic
additions.  What no family takes runs as its expansion (expanded.py), and what has none on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..shared import families
from .device.kernel import Buffer, Call

#: operands as `bind` is given them: None where an optional one is absent, with None behind the last one
Buffers = Sequence["Buffer | None"]

FAMILIES = families.Families(f"{__package__}.kernels")
family = FAMILIES.add


class Family(families.Family["Buffer | None", Buffer, Call]):
    """Kernels of some operators that are alike; operands are buffers on the device."""
