"""Writes autocast.npz: two small networks trained by PyTorch in float32 and under autocast in bfloat16 and float16.

    python tests/data/make_autocast.py        (needs PyTorch; made with 2.13 on a CPU)

For each network and precision: the losses of six SGD steps (float16 with GradScaler), and the gradients of the first;
the weights and the batch they begin with.  tests/training/test_precision_reference.py builds the same networks.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

STEPS, RATE = 6, 0.05


def cnn(p: dict, x: torch.Tensor) -> torch.Tensor:
    """Convolution, batch normalisation, ReLU, pooling, two linear layers."""
    x = F.conv2d(x, p["conv.w"], p["conv.b"], padding=1)
    x = F.relu(F.batch_norm(x, None, None, p["bn.w"], p["bn.b"], training=True))
    x = F.max_pool2d(x, 2).flatten(1)
    return F.linear(F.gelu(F.linear(x, p["fc.w"], p["fc.b"])), p["out.w"], p["out.b"])


def transformer(p: dict, x: torch.Tensor) -> torch.Tensor:
    """One post-norm block with two heads, then the mean over the steps."""
    n, t, d = x.shape
    q, k, v = (F.linear(x, p[f"{c}.w"], p[f"{c}.b"]).reshape(n, t, 2, d // 2).transpose(1, 2) for c in ("q", "k", "v"))
    a = torch.softmax(q @ k.transpose(2, 3) * (d // 2) ** -0.5, -1) @ v
    x = F.layer_norm(x + F.linear(a.transpose(1, 2).reshape(n, t, d), p["o.w"], p["o.b"]), (d,), p["ln1.w"], p["ln1.b"])
    h = F.linear(F.gelu(F.linear(x, p["up.w"], p["up.b"])), p["down.w"], p["down.b"])
    x = F.layer_norm(x + h, (d,), p["ln2.w"], p["ln2.b"])
    return F.linear(x.mean(1), p["out.w"], p["out.b"])


def linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's parameters."""
    return {f"{name}.w": (outputs, inputs), f"{name}.b": (outputs,)}


SHAPES = {
    "cnn": {
        "conv.w": (8, 3, 3, 3), "conv.b": (8,), "bn.w": (8,), "bn.b": (8,), **linear("fc", 128, 24),
        **linear("out", 24, 5),
    },
    "transformer": {
        **linear("q", 16, 16), **linear("k", 16, 16), **linear("v", 16, 16), **linear("o", 16, 16), "ln1.w": (16,),
        "ln1.b": (16,), **linear("up", 16, 32), **linear("down", 32, 16), "ln2.w": (16,), "ln2.b": (16,),
        **linear("out", 16, 5),
    },
}  # fmt: skip
NETWORKS = {"cnn": (cnn, (16, 3, 8, 8)), "transformer": (transformer, (16, 6, 16))}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    """Writes the file beside this script."""
    draw = np.random.default_rng(20261121)
    found: dict[str, np.ndarray] = {}
    for name, (network, shape) in NETWORKS.items():
        start = {}
        for n, s in SHAPES[name].items():
            scale = 1.0 if len(s) == 1 else float(np.prod(s[1:])) ** -0.5
            array = draw.standard_normal(s) * scale if len(s) > 1 else draw.uniform(-0.1, 0.1, s)
            start[n] = (array + (n in ("bn.w", "ln1.w", "ln2.w"))).astype(np.float32)
        x, label = draw.standard_normal(shape).astype(np.float32), draw.integers(0, 5, shape[0])
        found |= {f"{name}/{n}": a for n, a in start.items()} | {f"{name}/x": x, f"{name}/label": label}
        for kind, dtype in PRECISIONS.items():
            p = {n: torch.tensor(a, requires_grad=True) for n, a in start.items()}
            scaler = torch.amp.GradScaler("cpu", enabled=kind == "fp16")
            optimizer = torch.optim.SGD(p.values(), RATE)
            losses = []
            for step in range(STEPS):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                    loss = F.cross_entropy(network(p, torch.tensor(x)).float(), torch.tensor(label))
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                if step == 0:
                    found |= {f"{name}/{kind}/{n}": v.grad.numpy().copy() for n, v in p.items()}
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
            found[f"{name}/{kind}/losses"] = np.array(losses)
            print(name, kind, losses)
    np.savez_compressed(Path(__file__).parent / "autocast.npz", **found)


if __name__ == "__main__":
    main()
