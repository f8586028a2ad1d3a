"""Former names of modules: importing one gives the module at its new place.

Names of the public interface (`import recompute.losses`) stay; the others give a DeprecationWarning, and will be
removed in version 1.0.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: folder → modules that were in the package's root, as `former name=new name` if the name changed
_ROOMS = {
    "analysis": "biggest_batch check compare estimates operator_times",
    "cli": "cli_arguments=arguments cli_values=values",
    "compiling": "compiler steps",
    "exporter": "onnx_compiled=compiled onnx_export=step onnx_function_builder=function_builder",
    "importer": "initialize onnx_import=load onnx_model=model",
    "language": "builder element ir kernels op program text types",
    "report": "pictures plot report=data snapshot timeline trace",
    "support": "files show_table=tables threads",
    "training": "amp clip fleet losses lr optimizer_base=base optimizers state",
}
#: folder → modules that were in its parent
_PASSES = {
    "passes.cleanup": "commit_updates dead_code eager_updates",
    "passes.gradient": "autodiff lean_gradients precision versions",
    "passes.lowering": "channels_last choose_kernels fold_transposes fusion layouts",
    "passes.memory": "liveness memory_plan packing packing_exact storage",
    "passes.offloading": "offload transfers",
    "passes.planners.core": (
        "adapters bound chain chain_model derive division_tree frontier lower_sets problem schedules simulate"
        " synthetic watch"
    ),
    "passes.planners.methods": (
        "auto checkmate chen feng_huang gruslys kusumoto local_search min_cut moccasin rotor sweep"
    ),
    "passes.recomputation": "rebuild recompute split_norms unplan",
    "passes.scheduling": "schedule",
}
#: former names that stay
PUBLIC = ("amp", "clip", "fleet", "losses", "lr", "optimizers", "state")
#: former name → name, both below the package
MOVED = {
    former: f"{room}.{new or former}"
    for room, names in _ROOMS.items()
    for former, _, new in (name.partition("=") for name in names.split())
    if former != room
} | {
    f"{folder.rpartition('.')[0]}.{name}": f"{folder}.{name}"
    for folder, names in _PASSES.items()
    for name in names.split()
}


class Finder(MetaPathFinder):
    """Finds `PACKAGE.former` as `PACKAGE.folder.name`."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that has moved; None for others."""
        package, _, name = fullname.partition(".")
        if package != self.package or name not in MOVED:
            return None
        return ModuleSpec(fullname, _Loader(fullname, f"{package}.{MOVED[name]}"))


class _Loader(Loader):
    def __init__(self, former: str, name: str) -> None:
        self.former, self.name = former, name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if self.former.rpartition(".")[2] not in PUBLIC:
            warnings.warn(f"{self.former} is now {self.name}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(self.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # which the import system has replaced
        sys.modules[self.former] = module


def install(package: str) -> None:
    """Makes the former names of a package's modules importable."""
    if not any(isinstance(f, Finder) and f.package == package for f in sys.meta_path):
        sys.meta_path.append(Finder(package))
