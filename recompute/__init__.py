"""An ONNX-native static-graph training compiler with recomputation.  `import recompute as rc`."""

from __future__ import annotations

import importlib
import os
from typing import Any

from .errors import BudgetError, JobError, ModelError, RecomputeError, UsageError, VerifyError
from .language.ir import Block, Operator, Role, Value
from .language.kernels import providers_from
from .language.op import operators_from
from .language.program import Program, Variable, modes_from
from .language.text import parse, show
from .language.types import TensorType
from .language.verify import verify
from .support.notebook import views_from
from .version import __version__

if os.path.isfile(os.path.join(__path__[0], "passes")):
    raise ImportError(
        f"{os.path.join(__path__[0], 'passes')} is a file in place of a link to ../passes, because Git made this "
        "checkout without symbolic links: clone it again with `git clone -c core.symlinks=true` (on Windows, in "
        "developer mode)"
    )

#: name → module that defines it; imported at first use, so that `import recompute` is fast
_LAZY = {
    "Executor": "runtime",
    "CPUPlace": "runtime",
    "CUDAPlace": "runtime",
    "EmulatedCUDAPlace": "runtime",
    "Pass": "passes",
    "Target": "passes",
    "pipeline": "passes",
    "run_passes": "passes",
    "load": "importer.load",
    "SGD": "training.optimizers",
    "Momentum": "training.optimizers",
    "Nesterov": "training.optimizers",
    "Adagrad": "training.optimizers",
    "RMSProp": "training.optimizers",
    "Adam": "training.optimizers",
    "AdamW": "training.optimizers",
    "Lamb": "training.optimizers",
    "Lars": "training.optimizers",
    "RecomputeOptimizer": "training.optimizers",
    "RecomputeWarning": "training.optimizers",
    "DataParallel": "training.parallel",
    "GradientMerge": "training.gradient_merge",
    "GradientMergeOptimizer": "training.gradient_merge",
    "Mesh": "communication.mesh",
    "EMA": "training.averages",
    "ExponentialMovingAverage": "training.averages",
    "MixedPrecision": "training.amp",
    "NotFiniteError": "errors",
    "shard": "training.shardings",
    "stop_on_nan": "training.finite",
    "prepare_qat": "training.quantisation",
    "fuse_attention": "training.fuse_attention",
    "fuse_head": "training.fuse_head",
    "from_torch": "torch.from_torch",
    "write_back": "torch.write_back",
    "check_import": "torch.check_import",
    "Proof": "proof.prove",
    "prove": "proof.prove",
    "prove_ranks": "training.ranks_proof",
    "ModelWarning": "errors",
    "export_step": "exporter.step",
    "export_trained": "exporter.trained",
    "load_compiled": "exporter.compiled",
    "save_model": "exporter.compiled",
    "load_adapter": "tuning.peft",
    "save_step": "exporter.step",
    "build_for": "exporter.library.write",
    "portable_bits": "exporter.library.write",
    "write_library": "exporter.library.write",
    "load_state": "training.state",
    "lora": "tuning.lora",
    "merge_adapters": "tuning.merge",
    "dequantize": "tuning.masters",
    "quantize_frozen": "tuning.int8",
    "requantize": "tuning.masters",
    "save_adapter": "tuning.peft",
    "save_onnx_adapter": "tuning.onnx_adapter",
    "save_state": "training.state",
    "compile_step": "compiling.compiler",
    "cached_step": "compiling.cached",
    "look": "analysis.look",
    "estimate": "analysis.estimates",
    "estimate_stages": "analysis.stages",
    "find_mesh": "analysis.cluster.search",
    "max_batch": "analysis.biggest_batch",
    "Trainer": "trainer.trainer",
    "Saving": "trainer.saving",
    "History": "trainer.history",
    "Callback": "trainer.callbacks",
    "EarlyStopping": "trainer.callbacks",
}
#: modules of the public interface, by public name
_MODULES = {
    "passes": "passes",
    "runtime": "runtime",
    "models": "models",
    "losses": "training.losses",
    "metrics": "metrics",
    "optimizers": "training.optimizers",
    "amp": "training.amp",
    "averages": "training.averages",
    "fleet": "training.fleet",
    "testing": "testing",
    "lr": "training.lr",
    "clip": "training.clip",
    "data": "data",
    "cost": "cost",
    "profile": "profile",
    "state": "training.state",
    "edit": "tuning.edit",
    "tuning": "tuning",
}

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


def _modes() -> Any:
    from .training import resized

    return resized


def _views() -> Any:
    from .report import notebook

    return notebook.html_of


# registries are filled from here at the first look-up by name: the language imports neither operators nor backends
operators_from(_define_operators)
providers_from(_register_cpu)
providers_from(_register_cuda)
modes_from(_modes)
views_from(_views)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    raise AttributeError(f"module 'recompute' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
