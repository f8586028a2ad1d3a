"""Native kernels touch no byte outside of their operands, whatever these hold, and whichever are absent or empty.

Every operand ends exactly at a page that nobody may touch, and begins at one another time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cuda_cases
import guard_pages
import numpy as np
import pytest
from guard_pages import ROOM, Child, Operands, Run, array_at, in_types, runs_of

from recompute.language.kernels import PROVIDERS, provider
from recompute.language.types import TensorType
from recompute.ops.elementwise.arithmetic import Neg
from recompute.runtime import cpu
from recompute.runtime.cpu.device import native
from recompute.runtime.cpu.device.native import Table
from recompute.runtime.cuda.device import emulator
from recompute.runtime.cuda.device.kernel import Buffer, Launch
from recompute.testing import all_ops, cases

pytestmark = [
    pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "native code runs here"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks"),
]

#: what is done to every sample always
ALWAYS = (guard_pages.out_of_range, guard_pages.absent, guard_pages.empty)


def samples(dtypes: Sequence[str], kinds: Sequence[Any]) -> Iterator[Run]:
    """Those of all operators, with floats of these types."""
    for cls in all_ops():
        for case in cases(cls):
            for dtype in dtypes:
                op, arrays = in_types(case, dtype)
                yield from runs_of(op, arrays, case.want, kinds)


def on_processor(names: Sequence[str]) -> Callable[[Run, bool], None]:
    """Runs one operator by each provider that takes it."""
    operands = Operands()

    def run(run: Run, at_end: bool) -> None:
        for name in names:
            op, by = dataclasses.replace(run.op, kernel=name), provider(name)
            if not by.accepts(op):
                continue
            scratch = by.scratch(op)
            if max((t.nbytes for t in scratch), default=0) > ROOM or run.nbytes > ROOM:
                continue
            placed = operands.placed(run, scratch, at_end)
            ins, outs, spare = ([None if p is None else array_at(*p) for p in part] for part in placed)
            with np.errstate(all="ignore"):
                Table(list(by.bind(op, ins, outs, spare))).run()

    return run


def emulated(align: int, runs: Sequence[Run]) -> Callable[[Run, bool], None]:
    """Runs one operator by the CUDA kernel that a device would run.  Those of `runs` are compiled at once, before."""
    operands, device = Operands(align=align), emulator.EmulatedDevice(level=cuda_cases.level())

    def calls(run: Run, at_end: bool) -> list[Any]:
        name = cuda_cases.kernels_of(run.op)
        if not name:
            return []
        op, by = dataclasses.replace(run.op, kernel=name), provider(name)
        scratch = by.scratch(op)
        if max((t.nbytes for t in scratch), default=0) > ROOM or run.nbytes > ROOM:
            return []
        placed = operands.placed(run, scratch, at_end)
        ins, outs, spare = ([None if p is None else Buffer(*p) for p in part] for part in placed)
        return list(by.bind(op, ins, outs, spare))

    kernels = []
    of_kinds = [r for r in runs if not r.what.endswith("out of range")]  # whose kernels are those of the samples
    for run, at_end in itertools.product(of_kinds, (True, False)):
        with contextlib.suppress(Exception):  # said below, where it runs
            kernels += [c.kernel for c in calls(run, at_end) if isinstance(c, Launch)]
    cuda_cases.compile_together(set(kernels), device)

    def work(run: Run, at_end: bool) -> None:
        for call in calls(run, at_end):
            device.prepare(call)()

    return work


def check(runs: Sequence[Run], by: Callable[[Run, bool], None]) -> None:
    """AssertionError with the operators that touch what is not theirs, or that meet what they do not expect."""
    faults = Child(by).all(runs)
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:40])


def test_a_fault_names_its_operator() -> None:
    """The check itself: one element too many, and one before the first, end a child each."""
    runs = list(runs_of(Neg(), (np.zeros(4, np.float32),), None, ()))
    operands = Operands()

    def beyond(run: Run, at_end: bool) -> None:
        (x,), *_ = operands.placed(run, (), at_end)
        array_at(x[0] + 16 if at_end else x[0] - 4, TensorType("f32", (1,)))[...] = 1.0

    for first in (True, False):
        faults = Child(lambda run, at_end, first=first: beyond(run, first)).all(runs)
        assert len(faults) == len(runs)
        assert all(f.startswith("SIG") and "Neg() using : (f32[4]) -> (f32[4])" in f for f in faults)


def test_kernels_of_the_processor(any_size: None) -> None:
    check(list(samples(("f32",), ALWAYS)), on_processor([n for n in cpu.PREFERRED if n in PROVIDERS]))


def test_kernels_of_the_processor_with_other_types_and_attributes(any_size: None) -> None:
    names = [n for n in cpu.PREFERRED if n in PROVIDERS]
    check(list(samples(("f64",), (*ALWAYS, guard_pages.same_memory))), on_processor(names))
    check(list(samples(("f32",), (guard_pages.attributes, guard_pages.same_memory))), on_processor(names))


@cuda_cases.needs_device
def test_kernels_of_cuda() -> None:
    if cuda_cases.PLACE != "emulated":
        pytest.skip("guard pages are this machine's")
    runs = list(samples(("f32",), (guard_pages.out_of_range,)))
    run = emulated(64, runs)
    # what begins at a page is as aligned below, where it runs too
    check(runs, lambda r, at_end: run(r, at_end) if at_end else None)


@cuda_cases.needs_device
def test_kernels_of_cuda_with_other_operands() -> None:
    if cuda_cases.PLACE != "emulated":
        pytest.skip("guard pages are this machine's")
    runs = list(samples(("f32",), (*ALWAYS, guard_pages.same_memory)))
    check(runs, emulated(1, runs))
