"""Budgets of a whole process: what it holds while it trains stays within them, and the plan is the same in any."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import recompute as rc
from recompute.budgets import BESIDE, as_budget, as_bytes
from recompute.planning import process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
MIB = 1 << 20


def test_the_text_leaves_a_fixed_amount_for_all_else() -> None:
    budget = as_budget(" 8GiB of process")
    assert budget.bytes is None
    assert budget.within(1, 0) == budget.within(1 << 40, 5) == (8 << 30) - BESIDE
    assert str(budget) == "8GiB of process"
    for text in ("60% of process", "8GiB of processes", "process"):
        with pytest.raises(rc.UsageError, match=f"cannot read '{text}'"):
            as_budget(text)
    with pytest.raises(rc.UsageError, match="Python, libraries and kernels may take"):
        as_budget("100MiB of process")
    with pytest.raises(rc.UsageError, match="'8GiB of process' is of a process"):
        as_bytes("8GiB of process")
    with pytest.raises(rc.UsageError, match="is of a process"):
        rc.max_batch("lenet", "8GiB of process")


def test_what_a_process_holds_is_not_known_on_a_device_or_with_ranks() -> None:
    program = rc.load(rc.models.build("lenet"), batch=8)
    loss = rc.losses.cross_entropy(program)
    with pytest.raises(rc.UsageError, match="the step runs on a device, whose memory is not the process's"):
        rc.compile_step(program, loss, rc.Adam(), budget="1GiB of process", place="cuda:0", cost="h100")
    optimizer = rc.DataParallel(rc.RecomputeOptimizer(rc.Adam()).set_budget("1GiB of process"), mesh="dp=2", rank=0)
    with pytest.raises(rc.UsageError, match="with several ranks, their libraries"):
        optimizer.minimize(loss)


def test_a_process_that_holds_more_than_is_set_aside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = as_budget("8GiB of process")
    monkeypatch.setattr(process, "bytes_beside_steps", lambda: BESIDE - process._LATER)
    process.must_hold(budget)
    monkeypatch.setattr(process, "bytes_beside_steps", lambda: BESIDE - process._LATER + 1)
    with pytest.raises(rc.UsageError, match=r"this process holds 192\.00 MiB without the step .* sets aside 320\.00"):
        process.must_hold(budget)
    monkeypatch.setattr(process, "bytes_beside_steps", lambda: 0)
    monkeypatch.setattr(process, "resident_bytes", lambda what: 9 << 30)
    with pytest.raises(rc.UsageError, match=r"has held 9\.00 GiB already, which is more than '8GiB of process'"):
        process.must_hold(budget)


def failing() -> None:
    raise rc.UsageError("of the copy")


def test_work_in_a_copy_leaves_nothing_here_and_its_errors_arrive() -> None:
    found = process.in_a_copy(lambda: (sys.modules.setdefault("of_the_copy", sys).__name__, np.ones(3)))
    assert found[0] == "sys"
    assert found[1].tolist() == [1, 1, 1]
    assert "of_the_copy" not in sys.modules
    with pytest.raises(rc.UsageError, match="of the copy"):
        process.in_a_copy(failing)


TRAINS = """
import re, sys
import numpy as np
import recompute as rc
held = np.ones(int(sys.argv[1]))
program = rc.load(rc.models.build("lenet"), batch=4096)
rc.RecomputeOptimizer(rc.Adam()).set_budget("400MiB of process", effort=0.02).minimize(rc.losses.cross_entropy(program))
g = np.random.default_rng(0)
feed = {v.name: g.standard_normal(v.shape).astype("f") if v.dtype == "f32" else np.zeros(v.shape, "i8")
        for v in program.inputs}
executor = rc.Executor()
for _ in range(3):
    executor.run(program, feed)
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10)
print(program.planned.peak_bytes, program.planned.plain_peak_bytes, program.plan)
"""


def trained(floats: int, tmp_path: Path, limit: Callable[[], None] | None = None) -> tuple[int, str]:
    """VmHWM of a process that trains, and its plan; it begins with an empty cache of kernels."""
    given = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    code = [sys.executable, "-c", TRAINS, str(floats)]
    made = subprocess.run(code, capture_output=True, text=True, env=given, preexec_fn=limit)
    assert made.returncode == 0, (made.returncode, made.stderr)
    high, plan = made.stdout.splitlines()
    return int(high), plan


def join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


@pytest.fixture
def limited() -> Iterator[Callable[[], None] | None]:
    """What puts a process into a control group that may hold 400 MiB; None where no group can be made."""
    for folder, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(folder) / f"recompute-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(400 * MIB))
        except OSError:
            group.rmdir()
            continue
        yield functools.partial(join, group)
        group.rmdir()
        return
    yield None


@pytest.mark.slow
def test_the_whole_process_stays_within_its_budget(limited: Callable[[], None] | None, tmp_path: Path) -> None:
    """With kernels to compile and without, whatever the process holds, by the same plan; the first one in a control
    group of that size, from which a process that took more would be ended."""
    cold, first = trained(0, tmp_path, limited)
    warm, second = trained(1 << 21, tmp_path)
    assert first == second
    peak, plain = map(int, first.split()[:2])
    assert peak <= 80 * MIB < plain
    assert max(cold, warm) <= 400 * MIB, (cold / MIB, warm / MIB)
