"""Makes optimizers.npz: what PyTorch's optimizers, schedules and losses give.  Run with a Python that has torch.

python tests/data/make_optimizers.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

STEPS = 5
RATES = 16
# exact in f32, as the learning rate here is f32 and PyTorch's is a Python number
LR = 0.0625

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "sgd_decay": (torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "momentum_decay": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adagrad_decay": (torch.optim.Adagrad, {"weight_decay": 0.1, "initial_accumulator_value": 0.5}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rmsprop_decay": (torch.optim.RMSprop, {"weight_decay": 0.1, "alpha": 0.9}),
    "rmsprop_momentum": (torch.optim.RMSprop, {"momentum": 0.9}),
    "rmsprop_centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {}),
    "adam_decay": (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "betas": (0.5, 0.6)}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw_decay": (torch.optim.AdamW, {"weight_decay": 0.3}),
}

SCHEDULES = {
    "step": (lr_scheduler.StepLR, {"step_size": 3, "gamma": 0.5}),
    "multistep": (lr_scheduler.MultiStepLR, {"milestones": [2, 5, 6], "gamma": 0.3}),
    "exponential": (lr_scheduler.ExponentialLR, {"gamma": 0.9}),
    "cosine": (lr_scheduler.CosineAnnealingLR, {"T_max": 10, "eta_min": 0.01}),
    "polynomial": (lr_scheduler.PolynomialLR, {"total_iters": 7, "power": 2.0}),
    "onecycle": (lr_scheduler.OneCycleLR, {"max_lr": 0.5, "total_steps": RATES}),
    "onecycle_linear": (
        lr_scheduler.OneCycleLR,
        {"max_lr": 0.5, "total_steps": RATES, "anneal_strategy": "linear", "three_phase": True, "pct_start": 0.4},
    ),
}


def optimizers(out: dict[str, np.ndarray], g: np.random.Generator) -> None:
    """Parameters after each of some steps with given gradients."""
    out["w"] = g.standard_normal((3, 4))
    out["g"] = g.standard_normal((STEPS, 3, 4))
    for key, (cls, options) in OPTIMIZERS.items():
        w = torch.tensor(out["w"], requires_grad=True)
        optimizer = cls([w], lr=LR, **options)
        path = []
        for grad in out["g"]:
            w.grad = torch.tensor(grad)
            optimizer.step()
            path.append(w.detach().numpy().copy())
        out[f"optimizer.{key}"] = np.array(path)


def schedules(out: dict[str, np.ndarray]) -> None:
    """Learning rates of the first steps, from 0.5."""
    for key, (cls, options) in SCHEDULES.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        schedule = cls(optimizer, **options)
        rates = []
        for i in range(RATES):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if i + 1 < RATES:
                schedule.step()
        out[f"schedule.{key}"] = np.array(rates)


def losses(out: dict[str, np.ndarray], g: np.random.Generator) -> None:
    """Loss and gradient by the output."""
    cases = {}

    def case(key, function, x, y, **options):  # type: ignore[no-untyped-def]
        cases[key] = (function, x, y, options)

    x2, x3, x4 = g.standard_normal((5, 4)) * 3, g.standard_normal((2, 3, 4)), g.standard_normal((2, 3, 2, 2))
    y2 = g.integers(0, 4, 5)
    soft = g.random((5, 4))
    soft /= soft.sum(1, keepdims=True)
    weight = g.random(4) + 0.5
    out["weight"] = weight
    binary = g.integers(0, 2, (5, 4)).astype(np.float64)
    p, target = g.uniform(0.05, 0.95, (5, 4)), g.standard_normal((5, 4))

    def last_axis(x, y, **options):  # type: ignore[no-untyped-def]
        return F.cross_entropy(x.reshape(-1, x.shape[-1]), y.reshape(-1), **options)

    for reduction in ("mean", "sum", "none"):
        case(f"cross_entropy.{reduction}", F.cross_entropy, x2, y2, reduction=reduction)
        case(f"smooth_l1.{reduction}", F.smooth_l1_loss, x2, target, reduction=reduction, beta=0.5)
    case("cross_entropy.axis1", F.cross_entropy, x4, g.integers(0, 3, (2, 2, 2)))
    case("cross_entropy.last", last_axis, x3, g.integers(0, 4, (2, 3)))
    case("cross_entropy.weight", F.cross_entropy, x2, y2, weight=torch.tensor(weight))
    case("cross_entropy.ignore", F.cross_entropy, x2, y2, ignore_index=int(y2[0]))
    case("cross_entropy.soft", F.cross_entropy, x2, soft)
    case("nll.mean", F.nll_loss, np.log(soft), y2, weight=torch.tensor(weight))
    case("mse.mean", F.mse_loss, x2, target)
    case("l1.mean", F.l1_loss, x2, target)
    case("huber.mean", F.huber_loss, x2, target, delta=2.0)
    case("bce.mean", F.binary_cross_entropy, p, binary)
    case("bce_with_logits.mean", F.binary_cross_entropy_with_logits, x2 * 20, p)
    case("bce_with_logits.pos", F.binary_cross_entropy_with_logits, x2, binary, pos_weight=torch.tensor(weight))
    case("kl_div.batchmean", F.kl_div, np.log(p), soft, reduction="batchmean")
    case("kl_div.zeros", F.kl_div, np.log(p), binary)
    case("kl_div.log", F.kl_div, np.log(p), np.log(soft), log_target=True, reduction="sum")
    for key, (function, x, y, options) in cases.items():
        xt = torch.tensor(x, requires_grad=True)
        value = function(xt, torch.tensor(y), **options)
        value.sum().backward()
        out[f"loss.{key}"] = value.detach().numpy()
        out[f"loss.{key}.x"], out[f"loss.{key}.y"], out[f"loss.{key}.dx"] = x, y, xt.grad.numpy()


def main() -> None:
    """Writes optimizers.npz beside this file."""
    out: dict[str, np.ndarray] = {}
    g = np.random.default_rng(0)
    optimizers(out, g)
    schedules(out)
    losses(out, g)
    np.savez_compressed(Path(__file__).with_suffix("").with_name("optimizers.npz"), **out)


if __name__ == "__main__":
    main()
