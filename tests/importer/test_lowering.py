"""What `from_torch` writes out before PyTorch's exporter sees it: values and gradients are those of PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
aten = torch.ops.aten

_ROWS = [[0.0, 0.0, 0.0], [1.0, -2.0, 2.0], [0.0, 3.0, 0.0]]
_OTHER = [[0.0, 1.0, 1.0], [1.0, -2.0, 2.0], [2.0, 3.0, 1.0]]
_PLACES = [[0, 2, 0], [0, 1, 0], [0, 2, 2]]
CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "norm 3 of zeros": (aten.linalg_vector_norm.default, (_ROWS, 3.0, [1], True), {}),
    "norm 0.5 of zeros": (aten.linalg_vector_norm.default, (_ROWS, 0.5, [1]), {}),
    "norm of all": (aten.linalg_vector_norm.default, (_ROWS, 1.5, None, True), {}),
    "distances, infinity, ties": (aten.cdist.default, (_ROWS, _OTHER, math.inf), {}),
    "distances of equal rows": (aten.cdist.default, (_ROWS, _OTHER, 2.0), {}),
    "pairs of rows": (aten.pdist.default, (_ROWS, 2.0), {}),
    "standard deviation 0": (aten.std.correction, ([[1.0, 1.0, 1.0], [1.0, 2.0, 4.0]], [1]), {"correction": 1}),
    "standard deviation of all": (aten.std.default, (_ROWS,), {}),
    "standard deviation, biased": (aten.std.dim, (_ROWS, [0], False), {}),
    "product with zeros": (aten.cumprod.default, ([2.0, 0.0, 3.0, 0.0, 4.0], 0), {}),
    "products of columns": (aten.cumprod.default, (_OTHER, 0), {}),
    "log of sums": (aten.logcumsumexp.default, ([-1000.0, 2.0, 1000.0, 999.0], 0), {}),
    "mean of scattered": (aten.scatter_reduce.two, (_ROWS, 0, _PLACES, _OTHER, "mean"), {}),
    "mean, without self": (aten.scatter_reduce.two, (_ROWS, 0, _PLACES, _OTHER, "mean"), {"include_self": False}),
    "stable sort": (aten.sort.stable, (_OTHER,), {"stable": True, "dim": 1, "descending": True}),
    "third smallest": (aten.kthvalue.default, ([[3.0, 1.0, 2.0, 4.0]], 3, 1, True), {}),
    "median of four": (aten.median.dim, ([[3.0, 1.0, 2.0, 4.0]], 1), {}),
    "weights of a vector": (aten._weight_norm.default, ([1.0, -2.0, 3.0], [2.0, 0.5, 1.0], 0), {}),
    "places": (aten.searchsorted.Tensor, ([-1.0, 0.0, 0.0, 2.0], _ROWS), {}),
    "places on the right": (aten.searchsorted.Tensor, ([-1.0, 0.0, 0.0, 2.0], _ROWS), {"right": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_written_out_operators_are_pytorchs(name: str) -> None:
    from recompute.torch.lowering import _table

    operator, given, options = CASES[name]
    found = [_run(f, given, options) for f in (operator, _table()[operator])]
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def _run(function: Any, given: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """The value, and gradients of a sum in which every element counts otherwise."""
    args = [_tensor(a) for a in given]
    y = function(*args, **options)
    y = y[0] if isinstance(y, tuple) else y
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    if not y.is_floating_point():
        return [y]
    factors = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad((y * factors).sum(), leaves)]


def _tensor(a: Any) -> Any:
    if not isinstance(a, list) or (len(a) == 1 and a[0] in (0, 1)):
        return a
    tensor = torch.tensor(a, dtype=torch.int64 if a is _PLACES else torch.float64)
    return tensor.requires_grad_(a is not _PLACES)
