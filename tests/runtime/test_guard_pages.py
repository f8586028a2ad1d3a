"""Native kernels touch no byte outside of their operands, whatever these hold, and whichever are absent or empty.

Every operand ends exactly at a page that nobody may touch, and begins at one another time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cuda_cases
import guard_pages
import numpy as np
import pytest
from guard_pages import Bound, Child, Operands, Run, array_at, in_types, once_for_types, runs_of

from recompute.language.kernels import PROVIDERS, provider
from recompute.language.types import TensorType
from recompute.ops.elementwise.arithmetic import Neg
from recompute.runtime import cpu
from recompute.runtime.cpu.device import native
from recompute.runtime.cpu.device.native import Table
from recompute.runtime.cuda.device import emulator
from recompute.runtime.cuda.device.kernel import Buffer, Launch
from recompute.runtime.shared.kernels import pooling
from recompute.testing import all_ops, cases

pytestmark = [
    pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "native code runs here"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks"),
]

#: what is done to every sample always
ALWAYS = (guard_pages.out_of_range, guard_pages.absent, guard_pages.empty)


def samples(dtypes: Sequence[str], kinds: Sequence[Any], share: int = 1) -> Iterator[Run]:
    """Those of all operators, with floats of these types; of those that differ in nothing, the first.

    `share`: of each operator's samples one in so many, drawn by the operator's name.
    """
    seen = set()
    for cls in all_ops():
        of_this = list(cases(cls))
        for case in of_this[zlib.crc32(cls.__name__.encode()) % max(1, min(share, len(of_this))) :: share]:
            for dtype in dtypes:
                op, arrays = in_types(case, dtype)
                for run in runs_of(op, arrays, case.want, kinds):
                    if run.whole not in seen:
                        seen.add(run.whole)
                        yield run


def on_processor(names: Sequence[str]) -> Callable[[Run, bool], None]:
    """Runs one operator by each provider that takes it."""
    operands = Operands()

    @once_for_types
    def bound(run: Run, at_end: bool, name: str) -> Bound:
        op, by = dataclasses.replace(run.op, kernel=name), provider(name)
        return operands.bound(run, by.scratch(op), at_end, op, by, array_at) if by.accepts(op) else None

    def work(run: Run, at_end: bool) -> None:
        for name in names:
            with np.errstate(all="ignore"):
                if found := bound(run, at_end, name):
                    operands.placed(run, found[0], at_end)
                    Table(found[1]).run()

    return work


def emulated(align: int, runs: Sequence[Run], ends: Sequence[bool] = (True, False)) -> Callable[[Run, bool], None]:
    """Runs one operator by the CUDA kernel that a device would run.  Those of `runs` are compiled at once, before."""
    operands, device = Operands(align=align), emulator.EmulatedDevice(level=cuda_cases.level())

    @once_for_types
    def bound(run: Run, at_end: bool) -> Bound:
        name = cuda_cases.kernels_of(run.op)
        if not name:
            return None
        op, by = dataclasses.replace(run.op, kernel=name), provider(name)
        return operands.bound(run, by.scratch(op), at_end, op, by, Buffer)

    kernels = []
    for run, at_end in itertools.product(runs, ends):
        with contextlib.suppress(Exception):  # said below, where it runs
            _, calls = bound(run, at_end) or ((), ())
            kernels += [c.kernel for c in calls if isinstance(c, Launch)]
    cuda_cases.compile_together(set(kernels), device)

    def work(run: Run, at_end: bool) -> None:
        if at_end in ends and (found := bound(run, at_end)):
            operands.placed(run, found[0], at_end)
            for call in found[1]:
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


#: one sample in so many of each operator, and one at least; all of them by hand
SHARES = pytest.mark.parametrize("share", [8, pytest.param(1, marks=pytest.mark.hours)])


@SHARES
def test_kernels_of_the_processor(any_size: None, share: int) -> None:
    check(list(samples(("f32",), ALWAYS, share)), on_processor([n for n in cpu.PREFERRED if n in PROVIDERS]))


@SHARES
def test_kernels_of_the_processor_with_other_types_and_attributes(any_size: None, share: int) -> None:
    names = [n for n in cpu.PREFERRED if n in PROVIDERS]
    check(list(samples(("f64",), (*ALWAYS, guard_pages.same_memory), share)), on_processor(names))
    check(list(samples(("f32",), (guard_pages.attributes, guard_pages.same_memory), share)), on_processor(names))


@cuda_cases.needs_device
@SHARES
def test_kernels_of_cuda(share: int) -> None:
    if cuda_cases.PLACE != "emulated":
        pytest.skip("guard pages are this machine's")
    runs = list(samples(("f32",), (guard_pages.out_of_range,), share))
    check(runs, emulated(64, runs, ends=(True,)))  # what begins at a page is as aligned below, where it runs too


@cuda_cases.needs_device
@SHARES
def test_kernels_of_cuda_with_other_operands(share: int) -> None:
    if cuda_cases.PLACE != "emulated":
        pytest.skip("guard pages are this machine's")
    runs = list(samples(("f32",), (*ALWAYS, guard_pages.same_memory), share))
    check(runs, emulated(1, runs))


@cuda_cases.needs_device
@SHARES
def test_windows_of_a_few_planes(monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    """Also where the planes are no multiple of a thread's, and with other attributes."""
    if cuda_cases.PLACE != "emulated":
        pytest.skip("guard pages are this machine's")
    monkeypatch.setattr(pooling, "_MUCH", 1)
    kinds = (*ALWAYS, guard_pages.attributes)
    runs = [r for r in samples(("f32",), kinds, share) if re.search("Pool|Im2Col|Col2Im|Trilu", r.op.op.name)]
    check(runs, emulated(1, runs))
