"""What `from_torch` writes out before PyTorch's exporter sees it: values and gradients are those of PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
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
    "multivariate gamma": (aten.special_multigammaln.default, ([[2.5, 3.0]], 3), {}),
    "softmax of nothing": (aten._safe_softmax.default, ([[-math.inf, -math.inf], [1.0, -math.inf]], 1), {}),
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


def _numbers(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


A, B, TALL = _numbers(2, 3, 3), _numbers(2, 3, 2), _numbers(4, 3)
POSITIVE = A @ A.mT + torch.eye(3, dtype=torch.float64)
LU = torch.linalg.lu_factor(A)
ALIKE = {
    "linalg_cholesky_ex.default": [(POSITIVE,), (POSITIVE, {"upper": True})],
    "linalg_solve_triangular.default": [(A, B, {"upper": True}), (A[0], B.mT, {"upper": False, "left": False})],
    "triangular_solve.default": [(B, A), (B, A, False, True, True)],
    "linalg_lu.default": [(A,), (TALL,), (TALL.mT,)],
    "linalg_lu_solve.default": [(*LU, B), (*LU, B.mT, {"left": False}), (*LU, B, {"adjoint": True})],
    "linalg_solve.default": [(A, B), (A, B.mT, {"left": False}), (A, B[:, :, 0])],
    "linalg_inv_ex.default": [(A,)],
    "linalg_tensorinv.default": [(_numbers(3, 2, 1, 6), 2)],
    "linalg_tensorsolve.default": [(_numbers(2, 3, 6), B[0].mT), (_numbers(6, 2, 3), B[0].mT, (0,))],
    "linalg_matrix_power.default": [(A, -2)],
    "linalg_slogdet.default": [(A,)],
    "linalg_vander.default": [(B,), (B, {"N": 4})],
    "linalg_matrix_exp.default": [(A,), (A * 20,)],
    "linalg_householder_product.default": [(TALL, _numbers(2))],
    "adaptive_avg_pool3d.default": [(_numbers(1, 2, 5, 4, 3), (2, 4, 5))],
    "adaptive_max_pool2d.default": [(_numbers(1, 2, 7, 4), (3, 2))],
    "avg_pool3d.default": [(_numbers(1, 5, 4, 6), (2, 3, 2), (3, 2, 4), (1, 0, 1), True, False, 5)],
}


@pytest.mark.parametrize("name", ALIKE)
def test_results_and_gradients_are_those_of_pytorch(name: str) -> None:
    """Both sides, both triangles, broadcast ones, other dimensions."""
    from recompute.torch.lowering import _table

    overload = getattr(getattr(aten, name.split(".")[0]), name.split(".")[1])
    for *args, last in ALIKE[name]:
        kwargs = last if isinstance(last, dict) else {}
        args = args if kwargs else [*args, last]
        outcomes = []
        for function in (overload, _table()[overload]):
            leaves = [a.clone().requires_grad_(a.is_floating_point()) if torch.is_tensor(a) else a for a in args]
            results = function(*leaves, **kwargs)
            results = list(results) if isinstance(results, (tuple, list)) else [results]
            total = sum((y * _numbers(*y.shape)).sum() for y in results if y.requires_grad)
            wanted = [a for a in leaves if torch.is_tensor(a) and a.requires_grad]
            outcomes.append([*results, *torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)])
        for theirs, ours in zip(*outcomes, strict=True):
            assert ours.dtype == theirs.dtype
            scale = max(theirs.detach().abs().double().max().item(), 1)
            np.testing.assert_allclose(ours.detach(), theirs.detach(), rtol=1e-9, atol=1e-11 * scale)


def test_large_matrices_are_refused_by_name() -> None:
    from recompute.torch.lowering import _table

    with pytest.raises(NotImplementedError, match="only of real matrices up to 64 are written out"):
        _table()[aten.linalg_inv.default](torch.eye(65))
