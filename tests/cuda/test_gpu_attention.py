"""Attention on a device beside PyTorch's `scaled_dot_product_attention`: as near to float64 as PyTorch's own."""

from __future__ import annotations

from typing import Any

import cuda_cases
import numpy as np
import pytest
from test_cuda_attention import backward

from recompute.language.kernels import provider
from recompute.ops.attention.tiled import TiledAttention
from recompute.runtime.cuda.device.device import open_device
from recompute.testing import Case, Draw

pytestmark = pytest.mark.gpu
#: batch, heads, queries, keys, sizes of keys and values
SHAPES = ((2, 3, 300, 300, 64, 64), (1, 2, 77, 515, 128, 40), (1, 2, 260, 260, 256, 256))


def ours(case: Case, kernels: str) -> list[np.ndarray]:
    """By our kernels on the device, the same bits twice."""
    op = cuda_cases.case_block(case)[0].operators[0]
    made = cuda_cases.Bound(case, op, provider(kernels), open_device(0))
    once, again = made.run(0xFF), made.run(0x55)
    assert [a.tobytes() for a in once] == [a.tobytes() for a in again]
    return once


def theirs(torch: Any, ins: tuple[Any, ...], down: Any, causal: bool, kind: Any) -> list[np.ndarray]:
    """By PyTorch on the device: the result and three gradients."""
    q, k, v = (torch.tensor(np.asarray(x, np.float64), device="cuda", dtype=kind, requires_grad=True) for x in ins)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    y.backward(torch.tensor(np.asarray(down, np.float64), device="cuda", dtype=kind))
    return [x.detach().to(torch.float64).cpu().numpy() for x in (y, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("kernels", ["cuda", "cuda_tf32"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_near_as_pytorchs(shape: tuple[int, ...], dtype: str, kernels: str) -> None:
    """Twice PyTorch's largest error, or that of a rounding of every factor where that is more."""
    torch = pytest.importorskip("torch", reason="the comparison is with PyTorch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    if kernels == "cuda_tf32" and dtype != "f32":
        pytest.skip("TF32 is float32's")
    b, h, t, s, d, e = shape
    draw, causal = Draw(f"{shape}{dtype}"), t == s
    ins = tuple(draw(f"{dtype}[{b},{h},{n},{m}]") for n, m in ((t, d), (s, d), (s, e)))
    case = Case(TiledAttention(scale=d**-0.5, last=0 if causal else None), ins)
    grad = backward(draw, case)
    found = [ours(case, kernels)[0], *ours(grad, kernels)[:3]]
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    near = theirs(torch, ins, grad.inputs[6], causal, kind)
    exact = theirs(torch, ins, grad.inputs[6], causal, torch.float64)
    eps = {"f16": 2.0**-10, "bf16": 2.0**-7}.get(dtype, 2.0**-10 if kernels == "cuda_tf32" else 2.0**-20)
    for got, other, want in zip(found, near, exact, strict=True):
        scale = float(np.abs(want).max())
        limit = max(2 * float(np.abs(other - want).max()), 2 * eps * scale)
        assert np.abs(got.astype(np.float64) - want).max() <= limit
