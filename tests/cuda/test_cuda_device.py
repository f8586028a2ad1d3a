"""Training steps on `CUDAPlace(0)` with a strict fake below CuPy (cuda_fake.py): graphs, streams, copies and launch
parameters as CUDA wants them, and the bits of the emulated place."""

from __future__ import annotations

import ctypes
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_fake
import numpy as np
import pytest
from zoo_cases import network

import recompute as rc
from recompute.compiling.compiler import compile_step
from recompute.errors import JobError
from recompute.language.types import TensorType
from recompute.runtime import EmulatedCUDAPlace
from recompute.runtime.cuda.device import device as devices
from recompute.runtime.cuda.device import emulator
from recompute.runtime.cuda.device.kernel import Await, Buffer, Copy, Kernel, Product, Transfer

#: network of the zoo, and options of its step
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {}),
    "lenet": ("lenet", {}),
    "lstm": ("lstm", {}),
    "resnet18": ("resnet18", {"precision": "tf32"}),
    "bert-tiny": ("bert-tiny", {}),
    "gpt2-tiny": ("gpt2-tiny", {"precision": "fp16"}),
    "mlp bf16": ("mlp", {"precision": "bf16"}),
    "bert-tiny bf16": ("bert-tiny", {"precision": "bf16"}),
    "bert-tiny offload": ("bert-tiny", {"offload": True}),
}
COUNT = 4


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., cuda_fake.Cuda]]:
    """Installs the fake; no device of before or after it is known."""
    if why := cuda_fake.missing():
        pytest.skip(why)
    devices._opened.cache_clear()
    made: list[cuda_fake.Cuda] = []

    def install(**how: Any) -> cuda_fake.Cuda:
        made.append(cuda_fake.install(monkeypatch.setattr, **how))
        return made[-1]

    yield install
    devices._opened.cache_clear()
    gc.collect()
    for one in made:
        assert not one.counts["written beside allocations"]


def trained(name: str, place: Any, cuda: cuda_fake.Cuda | None = None) -> tuple[list[bytes], dict[str, bytes], Any]:
    """Losses and all state after some steps, as bits, and the session; `cuda` counts the last step alone."""
    zoo, options = STEPS[name]
    program, loss, feed = network(zoo)
    if options.get("offload"):
        options = {**options, "checkpoints": [c for c in rc.models.info(zoo).checkpoints if c in program]}
    step = compile_step(program, loss, rc.Momentum(learning_rate=0.01), place=place, **options)
    after, executor = step.program.clone(), rc.Executor(place)
    losses = []
    for _ in range(COUNT):
        if cuda is not None:
            cuda.counts.clear()
        losses.append(executor.run(after, feed, [loss])[0].tobytes())
    counted = Counter() if cuda is None else Counter(cuda.counts)
    session = executor.session(after, [loss])
    assert session.measured_peak_bytes == step.figures.peak_bytes
    state = {n: np.array(a).tobytes() for n, a in after.data.items()}
    return losses, state, (session, counted, len(feed))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_the_emulated_places_bits(name: str, fake: Any, record_property: Any) -> None:
    wanted = trained(name, EmulatedCUDAPlace())
    for early in (False, True):
        cuda = fake(early=early)
        devices._opened.cache_clear()
        losses, state, (session, counts, fed) = trained(name, rc.CUDAPlace(0), cuda)
        assert losses == wanted[0] and state == wanted[1]
        calls = [c for s in session.steps for c in s.calls if not isinstance(c, Await)]
        reported = bool(session._reporters)
        record_property("counts", str(dict(counts)))
        assert not session.on_host and not counts["allocations"]
        work = ("kernels", "products", "fills", "copies on device", "copies to device", "copies to host")
        beside = fed + 1 + reported * (1 + bool(session._parts[0]))
        assert sum(counts[k] for k in work) == len(calls) + beside, (counts, len(calls), beside)


# -- what the fake refuses --------------------------------------------------------------------------------------------


def opened(fake: Any, **how: Any) -> tuple[cuda_fake.Cuda, Any]:
    cuda = fake(**how)
    return cuda, devices.open_device(0)


def buffer(device: Any, dtype: str, *shape: int) -> tuple[Buffer, Any]:
    t = TensorType(dtype, shape)
    address, memory = device.allocate(t.nbytes)
    return Buffer(address, t), memory


def unjoined(cuda: cuda_fake.Cuda, device: Any, x: Buffer, y: Buffer) -> None:
    beside = device.new_stream()
    begun = device.mark()
    begun.record(device.stream)
    beside.wait_event(begun)
    device.clear(x, beside)


def from_outside(cuda: cuda_fake.Cuda, device: Any, x: Buffer, y: Buffer) -> None:
    beside, done = device.new_stream(), device.mark()
    done.record(beside)
    device.stream.wait_event(done)


def pageable(cuda: cuda_fake.Cuda, device: Any, x: Buffer, y: Buffer) -> None:
    device.upload(x, np.zeros(x.shape, np.float32))


def beyond(cuda: cuda_fake.Cuda, device: Any, x: Buffer, y: Buffer) -> None:
    device.prepare(Copy(Buffer(x.address + 64, x.type), y))()


def wide_block(cuda: cuda_fake.Cuda, device: Any, x: Buffer, y: Buffer) -> None:
    device.prepare(ADD(64, x, y, 1.0, 64, block=512))()


def wrong_words(cuda: cuda_fake.Cuda, device: Any, x: Buffer, y: Buffer) -> None:
    text = Kernel("wrong_words", "const float* x, float* y, Pair p", "    y[threadIdx.x] = x[p.b];",
                  before="struct Pair { int a; long long b; };")  # fmt: skip
    device.prepare(text(64, x, y, (ctypes.c_int * 2)(0, 1)))()


def no_rows(cuda: cuda_fake.Cuda, device: Any, x: Buffer, y: Buffer) -> None:
    device.prepare(Product(x, x, y, 8, 8, 8, 4, 8, 8))()


ADD = Kernel("fake_add", "const float* x, float* y, float by, long long n",
             "    long long i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < n) y[i] = x[i] + by;")  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "captured", "said"),
    [(unjoined, True, "not joined"), (from_outside, True, "event from outside"), (pageable, True, "pageable"),
     (lambda c, d, x, y: d.allocate(8), True, "allocation while"), (lambda c, d, x, y: d.synchronize(), True, "waits"),
     (beyond, False, "beyond an allocation"), (wide_block, False, "fake_add"), (no_rows, False, "status 7"),
     (wrong_words, False, "parameters of")],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_what_cuda_forbids_is_an_error(wrong: Any, captured: bool, said: str, fake: Any) -> None:
    cuda, device = opened(fake)
    (x, _x), (y, _y) = buffer(device, "f32", 64), buffer(device, "f32", 64)
    device.cublas()
    with pytest.raises((AssertionError, JobError), match=said):
        if captured:
            device.capture(lambda: wrong(cuda, device, x, y))
        else:
            wrong(cuda, device, x, y)
            device.synchronize()


def test_a_write_beside_an_allocation_is_seen(fake: Any) -> None:
    cuda, device = opened(fake)
    (x, _x), (y, memory) = buffer(device, "f32", 65), buffer(device, "f32", 64)
    device.prepare(ADD(65, x, y, 1.0, 65))()
    device.synchronize()
    del memory
    assert cuda.counts["written beside allocations"] == 1
    cuda.counts.clear()


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_an_order_that_no_event_keeps_is_not_kept(early: bool, graph: bool, fake: Any) -> None:
    """A copy to the host, which the kernel behind it must wait for, and does where an event says so."""
    cuda, device = opened(fake, early=early)
    (x, _x), (address, _host) = buffer(device, "f32", 64), device.allocate_host(256)
    seen = Buffer(address, TensorType("f32", (64,), host=True))
    transfer, awaited = (device.prepare(c) for c in (Transfer(seen, x), Await(seen)))
    again = device.prepare(ADD(64, x, x, 1.0, 64))

    def run(order: list[Any]) -> float:
        device.upload(x, np.zeros(64, np.float32))
        (device.capture(lambda: [f() for f in order]) if graph else lambda: [f() for f in order])()
        device.synchronize()
        cuda.drain()
        return float(emulator.view(seen)[0])

    assert run([transfer, awaited, again]) == 0
    assert run([transfer, again, awaited]) == (0 if early else 1)
    assert run([again, transfer, awaited]) == 1


def test_a_processs_own_memory_is_what_nvidias_tool_says(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cuda, device = opened(fake)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.process_bytes() == cuda_fake.MEMORY - cuda.free()
    tool = tmp_path / "nvidia-smi"
    for said, bytes_ in ((f"1, 4\n{os.getpid()}, 12\n", 12 << 20), (f"{os.getpid()}, [N/A]\n", None), ("", None)):
        tool.write_text(f"#!/bin/sh\nprintf '%s' '{said}'\n")
        tool.chmod(0o700)
        assert device.process_bytes() == (cuda_fake.MEMORY - cuda.free() if bytes_ is None else bytes_)
