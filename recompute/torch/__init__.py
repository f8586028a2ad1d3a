"""PyTorch: modules as programs, compared and written back; and plans inside of torch.compile.

`Solver`, `explain`, `policy` and the backend `recompute` of `torch.compile` need PyTorch; importing this does not.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Solver", "explain", "policy"]


def __getattr__(name: str) -> Any:
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
