"""Operators that PyTorch's exporter lacks: losses and gradients beside PyTorch's, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import recompute as rc

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
pytestmark = pytest.mark.slow

X = [[0.3, -1.5, 0.3, 2.5], [-0.75, 4.0, -2.25, 0.125]]
Y = [[0.5, -0.0, float("nan"), -3.0], [0.0, 4.0, -2.5, 0.25]]


class Weighted(torch.nn.Module):
    """A weighted sum of a function of a parameter."""

    def __init__(self, function: Callable[[Any], Any], w: Any) -> None:
        super().__init__()
        self.function, self.w = function, torch.nn.Parameter(torch.tensor(w))

    def forward(self, one: Any) -> Any:
        y = self.function(self.w * one.sum())
        return (y * torch.arange(1.0, 1 + y.numel()).reshape(y.shape)).sum()


CASES = {
    "copysign": lambda w: torch.copysign(w, torch.tensor(Y).nan_to_num(1.0)),
    "fmax": lambda w: torch.fmax(w, torch.tensor(Y)),
    "fmin": lambda w: torch.fmin(torch.tensor(Y), w),
    "hypot": lambda w: torch.hypot(w, w.flip(1) + 1),
    "erfinv": lambda w: torch.erfinv(w / 4.5),
    "lgamma": lambda w: torch.lgamma(w),
    "cummax": lambda w: torch.cummax(w, 1)[0],
    "cummin of a number": lambda w: torch.cummin(w[0, 1], 0)[0],
    "indices of cummax": lambda w: w.gather(1, torch.cummax(w, 1)[1]),
    "median": lambda w: torch.median(w),
    "median of a number": lambda w: torch.median(w[0, 1], 0)[0],
    "diagonal_scatter": lambda w: torch.diagonal_scatter(w, w[0, :2] * 2, offset=1),
    "cov": lambda w: torch.cov(w, fweights=torch.tensor([1, 2, 1, 3])),
    "corrcoef": lambda w: torch.corrcoef(w),
    "combinations": lambda w: torch.combinations(w[0], 2, with_replacement=True),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_pytorch(name: str) -> None:
    module = Weighted(CASES[name], X)
    exact = Weighted(CASES[name], X).double()
    loss = exact(torch.ones(1, dtype=torch.float64))
    loss.backward()
    program = rc.from_torch(module, (torch.ones(1),), dynamic_batch=False)
    before = np.array(program.data["w"])
    rc.SGD(1.0).minimize(program.outputs[0])
    (value,) = rc.Executor().run(program, {"one": np.ones(1, "f4")}, [program.outputs[0]])
    gradient = exact.w.grad.numpy()
    assert value == pytest.approx(loss.item(), rel=2e-5, abs=2e-5)
    np.testing.assert_allclose(before - program.data["w"], gradient, rtol=2e-5, atol=2e-5 * np.abs(gradient).max())


def test_sparse_tensors_are_refused_by_name() -> None:
    module = torch.nn.Linear(4, 4)
    module.register_buffer("table", torch.eye(4).to_sparse())
    with pytest.raises(rc.ModelError, match="'table' is a sparse_coo tensor, which no ONNX model can hold"):
        rc.from_torch(module, (torch.ones(2, 4),))
    with pytest.raises(rc.ModelError, match="'example input 0' is a sparse_csr tensor"):
        rc.from_torch(torch.nn.Linear(4, 4), (torch.eye(4).to_sparse_csr(),))
