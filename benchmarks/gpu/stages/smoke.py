"""Each way to reach the device, once, the simplest first; exit code 3 where the device cannot be used at all."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from common import FAKE, case
from gpu_ours import ceilings

from recompute.language.types import TensorType
from recompute.runtime.cuda.device.device import open_device
from recompute.runtime.cuda.device.kernel import Buffer, Copy, Fill, Kernel, Product

STAGE, SIZE = "smoke", 512
#: element type, TF32, the largest error of a product beside float64
PRODUCTS = (
    ("f32", False, 1e-5),
    ("f32", True, 5e-3),
    ("bf16", False, 1e-2),
    ("f16", False, 2e-3),
    ("f64", False, 1e-12),
)
T = TensorType("f32", (1000,))
ADD = Kernel("smoke_add", "const float* x, float* y, float by, long long n",
             "    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;\n"
             "    if (i < n) y[i] = x[i] + by;")  # fmt: skip
memory: list[Any] = []
device: Any = None


def buffer(t: TensorType) -> Buffer:
    """Memory for as long as this runs."""
    address, held = device.allocate(t.nbytes)
    memory.append(held)
    return Buffer(address, t)


def product(dtype: str, tf32: bool) -> tuple[float, Any]:
    """The error beside float64, and what runs it."""
    t, draw = TensorType(dtype, (SIZE, SIZE)), np.random.default_rng(1)
    a, b, c = (buffer(t) for _ in range(3))
    x, y = (draw.standard_normal(t.shape, np.float32).astype(t.numpy) for _ in range(2))
    device.upload(a, x)
    device.upload(b, y)
    run = device.prepare(Product(a, b, c, *[SIZE] * 6, tf32=tf32))
    run()
    want = x.astype(np.float64) @ y.astype(np.float64)
    got = device.download(c).astype(np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max()), run


with case(STAGE, "open") as found:
    begin = time.perf_counter()
    device = open_device(0)
    found |= {"device": device.name, "target": device.target, "processors": device.processors,
              "open_seconds": time.perf_counter() - begin, "free": device.free_bytes(),
              "own": device.process_bytes()}  # fmt: skip
if device is None:
    sys.exit(3)
numbers = np.arange(1000, dtype=np.float32)
x, y, z = buffer(T), buffer(T), buffer(T)
with case(STAGE, "copy") as found:
    device.upload(x, numbers)
    found["ok"] = bool((device.download(x) == numbers).all())
    device.upload(x, numbers + 1, staged=True)
    found["staged"] = bool((device.download(x) == numbers + 1).all())
with case(STAGE, "compile and launch") as found:
    begin = time.perf_counter()
    device.compile([ADD])
    found["compile_seconds"] = time.perf_counter() - begin
    device.prepare(ADD(1000, x, y, 2.5, 1000))()
    found["ok"] = bool((device.download(y) == numbers + 3.5).all())
for dtype, tf32, most in PRODUCTS:
    with case(STAGE, f"cuBLAS {dtype}{' tf32' * tf32}") as found:
        found["deviation"], _ = product(dtype, tf32)
        found["ok"] = found["deviation"] < most
with case(STAGE, "graph of a launch, a product, a copy and a fill") as found:
    _, multiply = product("f32", False)
    calls = [device.prepare(ADD(1000, x, y, 1.0, 1000)), multiply, device.prepare(Copy(z, y)), device.prepare(Fill(y))]
    replay = device.capture(lambda: [run() for run in calls])
    device.upload(x, numbers)
    replay()
    replay()
    found["ok"] = bool((device.download(z) == numbers + 1).all() and not device.download(y).any())
    begin, count = time.perf_counter(), 5 if FAKE else 200
    for _ in range(count):
        replay()
    found["host_us_a_replay"] = (time.perf_counter() - begin) / count * 1e6
    device.synchronize()
    found["us_a_replay"] = (time.perf_counter() - begin) / count * 1e6
with case(STAGE, "ceilings") as found:
    found |= ceilings({})
