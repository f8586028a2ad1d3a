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
_NAN = [[math.nan, 9.0, 0.0], [1.0, 4.0, 9.0], [9.0, math.nan, 5.0]]
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
    "largest, without self": (aten.scatter_reduce.two, (_NAN, 0, _PLACES, _OTHER, "amax"), {"include_self": False}),
    "stable sort": (aten.sort.stable, (_OTHER,), {"stable": True, "dim": 1, "descending": True}),
    "third smallest": (aten.kthvalue.default, ([[3.0, 1.0, 2.0, 4.0]], 3, 1, True), {}),
    "median of four": (aten.median.dim, ([[3.0, 1.0, 2.0, 4.0]], 1), {}),
    "weights of a vector": (aten._weight_norm.default, ([1.0, -2.0, 3.0], [2.0, 0.5, 1.0], 0), {}),
    "multivariate gamma": (aten.special_multigammaln.default, ([[2.5, 3.0]], 3), {}),
    "softmax of nothing": (aten._safe_softmax.default, ([[-math.inf, -math.inf], [1.0, -math.inf]], 1), {}),
    "places": (aten.searchsorted.Tensor, ([-1.0, 0.0, 0.0, 2.0], _ROWS), {}),
    "places of NaN": (aten.searchsorted.Tensor, ([-1.0, 0.0, 0.0, 2.0], _NAN), {}),
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
    "cholesky_solve.default": [(B, A), (B[0], A, True)],
    "linalg_qr.default": [(A,), (TALL,), (TALL.mT,), (TALL.mT, "complete"), (torch.eye(3, dtype=torch.float64),)],
    "ormqr.default": [(TALL, _numbers(3), TALL), (TALL, _numbers(3), TALL.mT, False, True)],
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
def test_results_and_gradients_are_those_of_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides, both triangles, broadcast ones, other dimensions."""
    from recompute.torch import matrices
    from recompute.torch.lowering import _table

    monkeypatch.setattr(matrices, "_inverse", torch.linalg.inv)  # else a node of a model that is exported
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


@pytest.mark.parametrize("name", ["linalg_qr", "linalg_cholesky", "linalg_matrix_exp"])
def test_large_matrices_are_refused_by_name(name: str) -> None:
    from recompute.torch.lowering import _table

    with pytest.raises(NotImplementedError, match="only of real matrices up to 64 are written out"):
        _table()[getattr(aten, name).default](torch.eye(65))


@pytest.mark.parametrize("name", ["linalg_cholesky_ex", "linalg_lu_factor_ex", "linalg_inv_ex", "linalg_slogdet"])
def test_matrices_without_factors_or_inverses_are_told(name: str) -> None:
    """Which column fails (`info`); sign and logarithm of a determinant that is 0."""
    from recompute.torch.lowering import _table

    rows = [[[4.0, 2.0, 2.0], [2.0, 1.0, 1.0], [2.0, 1.0, 5.0]], [[4.0, 2.0, 2.0], [2.0, 5.0, 1.0], [2.0, 1.0, 5.0]]]
    theirs, ours = (f(torch.tensor(rows)) for f in (getattr(aten, name).default, _table()[getattr(aten, name).default]))
    assert ours[-1].dtype == theirs[-1].dtype
    torch.testing.assert_close(ours[-1], theirs[-1])
    if name == "linalg_slogdet":
        torch.testing.assert_close(ours[0], theirs[0])


DIGITS = {
    "special_i1e": [(1e-6, -1e-3, 0.0, 59.0)],
    "special_i0e": [(1e-6, 3e38)],
    "erfinv": [(0.9999999, -0.99999, 0.999, 0.5)],
    "polygamma": [2, (-100.5, -0.5, 0.3, -0.7, -0.3, 40.0)],
    "special_polygamma": [10, (-0.5, 0.3, 40.0)],
}


@pytest.mark.parametrize("name", DIGITS)
def test_special_functions_of_float32_have_its_digits(name: str) -> None:
    from recompute.torch.lowering import _table

    *order, points = DIGITS[name]
    x = torch.tensor(points)
    ours = _table()[getattr(aten, name).default](*order, x)
    torch.testing.assert_close(ours.double(), getattr(aten, name).default(*order, x.double()), rtol=5e-6, atol=0)


def test_filled_places_are_checked_and_keep_their_type() -> None:
    from recompute.torch.lowering import _table

    fill, x = _table()[aten.index_fill.int_Scalar], torch.arange(6).reshape(3, 2)
    assert fill(x, 0, torch.tensor([-1, 0]), 3.7).tolist() == [[3, 3], [2, 3], [3, 3]]
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        fill(x, 0, torch.tensor([3]), 1)


def test_a_layer_norm_of_16_bits_does_not_overflow() -> None:
    from recompute.torch.lowering import _table

    x = (_numbers(2, 4) * 1000).half()
    layer_norm = aten.native_layer_norm.default
    for theirs, ours in zip(*(f(x, (4,), None, None, 1e-5) for f in (layer_norm, _table()[layer_norm])), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


def test_covariances_of_one_row_are_a_number() -> None:
    from recompute.torch.decompositions import functions

    x = _numbers(1, 5)
    for function in (torch.cov, torch.corrcoef):
        torch.testing.assert_close(functions()[function](x), function(x))
