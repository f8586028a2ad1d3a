"""Attention's kernels beside PyTorch's `scaled_dot_product_attention`, forward and backward, in one process.

    OMP_NUM_THREADS=1 python benchmarks/pytorch/attention.py --only causal --json attention.json

Runs take turns; a row has medians of milliseconds and the median of the runs' ratios, ours over PyTorch's.  One thread:
processor time, so that other work beside it does not count; several: elapsed time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from table import rows
from torch.nn import functional

from recompute.language.ir import Operator, Value
from recompute.language.kernels import accepting, provider
from recompute.language.types import TensorType
from recompute.ops.attention.tiled import TiledAttention
from recompute.ops.attention.tiled_grad import TiledAttentionGrad
from recompute.runtime.cpu import register_all
from recompute.runtime.cpu.device import native

#: batch, heads, heads of keys, sequence, elements of a head; causal; whether there is a bias that learns; dropout
SHAPES: dict[str, tuple[tuple[int, int, int, int, int], bool, bool, float]] = {
    "GPT-2, causal": ((1, 12, 12, 1024, 64), True, False, 0.0),
    "BERT": ((8, 12, 12, 512, 64), False, False, 0.0),
    "BERT, dropout": ((8, 12, 12, 512, 64), False, False, 0.1),
    "BERT, short": ((8, 12, 12, 128, 64), False, False, 0.0),
    "ViT-B/16": ((8, 12, 12, 197, 64), False, False, 0.0),
    "Swin's windows": ((256, 3, 3, 49, 32), False, True, 0.0),
    "LLaMA, causal": ((1, 32, 8, 2048, 128), True, False, 0.0),
    "4,096": ((1, 4, 4, 4096, 64), False, False, 0.0),
    "4,096, causal": ((1, 4, 4, 4096, 64), True, False, 0.0),
    "16,384": ((1, 4, 4, 16384, 64), False, False, 0.0),
}
LINE = (
    "{network:16} PyTorch {torch_forward:8.2f} {torch_backward:8.2f}  ours {forward:8.2f} {backward:8.2f} ms  ratios "
    "{ratio_forward:.2f} {ratio_backward:.2f}, both {ratio:.2f}  ({gflops:.0f} GFLOP/s, difference {difference:.0e})"
)


def bound(op: Any, arrays: Sequence[Any], want: int) -> tuple[list[np.ndarray], Callable[[], object]]:
    """The results of an operator's kernel, and what computes them."""
    ins = [None if a is None else Value(f"x{i}", TensorType.of(a)) for i, a in enumerate(arrays)]
    types = op.infer(*(None if v is None else v.type for v in ins))[:want]
    applied = Operator(op, tuple(ins), tuple(Value(f"y{i}", t) for i, t in enumerate(types)))
    kernel = provider(accepting(("numba",), applied))
    outs = [np.empty(t.shape, t.numpy) for t in types]
    scratch = [np.empty(t.shape, t.numpy) for t in kernel.scratch(applied)]
    return outs, native.Table(kernel.bind(applied, arrays, outs, scratch)).run


def measured(name: str, given: Any) -> dict[str, Any]:
    """A row."""
    (batch, heads, shared, length, size), causal, biased, ratio = given
    clock = time.process_time if native.threads() == 1 else time.perf_counter
    g = np.random.default_rng(0)
    shapes = ((batch, heads, length, size), (batch, shared, length, size), (batch, shared, length, size))
    arrays = [g.standard_normal(s).astype(np.float32) for s in shapes]
    arrays += [g.standard_normal((1, heads, length, length)).astype(np.float32)] if biased else []
    leaves = [torch.from_numpy(a).requires_grad_() for a in arrays]
    dy = g.standard_normal(shapes[0]).astype(np.float32)
    groups = heads // shared
    if groups > 1:  # heads that share keys are an axis of their own
        full = (batch, shared, groups, length, size)
        arrays = [a.reshape(full if i == 0 else (batch, shared, 1, length, size)) for i, a in enumerate(arrays)]
    options: dict[str, Any] = {"scale": size**-0.5, "last": 0 if causal else None, "ratio": ratio}
    full, step = [*arrays, *[None] * (4 - len(arrays))], [np.array(0)] if ratio else []
    made, forward = bound(TiledAttention(**options), [*full, *step], 2)
    read = [*full, *made, dy.reshape(made[0].shape), *step]
    grads, backward = bound(TiledAttentionGrad(**options), read, len(arrays))

    def attention() -> torch.Tensor:
        mask = leaves[3] if biased else None
        return functional.scaled_dot_product_attention(
            *leaves[:3], attn_mask=mask, is_causal=causal, enable_gqa=groups > 1, dropout_p=ratio
        )

    times, difference = [], float("nan") if ratio else 0.0
    for turn in range(4 if length > 8192 else 10):
        marks = [clock()]
        y = attention()
        marks.append(clock())
        theirs = torch.autograd.grad(y, leaves, torch.from_numpy(dy))
        marks.append(clock())
        for run in (forward, backward):
            run()
            marks.append(clock())
        if turn:  # the first one warms up
            times.append(np.diff(marks))
        elif not ratio:  # others are dropped
            pairs = zip((made[0], *grads), (y.detach(), *theirs), strict=True)
            difference = max(float(np.abs(a.reshape(-1) - b.numpy().reshape(-1)).max() / a.max()) for a, b in pairs)
    return row(name, np.array(times), difference, 14 * batch * heads * length**2 * size // (2 if causal else 1))


def row(name: str, times: np.ndarray, difference: float, flops: int) -> dict[str, Any]:
    """Medians of [runs, (theirs forward, backward, ours forward, backward)]."""
    median = np.median(times, 0) * 1e3
    ratios = np.median(times[:, 2:] / times[:, :2], 0)
    found = dict(zip(("torch_forward", "torch_backward", "forward", "backward"), median.tolist(), strict=True))
    found |= {"ratio_forward": float(ratios[0]), "ratio_backward": float(ratios[1])}
    found["ratio"] = float(np.median(times[:, 2:].sum(1) / times[:, :2].sum(1)))
    found["gflops"] = flops / median[2:].sum() / 1e6
    return {"network": name, "threads": native.threads(), "difference": difference, **found}


def main() -> None:
    """The table."""
    register_all()
    torch.set_num_threads(native.threads())
    rows(SHAPES, __doc__, LINE, measured)


if __name__ == "__main__":
    main()
