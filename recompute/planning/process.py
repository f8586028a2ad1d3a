"""Budgets of a whole process, `8GiB of process`: the step gets what is left beside Python, libraries and kernels.

What they may take is a fixed amount, so that one budget gives one plan in every process.  Planning runs in a copy of
the process, whose end gives back what the search has taken; libraries that only planners load are never in this one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar, cast

from ..budgets import BESIDE, Budget
from ..errors import UsageError
from ..language.ir import Block
from ..passes import Target
from ..places import CPUPlace
from ..support.children import ends_with
from ..support.memory import bytes_beside_steps, resident_bytes
from ..support.tables import human_bytes

T = TypeVar("T")
#: bytes that later compiled kernels and the run's own buffers may still add to a process that has planned
_LATER = 128 << 20


def must_be_alone(budget: Budget, block: Block, target: Target) -> None:
    """UsageError for a step whose process is not known: on a device, with other ranks, on other systems than Linux."""
    why = ""
    if not isinstance(target.place, CPUPlace):
        why = "the step runs on a device, whose memory is not the process's"
    elif any(op.op.communicates for op in block.operators):
        why = "with several ranks, their libraries for communication take memory that is not known before"
    elif sys.platform != "linux" or not resident_bytes():
        why = "this system does not say what a process holds"
    if why:
        raise UsageError(f"a budget of '{budget}' is not possible: {why}; give the step's own, such as 8GiB")


def must_hold(budget: Budget) -> None:
    """UsageError if this process holds more beside the step than the budget leaves for that, or held it before."""
    assert budget.of_process is not None
    beside, high = bytes_beside_steps(), resident_bytes("VmHWM")
    if beside + _LATER > BESIDE:
        raise UsageError(
            f"this process holds {human_bytes(beside)} without the step and its weights, and may need "
            f"{human_bytes(_LATER)} more for kernels, but '{budget}' sets aside {human_bytes(BESIDE)}: "
            "plan before data is loaded, or give the step's own budget, such as 8GiB"
        )
    if high > budget.of_process:
        raise UsageError(f"this process has held {human_bytes(high)} already, which is more than '{budget}'")


def in_a_copy(work: Callable[[], T]) -> T:
    """Runs `work` in a copy of this process; returns or raises the same.  A first Ctrl-C reaches the copy alone."""
    global _work
    _work = work
    copies = multiprocessing.get_context("fork")
    try:
        with warnings.catch_warnings(), ProcessPoolExecutor(1, copies, _begin, (os.getpid(),)) as pool:
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # the copy runs Python alone, whatever threads there are
            future: Future[T] = pool.submit(cast("Callable[[], T]", _worked))
            try:
                return future.result()
            except KeyboardInterrupt:  # the copy ends with what it has by now
                return future.result()
    finally:
        _work = None


#: the work of the copy
_work: Callable[[], object] | None = None


def _begin(parent: int) -> None:
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    ends_with(parent)


def _worked() -> object:
    assert _work is not None
    return _work()
