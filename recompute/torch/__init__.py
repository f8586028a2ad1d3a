"""PyTorch: modules as programs, compared and written back; and plans inside of torch.compile.

`Solver`, `explain` and the backend `recompute` of `torch.compile` need PyTorch; importing this package does not.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Solver": ("plan.solver", "solver"),
    "explain": ("plan.explain", "explain"),
    "backend": ("plan.backend", "recompute"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'recompute.torch' has no attribute '{name}'")
    module, inside = _LAZY[name]
    return getattr(importlib.import_module(f".{module}", __name__), inside)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
