"""Products as cuBLAS is called here beside PyTorch's (cublasLt): those of the networks, with rows aligned and not."""

from __future__ import annotations

from typing import Any

import numpy as np
from common import FAKE, WORK, case
from gpu_ours import TIMES, repeated
from gpu_rows import alone

from recompute.language.types import TensorType
from recompute.runtime.cuda.device.device import open_device
from recompute.runtime.cuda.device.kernel import Buffer, Product

#: m, n, k, elements from one row of the result to the next (0: n), whether b is transposed
SHAPES = {
    "gpt2 logits": (8192, 50257, 768, 0, True),
    "gpt2 logits, rows of 50264": (8192, 50257, 768, 50264, True),
    "gpt2 logits, 50304 words": (8192, 50304, 768, 0, True),
    "gpt2 up": (8192, 3072, 768, 0, False),
    "bert": (4096, 768, 768, 0, False),
    "resnet 3x3 of 56": (18816, 64, 576, 0, False),
    "resnet 3x3 of 14": (5292, 256, 2304, 0, False),
    "resnet 1x1": (50176, 256, 64, 0, True),
    "head tile of 256 rows": (256, 4096, 768, 0, True),
    "head tile of 1024 rows": (1024, 4096, 768, 0, True),
    "lstm step": (128, 1024, 256, 0, True),
}
KINDS = (("bf16", False), ("f32", True), ("f32", False))


def ours(device: Any, m: int, n: int, k: int, lead: int, tb: bool, dtype: str, tf32: bool) -> float:
    """TFLOP/s of a product."""
    types = TensorType(dtype, (m, k)), TensorType(dtype, (n, k) if tb else (k, n)), TensorType(dtype, (m, lead or n))
    buffers, memory = [], []
    for t in types:
        address, held = device.allocate(t.nbytes)
        buffers.append(Buffer(address, t))
        memory.append(held)
    for b in buffers[:2]:
        device.upload(b, np.random.default_rng(0).standard_normal(b.shape, np.float32).astype(b.type.numpy))
    run = device.prepare(Product(*buffers, m, n, k, k, k if tb else n, lead or n, tb=tb, tf32=tf32))
    return round(2 * m * n * k / repeated(device, run) / 1e12, 1)


def theirs(m: int, n: int, k: int, tb: bool, dtype: str, tf32: bool) -> float:
    """PyTorch's."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = tf32
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    x = torch.randn(m, k, device="cuda", dtype=kind)
    y = torch.randn(*((n, k) if tb else (k, n)), device="cuda", dtype=kind)
    y = y.t() if tb else y
    for _ in range(3):
        x @ y
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TIMES):
            x @ y
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return round(2 * m * n * k * TIMES / start.elapsed_time(end) / 1e9, 1)


device = open_device(0)
for name, (m, n, k, lead, tb) in SHAPES.items():
    if FAKE:
        m, n, k, lead = m // 64, n // 64, k // 16, lead // 64
    with case("products", name) as found, alone(str(WORK / "device.lock")):
        for dtype, tf32 in KINDS:
            kind = f"{dtype}{' tf32' * tf32}"
            found[kind] = ours(device, m, n, k, lead, tb, dtype, tf32)
            if not FAKE and not lead:
                found[f"{kind} torch"] = theirs(m, n, k, tb, dtype, tf32)
