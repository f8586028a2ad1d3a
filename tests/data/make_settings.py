"""Makes settings.npz: label smoothing, ignored labels, and parameter groups as PyTorch has them.

python tests/data/make_settings.py  (with a Python that has torch)
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

STEPS = 4
#: learning rates that are exact in f32
GROUPS = {
    "sgd": (torch.optim.SGD, {"lr": 0.0625}, {"lr": 0.25, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.0625, "momentum": 0.9}, {"momentum": 0.5, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.0625, "weight_decay": 0.1}, {"betas": (0.8, 0.95), "eps": 1e-3}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.0625}, {"amsgrad": True, "lr": 0.125}),
    "adamw": (torch.optim.AdamW, {"lr": 0.0625, "weight_decay": 0.3}, {"lr": 0.125, "weight_decay": 0}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.0625}, {"alpha": 0.5, "centered": True, "momentum": 0.5}),
}


def losses(out: dict[str, np.ndarray], g: np.random.Generator) -> None:
    """Smoothed cross entropies and their gradients: reductions, class weights, ignored labels, probabilities."""
    x = g.standard_normal((2, 4, 3, 2)) * 3
    y = g.integers(0, 4, (2, 3, 2))
    some = y.copy()
    some[0, 1], some[1, 2, 0] = -100, -100
    soft = g.random(x.shape)
    soft /= soft.sum(1, keepdims=True)
    weight = g.random(4) + 0.5
    out["x"], out["y"], out["some"], out["soft"], out["weight"] = x, y, some, soft, weight
    cases = itertools.product(("y", "some", "soft"), ("mean", "sum", "none"), ("plain", "weight"), (0.0, 0.125, 1.0))
    for label, reduction, weighted, smoothing in cases:
        xt = torch.tensor(x, requires_grad=True)
        w = torch.tensor(weight) if weighted == "weight" else None
        target = torch.tensor(out[label])
        value = F.cross_entropy(xt, target, weight=w, reduction=reduction, label_smoothing=smoothing)
        value.sum().backward()
        key = f"loss.{label}.{reduction}.{weighted}.{smoothing}"
        out[key], out[f"{key}.dx"] = value.detach().numpy(), xt.grad.numpy()


def groups(out: dict[str, np.ndarray], g: np.random.Generator) -> None:
    """Two matrices, the second in a group of its own, after each step with given gradients."""
    out["w"], out["g"] = g.standard_normal((3, 4)), g.standard_normal((STEPS, 3, 4))
    for key, (cls, options, own) in GROUPS.items():
        for clip in (False, True):
            body, head = (torch.tensor(out["w"], requires_grad=True) for _ in range(2))
            optimizer = cls([{"params": [body]}, {"params": [head], **own}], **options)
            path = []
            for grad in out["g"]:
                body.grad, head.grad = torch.tensor(grad), torch.tensor(grad)
                if clip:
                    torch.nn.utils.clip_grad_norm_([body, head], 1.0)
                optimizer.step()
                path.append([w.detach().numpy().copy() for w in (body, head)])
            out[f"groups.{key}{'.clip' * clip}"] = np.array(path)


def main() -> None:
    """Writes settings.npz beside this file."""
    out: dict[str, np.ndarray] = {}
    g = np.random.default_rng(0)
    losses(out, g)
    groups(out, g)
    np.savez_compressed(Path(__file__).with_name("settings.npz"), **out)


if __name__ == "__main__":
    main()
