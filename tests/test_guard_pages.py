"""Native kernels touch no byte outside of their operands, whatever these hold, and whichever are absent or empty."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from guard_pages import ROOM, Child, Operands, Run, array_at, in_types, runs_of

from recompute.kernels import PROVIDERS, provider
from recompute.runtime import cpu
from recompute.runtime.cpu import native
from recompute.runtime.cpu.native import Table
from recompute.testing import all_ops, cases

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "native code runs here")


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take operands of any size."""
    cpu.register_all()
    modules = [importlib.import_module(f"{cpu.__name__}.{m.name}") for m in pkgutil.iter_modules(cpu.__path__)]
    modules.append(importlib.import_module("recompute.ops.loop"))
    for module in modules:
        for name in ("ENOUGH", "SMALLEST"):
            monkeypatch.setattr(module, name, 0, raising=False)


def chosen(runs: Iterator[Run], names: Sequence[str]) -> Iterator[Run]:
    """The runs by each of the providers; `accepts` is asked in the child."""
    for run in runs:
        for name in names:
            yield dataclasses.replace(run, op=dataclasses.replace(run.op, kernel=name))


def on_processor() -> Any:
    """Runs one operator natively."""
    operands = Operands()

    def run(run: Run, at_end: bool) -> None:
        runs = provider(run.op.kernel)
        if not runs.accepts(run.op):
            return
        scratch = runs.scratch(run.op)
        if max((t.nbytes for t in scratch), default=0) > ROOM or run.nbytes > ROOM:
            return
        ins, outs, spare = (
            [None if p is None else array_at(*p) for p in part] for part in operands.placed(run, scratch, at_end)
        )
        for i, j in run.shared:
            outs[i] = ins[j]
        with np.errstate(all="ignore"):
            Table(list(runs.bind(run.op, ins, outs, spare))).run()

    return run


def samples(dtypes: Sequence[str], mutate: bool = True) -> Iterator[Run]:
    for cls in all_ops():
        for case in cases(cls):
            for dtype in dtypes:
                op, arrays = in_types(case, dtype)
                yield from runs_of(op, arrays, case.want, mutate)


@pytest.mark.parametrize("name", list(cpu.MODULES))
def test_samples_and_what_may_become_of_them(name: str, any_size: None) -> None:
    if name not in PROVIDERS:
        pytest.skip(f"no {name} here")
    child = Child(on_processor())
    runs = list(chosen(samples(("f64", "f32")), [name]))
    faults = child.all(runs)
    assert len(runs) > 1000
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:40])
