"""`cached_step`: a compiled training step from a cache of files, without its model being read.

Where there is a file, nothing of the compiler is imported: that takes longer than all the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..boundary import as_path, as_texts
from ..errors import ModelError, RecomputeError, UsageError, expect, nearest
from ..exporter.library.loaded import LoadedStep
from ..support.cache import KeptFiles
from ..support.children import as_worker
from ..support.files import cache_folder, machine, regular
from ..support.tensor_file import reason
from ..version import __version__

if TYPE_CHECKING:
    from ..training.protocol import AnyOptimizer
    from ..training.spec import Spec

#: the largest file of a step in bytes
_MOST = 1 << 36
#: what ONNX files have in them whose contents are in other files: an entry of external data, or of `rc.save_step`
_ELSEWHERE = (b"\n\x08location\x12", b"recompute.state")


def cached_step(
    model: str | PathLike[str],
    optimizer: str | AnyOptimizer | Spec,
    *,
    batch: int | None = None,
    loss: str | None = None,
    checkpoints: Sequence[str] | str | None = None,
    budget: str | int | None = None,
    cache: str | PathLike[str] | None = None,
    **arguments: Any,
) -> LoadedStep:
    """A compiled training step as machine code, from a file of an earlier process where there is one.

    `model`: an .onnx file that has its weights in it, or the name of a network of the zoo; `batch`, `loss`: as
    `recompute.Steps` takes them, the loss by name; `checkpoints`, `budget`: as in `rc.compile_step`.  `optimizer`: the
    name of one of `rc.optimizers`, with its `arguments` (numbers and texts): it starts in a fraction of the time that
    an object takes, as no compiler is imported.  `cache`: the folder (None: the user's cache folder).

    A file is taken only where the model's contents, all options, versions and the processor are the same, and if this
    user wrote it there and nobody has changed it; else the step is compiled again, in a copy of this process, with a C
    compiler.  The step starts with the model's weights, and runs on one thread, by the project's kernels only
    (docs/library.md).

    UsageError for options that a key cannot describe, such as an optimizer that is not this package's, and where this
    process has run native code before a step had to be compiled; else the errors of `rc.load`, `rc.compile_step` and
    `rc.write_library`.
    """
    expect("loss", loss, (str, type(None)), "the name of a loss or of a value")
    expect("batch", batch, (int, type(None)), "a whole number")
    expect("budget", budget, (int, str, type(None)), "a number of bytes, or a text such as '60%'")
    model = str(expect("model", model, (str, PathLike), "a path, or the name of a network"))
    kept = None if checkpoints is None else list(as_texts(checkpoints, "checkpoints"))
    _need_ordinary_bits()
    job = _Job(model, _asked(optimizer, arguments), arguments, batch, loss, kept, budget)
    folder = cache_folder() if cache is None else as_path(cache)
    files = None if folder is None else KeptFiles(folder / "steps", _MOST)
    name = f"{job.key()}.step"
    if files is not None and (file := files.read(name)) is not None:
        with contextlib.suppress(RecomputeError):  # of a processor that has lost a feature, say
            return LoadedStep(file)
    file = _elsewhere(job)
    if files is not None and name == f"{job.key()}.step":  # the model is still the one that was read
        files.write(name, file)
    return LoadedStep(file)


def _need_ordinary_bits() -> None:
    """UsageError where this process has portable bits; nothing is imported to find out."""
    kernels = sys.modules.get("recompute.language.kernels")
    if kernels is not None and kernels.bits_are_portable():
        raise UsageError(
            "a cached step has the bits of this processor, and this process was asked for portable ones: leave out "
            "rc.portable_bits, or run the step with an Executor"
        )


def _asked(optimizer: Any, arguments: Mapping[str, Any]) -> Any:
    """The optimizer's name, or its spec.  UsageError for what no file can be named by."""
    if isinstance(optimizer, str):
        for name, value in arguments.items():
            expect(
                name, value, (int, float, bool, str, type(None)), "a number or a text, where the optimizer is a name"
            )
        return optimizer
    if arguments:
        raise UsageError(
            f"'{next(iter(arguments))}' is an argument of an optimizer that is named, and this one is made"
        )
    from ..training.protocol import spec_of

    spec = spec_of(optimizer)
    if spec.target is not None or spec.cost is not None or spec.parallel is not None:
        raise UsageError("a cached step is for this processor alone: leave out targets, cost models and meshes")
    if other := next(_others(spec, "the optimizer"), ""):
        raise UsageError(f"{other} is not part of this package, so its step cannot be cached by name")
    return spec


@dataclass(frozen=True)
class _Job:
    """A step that is asked for; the optimizer is a name with arguments, or a spec."""

    model: str
    optimizer: Any
    arguments: Mapping[str, Any]
    batch: int | None
    loss: str | None
    checkpoints: Sequence[str] | None
    budget: str | int | None

    def key(self) -> str:
        """Names the step by all that it depends on."""
        options: Any = self.optimizer, self.arguments
        if not isinstance(self.optimizer, str):
            from ..training.origin import options_of

            options = options_of(self.optimizer)
        asked = [self.batch, self.loss, self.checkpoints, self.budget, options]
        chosen = {n: os.environ.get(n) for n in ("RECOMPUTE_PROCESSOR", "CC", "CC_aarch64")}
        here = [__version__, _stamp(), machine()[0], platform.machine(), chosen, _contents(self.model)]
        return hashlib.sha256(json.dumps([here, asked], sort_keys=True).encode()).hexdigest()[:32]

    def made(self) -> bytes:
        """The file of the step, in a process that has made no native code yet."""
        from ..exporter.library.write import build_for, packed
        from ..runtime.cpu.device import building
        from ..training import optimizers
        from .compiler import compile_step
        from .sources import Loading, source_of
        from .steps import attach_loss

        optimizer = self.optimizer
        if isinstance(optimizer, str):
            if optimizer not in optimizers.NAMES:
                raise UsageError(f"no optimizer '{optimizer}'{nearest(optimizer, optimizers.NAMES)}")
            optimizer = getattr(optimizers, optimizer)(**self.arguments)
        build_for(platform.machine(), building.NATIVE if platform.machine() == "x86_64" else None)
        source = source_of(self.model, {}, {}, Loading(weights=True))
        program = source.at(source.default if self.batch is None else self.batch)
        loss, _ = attach_loss(program, self.loss)
        step = compile_step(program, loss, optimizer, checkpoints=self.checkpoints, budget=self.budget)
        return packed(step.program)


#: in a copy of this process, its job: options may be no objects that can be sent
_work: list[_Job] = []


def _takes(job: _Job) -> None:
    _work[:] = [job]


def _begun(parent: int) -> bytes:
    as_worker(parent)
    return _work[0].made()


def _elsewhere(job: _Job) -> bytes:
    """The file of a step, by a copy of this process: what that makes native code for does not bind this one."""
    if sys.platform != "linux":
        raise UsageError(f"steps are kept as libraries, and there are none for {sys.platform}")
    import multiprocessing
    import warnings
    from concurrent.futures import ProcessPoolExecutor

    # a fork has the job as it is; several threads may ask at the same time, each for its own
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"), initializer=_takes, initargs=(job,))
    with warnings.catch_warnings(), pool:
        warnings.simplefilter("ignore", DeprecationWarning)  # copies run Python alone, whatever threads there are
        return pool.submit(_begun, os.getpid()).result()


def _contents(model: str) -> str:
    """A digest of a file; the name of a network of the zoo.  UsageError where its weights are in other files, which
    may change while it stays, ModelError where it cannot be read."""
    if not Path(model).is_file():
        return model
    try:
        data = regular(model).read_bytes()
    except OSError as e:
        raise ModelError(f"cannot read '{model}': {reason(e)}") from None
    if any(other in data for other in _ELSEWHERE):
        raise UsageError(f"'{model}' has weights in other files: a step is kept for models in one file")
    return hashlib.sha256(data).hexdigest()


def _stamp() -> str:
    """Changes with the package's files, as a checkout does between versions, and with what makes its code."""
    found = hashlib.sha256()
    root = Path(__file__).parents[1]
    for folder, _, names in sorted(os.walk(root, followlinks=True)):
        for name in sorted(n for n in names if n.endswith((".py", ".c", ".h"))):
            stat = os.stat(os.path.join(folder, name))
            found.update(f"{folder} {name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for name in ("llvmlite", "numba"):
        spec = importlib.util.find_spec(name)  # a folder beside it is named by its version
        if spec is not None and spec.origin is not None:
            found.update(repr(sorted(p.name for p in Path(spec.origin).parents[1].glob(f"{name}-*"))).encode())
    return found.hexdigest()


def _others(value: Any, where: str, depth: int = 0) -> Iterator[str]:
    """What is no option of this package's, nor made of numbers and texts."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)) or depth > 12:
        return
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _others(item, f"{where} '{name}'", depth + 1)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from _others(item, where, depth + 1)
    elif isinstance(value, types.FunctionType):
        if value.__closure__ or not value.__module__.startswith("recompute."):  # a key has a function's name alone
            yield f"{where}, '{value.__qualname__}',"
    elif not type(value).__module__.startswith("recompute."):
        yield f"{where}, of type {type(value).__module__}.{type(value).__qualname__},"
    else:
        inside = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)} \
            if dataclasses.is_dataclass(value) else vars(value)  # fmt: skip
        for name, item in inside.items():
            yield from _others(item, f"{where}'s {name.lstrip('_')}", depth + 1)


__all__ = ["cached_step"]
