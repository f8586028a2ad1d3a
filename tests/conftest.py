"""Options and shared pieces of the tests."""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if threading.current_thread() is threading.main_thread():  # jobs in the background and under nohup ignore them
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # workers share the processors; set before NumPy is imported
    share = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    for library in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
        os.environ.setdefault(f"{library}_NUM_THREADS", str(share))


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest) -> Any:
    """A place for CUDA kernels: this processor in a device's stead, and the device itself with `-m gpu`."""
    from recompute.runtime import CUDAPlace, EmulatedCUDAPlace
    from recompute.runtime.cuda.device.emulator import compiler

    if request.param == "cuda":
        return CUDAPlace(0)
    if not compiler():
        pytest.skip("the emulated device needs a C++ compiler (g++ or clang++, or $CXX)")
    return EmulatedCUDAPlace()


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels take operands of any size; how convolutions were computed before is forgotten, and afterwards."""
    from recompute.language import kernels
    from recompute.runtime import cpu
    from recompute.runtime.cpu.providers import convolution

    cpu.register_all()
    cpu.families.FAMILIES.table()
    convolution._plan.cache_clear()
    kernels._answers.clear()
    modules = [m for name, m in sys.modules.items() if name.startswith(cpu.__name__)]
    modules.append(importlib.import_module("recompute.ops.fused.loop"))
    for module in modules:
        for name in ("ENOUGH", "SMALLEST"):
            monkeypatch.setattr(module, name, 0, raising=False)
    yield
    convolution._plan.cache_clear()
    kernels._answers.clear()


@pytest.fixture
def mpi() -> None:
    """Skips tests that start ranks where none can be started."""
    from distributed_cases import without_mpi

    if why := without_mpi():
        pytest.skip(why)


@pytest.fixture
def before_fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that no launcher has started, before `fleet.init`."""
    from recompute.training.fleet import world

    for name in list(os.environ):
        if name.startswith(("PADDLE_", "PMI_", "PMIX_", "OMPI_", "MV2_")):
            monkeypatch.delenv(name)
    yield
    world.leave()


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("RECOMPUTE_TEST_PLACE") == "fake":  # see cuda_cases.py
        import cuda_fake

        cuda_fake.install()
    if config.option.record_durations and not os.environ.get("PYTEST_XDIST_WORKER"):
        config.pluginmanager.register(Recorder())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected text in tests/golden")
    parser.addoption(
        "--record-durations", action="store_true", help=f"rewrite what {DURATIONS.name} says of these tests"
    )
    parser.addoption(
        "--one-in", type=int, default=1, metavar="N",
        help=f"of the tests of more than {LONG} s, run those that this commit draws: each commit draws one in N",
    )  # fmt: skip


#: seconds of the tests that take longer than QUICK, in lines `seconds identifier`: they are marked slow
DURATIONS, QUICK = Path(__file__).with_name("durations.txt"), 0.25


def recorded() -> dict[str, float]:
    """Seconds by identifier, of slow tests."""
    lines = DURATIONS.read_text().splitlines() if DURATIONS.exists() else []
    pairs = (line.split(maxsplit=1) for line in lines if not line.startswith("#"))
    return {name: float(seconds) for seconds, name in pairs}


class Recorder:
    """Writes how long tests took; what it says of those that did not run, or not to their end, stays."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.others: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.others.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {n: s for n, s in self.seconds.items() if n not in self.others}
        slow = {n: s for n, s in {**recorded(), **passed}.items() if s > QUICK}
        head = f"# Tests of more than {QUICK} seconds; written by pytest -n 2 -m 'not hours' --record-durations.\n"
        DURATIONS.write_text(head + "".join(f"{s:.1f} {n}\n" for n, s in sorted(slow.items())))


#: seconds that the slow cases of one test may take together; what is beyond them is a sweep by hand
SWEEP = 2.0
#: seconds above which a test is not run by every commit where `--one-in` says so
LONG = 1.5
#: tests of which every case is of another operator: none stands for another
EACH_ITS_OWN = ("test_samples", "test_samples_as_in_float32", "test_operator", "test_as_in_float32",
                "test_gradients_as_in_float32", "test_corners", "test_kernel_agrees")  # fmt: skip


def swept(slow: dict[str, float]) -> set[str]:
    """The cases beyond SWEEP, drawn by the digests of their names: few change when one gets slower.  Where each takes
    longer, all but the quickest."""
    spent: dict[str, float] = {}
    beyond = set()
    for name in sorted(slow, key=lambda n: (max(slow[n], SWEEP), hashlib.sha256(n.encode()).digest())):
        test = name.partition("[")[0]
        if test.endswith(EACH_ITS_OWN) or test not in spent or spent[test] + slow[name] <= SWEEP:
            spent[test] = spent.get(test, 0.0) + slow[name]
        else:
            beyond.add(name)
    return beyond


def drawn(slow: dict[str, float], one_in: int) -> set[str]:
    """The long tests that another commit draws."""
    if one_in <= 1:
        return set()
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, check=True).stdout
    digests = {n: hashlib.sha256(commit + n.encode()).digest() for n, seconds in slow.items() if seconds > LONG}
    return {n for n, digest in digests.items() if digest[0] % one_in}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = recorded() if os.environ.get("RECOMPUTE_TEST_PLACE") != "cuda" else {}  # they are slow on a processor
    beyond = swept(slow)
    beyond |= drawn({n: s for n, s in slow.items() if n not in beyond}, config.option.one_in)
    for item in items:
        if item.nodeid in beyond:
            item.add_marker(pytest.mark.hours)
        elif item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    if os.environ.get("PYTEST_XDIST_WORKER"):
        for item in items:
            if "alone" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="nothing else may use the device beside it: run it without -n"))
    if any("gpu" in item.keywords for item in items) and (reason := _why_no_gpu()) is not None:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


#: what extras bring
OPTIONAL = ("PIL", "cupy", "hypothesis", "llvmlite", "matplotlib", "mpi4py", "numba", "onnxruntime", "ortools",
            "pyarrow", "sklearn", "tensorboard", "tokenizers", "xdist")  # fmt: skip


def pytest_collection_finish() -> None:
    gc.freeze()  # thousands of tests stay until the end: collections of garbage need not look through them


def pytest_unconfigure() -> None:
    gc.freeze()  # pytest then collects five times: seconds, in processes that held many programs


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """A test that needs an extra is skipped where it is missing: there the product's own error names it."""
    from recompute.errors import RecomputeError

    try:
        return (yield)
    except RecomputeError as e:
        told = [name for name in OPTIONAL if name in str(e) and importlib.util.find_spec(name) is None]
        if not told:
            raise
        pytest.skip(f"{', '.join(told)}: {e}")


def _why_no_gpu() -> str | None:
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed (pip install 'onnx-recompute[cuda12]' or [cuda13])"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except Exception as e:
        return f"no CUDA device: {e}"
