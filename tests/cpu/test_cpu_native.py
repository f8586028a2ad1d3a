"""Native code: calls in tables, object code that two processes share, kernels by numba."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recompute.errors import JobError
from recompute.runtime.cpu.device import jit, native
from recompute.runtime.cpu.device.native import Call, Table

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "native code runs here")
needs_numba = pytest.mark.skipif(bool(jit.unavailable()), reason=jit.unavailable() or "numba is here")

#: counts[i] += 1 for each piece i of the work
COUNT = """
define void @kernel(ptr %args, i64 %begin, i64 %end) {
entry:
  %counts = load ptr, ptr %args
  br label %loop
loop:
  %i = phi i64 [%begin, %entry], [%i1, %loop]
  %at = getelementptr i64, ptr %counts, i64 %i
  %old = atomicrmw add ptr %at, i64 1 monotonic
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, %end
  br i1 %more, label %loop, label %done
done:
  ret void
}
"""

WORKER = """
import sys
import numpy as np
from recompute.runtime.cpu.device import native
from recompute.runtime.cpu.device.native import Call, Table
counts = np.zeros(7, np.int64)
Table([Call(native.compile_ir(sys.stdin.read()), (counts,), 7)]).run()
assert (counts == 1).all()
assert "numba" not in sys.modules
"""


@pytest.mark.parametrize("work", [1, 2, 3, 1000])
@pytest.mark.parametrize("parallel", [True, False])
def test_each_piece_of_work_is_done_once(work: int, parallel: bool) -> None:
    counts = np.zeros(work, np.int64)
    call = Call(native.compile_ir(COUNT), (counts,), work, parallel)
    table = Table([call, call, call])
    table.run()
    assert (counts == 3).all()
    table.run()
    assert (counts == 6).all()


def test_words_hold_addresses_integers_and_doubles() -> None:
    a = np.zeros(3)
    status = np.zeros(3, np.int64)
    words = Call(0, (a, 7, 2.5, native.STATUS)).words(status)
    assert words[0] == a.ctypes.data and words[1] == 7 and words[2:3].view(np.float64)[0] == 2.5
    assert words[3] == status.ctypes.data


def test_the_call_that_fails_is_the_last_one() -> None:
    counts = np.zeros(2, np.int64)
    count = native.compile_ir(COUNT)
    fails = Call(count, (native.STATUS,), 1)  # its count becomes the status
    table = Table([Call(count, (counts,), 2), fails, Call(count, (counts,), 2)])
    assert table.run() == 1
    with pytest.raises(JobError, match=r"^label 0 is outside the 0 classes .*, in\n    y = Foo"):
        table.check("y = Foo")
    assert counts.tolist() == [1, 1]


def test_a_failure_is_of_one_table_and_one_run() -> None:
    fails, passes = Table([Call(native.compile_ir(COUNT), (native.STATUS,), 1)]), Table([])
    for _ in range(2):
        assert fails.run() == 0 and passes.run() is None
        assert fails.status.tolist() == [1, 0, 0]
        passes.check()
    fails.status[0] = 9
    assert Table.run(passes) is None
    with pytest.raises(JobError, match="a kernel failed with status 9"):
        fails.check()


FORK = """
    child = os.fork()
    if not child:
        signal.alarm(30)
        table.run()
        os._exit(0 if counts.sum() == 2000 else 1)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize(
    "setting", ["OMP_THREAD_LIMIT=1", "OMP_DYNAMIC=true", "OMP_MAX_ACTIVE_LEVELS=0", "OMP_NUM_THREADS=2"]
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_teams_of_any_size_do_all_of_the_work_and_so_do_forks(setting: str) -> None:
    code = f"""if 1:
    import os, signal, sys
    import numpy as np
    from recompute.runtime.cpu.device import native
    counts = np.zeros(1000, np.int64)
    table = native.Table([native.Call(native.compile_ir(sys.stdin.read()), (counts,), 1000)])
    table.run()
    assert counts.sum() == 1000
    {FORK}"""
    name, _, value = setting.partition("=")
    environment = {**os.environ, "OMP_NUM_THREADS": "2", name: value}
    subprocess.run([sys.executable, "-c", code], input=COUNT, env=environment, text=True, check=True, timeout=60)


def run_worker(home: Path) -> subprocess.Popen:
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
    found = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, env=environment, text=True)
    assert found.stdin is not None
    found.stdin.write(COUNT)
    found.stdin.close()
    return found


def test_processes_share_object_code_and_mend_damaged_files(tmp_path: Path) -> None:
    together = [run_worker(tmp_path) for _ in range(2)]
    assert [p.wait(60) for p in together] == [0, 0]
    files = sorted((tmp_path / "onnx-recompute" / "kernels").iterdir())
    assert [f.suffix for f in files] == [".o", ".o", ""]  # the kernel, what walks the tables, and the folder's secret
    whole = [f.read_bytes() for f in files]
    files[0].write_bytes(whole[0][:-9])
    files[1].write_bytes(b"")
    assert run_worker(tmp_path).wait(60) == 0
    assert [f.read_bytes() for f in files] == whole


def scale(x, y, factor, shift, begin, end):
    """A kernel's body."""
    for i in range(begin, end):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * factor + shift


@needs_numba
def test_a_kernel_in_python() -> None:
    made = jit.kernel(scale)
    for dtype in (np.float32, np.float64):
        x = np.arange(20, dtype=dtype).reshape(4, 5)
        y = np.empty_like(x)
        Table([made.call(x, y, 0.5, 3, work=4)]).run()
        np.testing.assert_array_equal(y, x * 0.5 + 3)
    with pytest.raises(JobError, match="not contiguous"):
        made.call(x.T, y, 0.5, 3, work=4)
