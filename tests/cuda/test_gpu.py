"""What only a real device can show: graphs replay what was launched, nothing is allocated beside the plan, and the
kernels are clean in compute-sanitizer.  (Numbers, bits and peaks: test_cuda_*.py run on the device too, with
RECOMPUTE_TEST_PLACE=cuda and -m gpu.)"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_cases import PLACE
from zoo_cases import network

import recompute as rc
from recompute.compiling.compiler import compile_step

pytestmark = pytest.mark.gpu
NETWORKS = ("mlp", "lenet", "bert-tiny", "resnet18")


def made(name: str) -> tuple[rc.Program, str, dict[str, Any]]:
    program, loss, feed = network(name)
    place = rc.CUDAPlace(0)
    return compile_step(program, loss, rc.Momentum(learning_rate=0.01), place=place).program, loss, feed


@pytest.mark.parametrize("name", NETWORKS)
def test_replayed_graphs_give_the_bits_of_single_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for graphs in (True, False):
        program, loss, feed = made(name)
        executor = rc.Executor(rc.CUDAPlace(0))
        monkeypatch.setattr(executor.session(program, [loss]).device, "graphs", graphs)
        losses = [executor.run(program, feed, [loss])[0].tobytes() for _ in range(4)]
        found.append((losses, {n: a.tobytes() for n, a in program.data.items()}))
    assert found[0] == found[1]


@pytest.mark.alone
@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_is_allocated_beside_the_plan(name: str) -> None:
    import cupy

    program, loss, feed = made(name)
    executor = rc.Executor(rc.CUDAPlace(0))
    executor.run(program, feed, [loss])  # what libraries take once
    executor.run(program, feed, [loss])
    session = executor.session(program, [loss])
    before, pool = session.device.process_bytes(), cupy.get_default_memory_pool().total_bytes()
    for _ in range(3):
        executor.run(program, feed, [loss])
    assert session.device.process_bytes() == before
    assert cupy.get_default_memory_pool().total_bytes() == pool
    arena, persistent = session.report.arena, session.persistent_bytes
    assert session.measured_peak_bytes <= arena + persistent
    assert arena + persistent - session.measured_peak_bytes < 64 * len(list(session.block.persistent()))


def test_a_budget_that_the_device_has_not_is_said() -> None:
    from recompute.runtime.cuda.device.device import open_device

    with pytest.raises(rc.errors.OutOfMemoryError, match="cannot allocate"):
        open_device(0).allocate(1 << 46)


@pytest.mark.skipif(PLACE == "fake", reason="the fake device does not round to TF32")
def test_tf32_is_asked_for() -> None:
    """A product in float32 keeps 23 bits unless TF32 was asked for."""
    from recompute.language.types import TensorType
    from recompute.runtime.cuda.device.device import open_device
    from recompute.runtime.cuda.device.kernel import Buffer, Product

    d, n = open_device(0), 512
    t = TensorType("f32", (n, n))
    start, memory = d.allocate(3 * t.nbytes)
    a, b, c = (Buffer(start + i * t.nbytes, t) for i in range(3))
    x, y = (np.random.default_rng(i).standard_normal((n, n)).astype(np.float32) for i in (0, 1))
    d.upload(a, x)
    d.upload(b, y)
    want = x.astype(np.float64) @ y.astype(np.float64)
    errors = []
    for tf32 in (False, True):
        with d.stream:
            d.prepare(Product(a, b, c, n, n, n, n, n, n, tf32=tf32))()
        errors.append(float(np.abs(d.download(c) - want).max() / np.abs(want).max()))
    assert errors[0] < 1e-5 < errors[1] < 1e-2
    del memory


def test_kernels_are_clean_in_compute_sanitizer() -> None:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(tool):
        pytest.skip("compute-sanitizer is not installed")
    rows = str(Path(__file__).with_name("test_cuda_rows.py"))
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", rows]
    environment = {**os.environ, "RECOMPUTE_TEST_PLACE": "cuda"}
    done = subprocess.run([tool, "--error-exitcode", "9", *tests], capture_output=True, text=True, env=environment,
                          timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
