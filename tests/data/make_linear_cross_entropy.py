"""Makes linear_cross_entropy.npz with PyTorch: losses and gradients of heads, in float64.

Each entry: the options as text, and arrays for tests/ops/test_linear_cross_entropy.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

#: options of LinearCrossEntropy; "bias": with one
CASES: list[dict] = [
    {},
    {"reduction": "sum", "bias": True},
    {"reduction": "none"},
    {"ignore_index": 3, "smoothing": 0.1, "bias": True},
    {"cap": 3.0, "scale": 1.5},
    {"z_loss": 0.01, "ignore_index": 3},
    {"reduction": "sum", "ignore_index": 3, "smoothing": 0.2, "cap": 2.0, "z_loss": 0.02, "scale": 0.7, "bias": True},
]


def loss_of(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, case: dict) -> torch.Tensor:
    """PyTorch's loss, with what it lacks."""
    logits = F.linear(x, w, bias) * case.get("scale", 1.0)
    if case.get("cap"):
        logits = case["cap"] * torch.tanh(logits / case["cap"])
    ignored = case.get("ignore_index", -100)
    reduction = case.get("reduction", "mean")
    loss = F.cross_entropy(
        logits, y, ignore_index=ignored, reduction=reduction, label_smoothing=case.get("smoothing", 0.0)
    )
    if case.get("z_loss"):
        counts = y != ignored
        z = case["z_loss"] * (torch.logsumexp(logits, 1) ** 2)[counts]
        loss = loss + (z.mean() if reduction == "mean" else z.sum())
    return loss


def main() -> None:
    """Writes the file beside this one."""
    torch.manual_seed(0)
    arrays: dict[str, np.ndarray] = {"cases": np.array(json.dumps(CASES))}
    for i, case in enumerate(CASES):
        x, w = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((9, 6), (11, 6)))
        bias = torch.randn(11, dtype=torch.float64, requires_grad=True) if case.get("bias") else None
        y = torch.randint(0, 11, (9,))
        y[::4] = 3
        loss = loss_of(x, w, bias, y, case)
        up = torch.randn_like(loss)
        loss.backward(up)
        found = {"x": x, "w": w, "y": y, "loss": loss, "up": up, "dx": x.grad, "dw": w.grad}
        if bias is not None:
            found |= {"bias": bias, "dbias": bias.grad}
        arrays |= {f"{i}.{k}": v.detach().numpy() for k, v in found.items()}
    np.savez_compressed(Path(__file__).with_suffix("").with_name("linear_cross_entropy.npz"), **arrays)


if __name__ == "__main__":
    main()
