"""Makes extremes.npz with PyTorch: values and gradients of operators where they are easily wrong, in float64.

    python tests/data/make_extremes.py     (torch 2.14.1)

Functions of one number at each of `NUMBERS`, of two at each pair, of rows at `ROWS`: `NAME.y`, and the gradients of the
sum of y, `NAME.d0`, `NAME.d1`.  tests/ops/test_extreme_gradients.py says which operators are beside them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import special

INF, NAN = float("inf"), float("nan")
NUMBERS = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 6.0, 200.0, -200.0]
NUMBERS += [1e-30, 1e30, -1e30]
PAIRS = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 200.0, 1e-30, 1e30]
ROWS = [
    [1, 2, 2], [2, 2, 2], [0, 0, 0], [0, 3, 2], [0, 3, 0], [200, 1, -300], [INF, 1, 2], [-INF, 1, 2],
    [-INF, -INF, -INF], [NAN, 1, 2], [1e30, 1, -1e30], [-1, -1, -3],
]  # fmt: skip


def cross_entropy(z: torch.Tensor, label: float) -> torch.Tensor:
    """That of a sigmoid, as modules write it."""
    return F.binary_cross_entropy(torch.sigmoid(z), torch.full_like(z, label), reduction="none")


ONE = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Celu": lambda x: F.celu(x, 0.5),
    "Clip": lambda x: torch.clamp(x, -1, 2), "Clip from below": lambda x: torch.clamp(x, min=0), "Cos": torch.cos,
    "Clip from above": lambda x: torch.clamp(x, max=1), "Cosh": torch.cosh, "Elu": F.elu, "Erf": torch.erf,
    "Exp": torch.exp, "Expm1": torch.expm1, "Floor": torch.floor, "Gelu": F.gelu,
    "Gelu by tanh": lambda x: F.gelu(x, approximate="tanh"), "HardSigmoid": F.hardsigmoid, "HardSwish": F.hardswish,
    "LeakyRelu": lambda x: F.leaky_relu(x, 0.0), "Log": torch.log, "Log1p": torch.log1p, "logit": torch.logit,
    "log of Sigmoid": F.logsigmoid, "Mish": F.mish, "Neg": torch.neg, "Reciprocal": torch.reciprocal, "Relu": F.relu,
    "Relu6": F.relu6, "Round": torch.round, "Selu": F.selu, "Shrink, hard": F.hardshrink,
    "Shrink, soft": F.softshrink, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh,
    "Sinc": lambda x: torch.sinc(x / torch.pi), "Softplus": F.softplus, "Softsign": F.softsign, "Sqrt": torch.sqrt,
    "Swish": F.silu, "Tan": torch.tan, "Tanh": torch.tanh, "ThresholdedRelu": lambda x: F.threshold(x, 1.0, 0.0),
    "x ** 0": lambda x: x**0, "x ** 2": lambda x: x**2, "x ** 3": lambda x: x**3, "x ** 0.5": lambda x: x**0.5,
    "x ** -1": lambda x: x**-1, "root of Relu": lambda x: F.relu(x).sqrt(),
    "root of Clip": lambda x: x.clamp(min=0).sqrt(), "Acos of Clip": lambda x: torch.acos(x.clamp(-1, 1)),
    "log of Clip": lambda x: x.clamp(min=0).log(), "root of Relu6": lambda x: F.relu6(x).sqrt(),
    "root of HardSigmoid": lambda x: F.hardsigmoid(x).sqrt(),
    "root of HardSwish": lambda x: F.hardswish(x).abs().sqrt(), "root of Shrink": lambda x: F.softshrink(x).sqrt(),
    "root of ThresholdedRelu": lambda x: F.threshold(x, 1.0, 0.0).sqrt(), "root of Celu": lambda x: F.celu(x).sqrt(),
    "binary cross entropy of Sigmoid, 0": lambda z: cross_entropy(z, 0),
    "binary cross entropy of Sigmoid, 1": lambda z: cross_entropy(z, 1),
    "root of Where": lambda x: torch.where(x > 0, x, torch.zeros(())).sqrt(),
    "root of Floor": lambda x: x.floor().sqrt(),
}  # fmt: skip
TWO = {
    "Add": torch.add, "Atan2": torch.atan2, "Div": torch.div, "LogAddExp": torch.logaddexp, "Max": torch.maximum,
    "Min": torch.minimum, "Mod": torch.fmod, "Mul": torch.mul, "Pow": torch.pow,
    "PRelu": lambda x, a: F.prelu(x[None], a)[0], "Sub": torch.sub, "Where": lambda x, y: torch.where(x < y, x, y),
    "xlogy": special.xlogy, "xlog1py": special.xlog1py, "root of Max": lambda x, y: torch.maximum(x, y.abs()).sqrt(),
}  # fmt: skip
OVER = {
    "LogSoftmax": lambda x: F.log_softmax(x, 1)[:, :1], "ReduceL1": lambda x: x.norm(1, 1),
    "ReduceL2": lambda x: x.norm(2, 1), "ReduceLogSumExp": lambda x: x.logsumexp(1), "ReduceMax": lambda x: x.amax(1),
    "ReduceMean": lambda x: x.mean(1), "ReduceMin": lambda x: x.amin(1), "ReduceProd": lambda x: x.prod(1),
    "ReduceSum": lambda x: x.sum(1), "Softmax": lambda x: F.softmax(x, 1)[:, :1], "CumProd": lambda x: x.cumprod(1),
    "CumSum": lambda x: x.cumsum(1), "max(dim)": lambda x: x.max(1).values, "min(dim)": lambda x: x.min(1).values,
    "std": lambda x: x.std(1), "norm(inf)": lambda x: x.norm(INF, 1), "norm(3)": lambda x: x.norm(3, 1),
    "TopK": lambda x: x.topk(2, 1).values, "MaxPool": lambda x: F.max_pool1d(x[:, None], 3),
    "root of ReduceMax": lambda x: x.amax(1).sqrt(), "root of max(dim)": lambda x: x.max(1).values.sqrt(),
    "LayerNormalization": lambda x: F.layer_norm(x, (3,))[:, :1],
}  # fmt: skip


def inputs(name: str) -> list[np.ndarray]:
    """What a function is given."""
    if name in ONE:
        return [np.array([x for x in NUMBERS if "entropy" not in name or np.isfinite(x)])]
    if name in TWO:
        return list(map(np.ravel, np.meshgrid(PAIRS, PAIRS, indexing="ij")))
    return [np.array(ROWS, float)]


def main() -> None:
    """Writes the file beside this one."""
    torch.set_default_dtype(torch.float64)
    found: dict[str, np.ndarray] = {}
    for name, function in {**ONE, **TWO, **OVER}.items():
        given = [torch.tensor(a, requires_grad=True) for a in inputs(name)]
        y = function(*given)
        if y.requires_grad:
            y.sum().backward()
        found[f"{name}.y"] = y.detach().numpy()
        for i, x in enumerate(given):
            found[f"{name}.x{i}"] = x.detach().numpy()
            found[f"{name}.d{i}"] = np.zeros(x.shape) if x.grad is None else x.grad.numpy()
    np.savez_compressed(Path(__file__).with_name("extremes.npz"), **found)


if __name__ == "__main__":
    main()
