"""PyTorch: modules as programs, compared and written back; and plans inside of torch.compile.

`Solver`, `explain`, `policy` and the backend `recompute` of `torch.compile` need PyTorch; importing this does not.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ..errors import MissingExtraError

__all__ = ["Solver", "explain", "policy"]


def need_torch(what: str) -> None:
    """MissingExtraError where PyTorch, the user's own, is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError(f"{what} needs PyTorch, which is not installed: pip install torch")


def __getattr__(name: str) -> Any:
    if name in __all__:
        need_torch(f"recompute.torch.{name}")
    if name == "Solver":
        from .plan.solver import solver

        return solver
    if name == "explain":
        from .plan.explain import explain

        return explain
    if name == "policy":
        from .plan.policy import policy

        return policy
    raise AttributeError(f"module 'recompute.torch' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
