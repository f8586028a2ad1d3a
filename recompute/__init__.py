"""An ONNX-native static-graph training compiler with recomputation.  `import recompute as rc`."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import BudgetError, JobError, ModelError, RecomputeError, UsageError, VerifyError
from .ir import Block, Operator, Role, Value
from .kernels import providers_from
from .op import operators_from
from .program import Program, Variable
from .text import parse, show
from .types import TensorType
from .verify import verify
from .version import __version__

#: name → module that has it; imported when first used, so that `import recompute` stays quick
_LAZY = {
    "Executor": "runtime",
    "CPUPlace": "runtime",
    "CUDAPlace": "runtime",
    "EmulatedCUDAPlace": "runtime",
    "Pass": "passes",
    "Target": "passes",
    "pipeline": "passes",
    "run_passes": "passes",
    "load": "onnx_import",
    "SGD": "optimizers",
    "Momentum": "optimizers",
    "Nesterov": "optimizers",
    "Adagrad": "optimizers",
    "RMSProp": "optimizers",
    "Adam": "optimizers",
    "AdamW": "optimizers",
    "Lamb": "optimizers",
    "Lars": "optimizers",
    "RecomputeOptimizer": "optimizers",
    "RecomputeWarning": "optimizers",
    "MixedPrecision": "amp",
    "export_step": "onnx_export",
    "export_trained": "onnx_compiled",
    "load_compiled": "onnx_compiled",
    "save_model": "onnx_compiled",
    "load_state": "state",
    "save_state": "state",
    "compile_step": "compiler",
    "estimate": "estimates",
    "max_batch": "biggest_batch",
}
_MODULES = (
    "passes", "runtime", "models", "losses", "optimizers", "amp", "fleet", "testing", "lr", "clip", "cost", "profile",
    "state",
)  # fmt: skip

__all__ = [
    "Block",
    "BudgetError",
    "JobError",
    "ModelError",
    "Operator",
    "Program",
    "RecomputeError",
    "Role",
    "TensorType",
    "UsageError",
    "Value",
    "Variable",
    "VerifyError",
    "__version__",
    "parse",
    "show",
    "verify",
    *_LAZY,
    *_MODULES,
]


def _define_operators() -> None:
    from . import ops  # noqa: F401


def _register_cpu() -> None:
    from .runtime import cpu

    cpu.register_all()


def _register_cuda() -> None:
    from .runtime import cuda

    cuda.register_all()


# registries are filled from here when something is first asked for by name: the language knows neither its operators
# nor the machines that run it
operators_from(_define_operators)
providers_from(_register_cpu)
providers_from(_register_cuda)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'recompute' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
