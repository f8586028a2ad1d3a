"""Inverses and solutions by com.microsoft's operator Inverse, factors of small matrices column by column.

ONNX itself has no operators for them.  Where PyTorch raises an error for matrices that are singular or not positive,
results are infinite or NaN here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: rows and columns at most of a matrix whose factors are written out: each is a few operators
_MOST = 64
#: terms of the exponential's series, for norms up to 1, and how often such a matrix is squared at most
_TERMS, _SQUARES = 18, 12


def matrices() -> dict[Any, Callable[..., Any]]:
    """Decompositions of matrix operators, by operator."""
    aten = torch.ops.aten
    return {
        aten.linalg_cholesky.default: lambda a, upper=False: _cholesky(a, upper)[0],
        aten.linalg_cholesky_ex.default: _cholesky,
        aten.cholesky_solve.default: _cholesky_solve,
        aten.cholesky_inverse.default: lambda factor, upper=False: _cholesky_solve(
            torch.eye(factor.shape[-1], dtype=factor.dtype), factor, upper
        ),
        aten.linalg_solve_triangular.default: _solve_triangular,
        aten.triangular_solve.default: _triangular_solve,
        aten.linalg_lu_factor.default: lambda a, pivot=True: _lu_factor(a, pivot)[:2],
        aten.linalg_lu_factor_ex.default: _lu_factor,
        aten._lu_with_info.default: _lu_factor,
        aten.linalg_lu.default: lambda a, pivot=True: _unpack(*_lu_factor(a, pivot)[:2]),
        aten.lu_unpack.default: _unpack,
        aten.linalg_lu_solve.default: _lu_solve,
        aten.lu_solve.default: lambda b, lu, pivots: _lu_solve(lu, pivots, b),
        aten.linalg_solve.default: _solve,
        aten._linalg_solve_ex.default: _solve_ex,
        aten.linalg_solve_ex.default: lambda *args, **kwargs: _solve_ex(*args, **kwargs)[::3],
        aten.linalg_tensorsolve.default: _tensor_solution,
        aten.linalg_inv.default: _inverse,
        aten.inverse.default: _inverse,
        aten.linalg_tensorinv.default: _tensor_inverse,
        aten.linalg_matrix_power.default: _power,
        aten.matrix_power.default: _power,
        aten.linalg_slogdet.default: lambda a: _slogdet(a)[:2],
        aten.slogdet.default: lambda a: _slogdet(a)[:2],
        aten.linalg_inv_ex.default: lambda a, check_errors=False: (_inverse(a), _lu_factor(a)[2]),
        aten._linalg_slogdet.default: _slogdet,
        aten.linalg_matrix_exp.default: _exponential,
        aten.matrix_exp.default: _exponential,
        aten.orgqr.default: _householder_product,
        aten.ormqr.default: _householder_times,
        aten.linalg_qr.default: _qr,
        aten.geqrf.default: _geqrf,
        aten.linalg_vander.default: _vander,
        aten.linalg_householder_product.default: _householder_product,
    }


def _inverse(a: Tensor) -> Tensor:
    if a.is_complex():
        raise NotImplementedError("ONNX has inverses of real matrices only")
    return torch.onnx.ops.symbolic("com.microsoft::Inverse", (a,), dtype=a.dtype, shape=a.shape, version=1)


def _solved(product: Callable[[Tensor], Tensor], inverse: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    """The x whose product is b: a first one, without a gradient, and a step of refinement, which has x's gradient.

    That is the derivative of x by the implicit function theorem, dx = A⁻¹ (db - dA x).
    """
    first = inverse(b).detach()
    return first + inverse(b - product(first))


def _small(a: Tensor) -> Tensor:
    """The matrix itself.  NotImplementedError where it is large or complex."""
    if a.is_complex() or max(a.shape[-2:]) > _MOST:
        raise NotImplementedError(f"ONNX has no matrix factors: only of real matrices up to {_MOST} are written out")
    return a


def _first(wrong: Tensor) -> Tensor:
    """The number of the first column with a pivot that is wrong, 0 where there is none: PyTorch's `info`."""
    if not wrong.shape[-1]:
        return torch.zeros(wrong.shape[:-1], dtype=torch.int32)
    return torch.where(wrong.any(-1), wrong.int().argmax(-1) + 1, 0).to(torch.int32)


def _cholesky(a: Tensor, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """The factor of one triangle; its first-order change has a symmetric gradient (Walter and Lehmann, 2010)."""
    read = _small(a).detach().mT if upper else _small(a).detach()
    rest = read.tril() + read.tril(-1).mT
    columns = []
    for j in range(a.shape[-1]):
        column = rest[..., 0] / rest[..., :1, 0].sqrt()
        columns.append(torch.nn.functional.pad(column, (j, 0)))
        rest = rest[..., 1:, 1:] - column[..., 1:, None] * column[..., None, 1:]
    factor = torch.stack(columns, -1) if columns else a * 1
    wrong, inverse, change = ~(factor.diagonal(0, -2, -1) > 0), _inverse(factor), (a + a.mT - (a + a.mT).detach()) / 2
    x = inverse @ change @ inverse.mT
    factor = factor + factor @ (x.tril() + x.tril(-1)) / 2
    return factor.mT if upper else factor, _first(wrong)


def _cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    """The solution of L Lᵀ x = b.  Like PyTorch's, its gradient is that of a whole L, other triangle included."""
    whole = factor.mT if upper else factor
    lower = whole.detach().tril()
    y = _inverse(lower)

    def product(x: Tensor) -> Tensor:
        change = whole @ (whole.mT @ x)
        return lower @ (lower.mT @ x) + (change - change.detach())

    return _solved(product, lambda z: y.mT @ (y @ z), b)


def _solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """The other triangle is not read, nor is a diagonal of ones."""
    a = a.triu(int(unitriangular)) if upper else a.tril(-int(unitriangular))
    return _solve(a + torch.eye(a.shape[-1], dtype=a.dtype) if unitriangular else a, b, left=left, vectors=False)


def _triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    matrix, above = (a.mT, not upper) if transpose else (a, upper)
    return _solve_triangular(matrix, b, upper=above, unitriangular=unitriangular), a * 1


def _row(a: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Which row of each matrix is number `at`, and that row."""
    chosen = (torch.arange(a.shape[-2]) == at[..., None])[..., None]
    return chosen, torch.where(chosen, a, 0).sum(-2, keepdim=True)


def _lu_factor(a: Tensor, pivot: bool = True, check_errors: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Elimination by the largest pivot of each column; both factors in one matrix, and the rows that were swapped."""
    whole, pivots = _small(a) * 1, []
    for j in range(min(a.shape[-2:])):
        below = whole[..., j:, :]
        at = below[..., j].detach().abs().argmax(-1)
        at = at if pivot else at * 0
        chosen, row = _row(below, at)
        below = torch.where(chosen, below[..., :1, :], below)[..., 1:, :]
        top = row[..., j : j + 1]
        column = below[..., j : j + 1] / torch.where(top == 0, 1, top)  # of zeros, where their largest is 0
        below = torch.cat([below[..., :j], column, below[..., j + 1 :] - column * row[..., j + 1 :]], -1)
        whole = torch.cat([whole[..., :j, :], row, below], -2)
        pivots.append(at + j + 1)
    none = torch.zeros(*a.shape[:-2], 0)
    return whole, (torch.stack(pivots, -1) if pivots else none).to(torch.int32), _first(whole.diagonal(0, -2, -1) == 0)


def _unpack(
    lu: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Permutation and factors of a matrix."""
    rows, columns = lu.shape[-2:]
    count = min(rows, columns)
    none = torch.zeros(0, dtype=lu.dtype)
    order = torch.eye(rows, dtype=lu.dtype).expand(*pivots.shape[:-1], rows, rows) if unpack_pivots else none
    for j in reversed(range(pivots.shape[-1] * unpack_pivots)):  # rows change places
        chosen, row = _row(order, pivots[..., j] - 1)
        first = (torch.arange(rows) == j)[:, None]
        order = torch.where(first, row, torch.where(chosen, order[..., j : j + 1, :], order))
    if not unpack_data:
        return order, none, none
    one = torch.eye(rows, count, dtype=lu.dtype)
    return order, lu[..., :count].tril(-1) + one, lu[..., :count, :].triu()


def _lu_solve(lu: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:
    if not left:
        return _lu_solve(lu, pivots, b.mT, adjoint=not adjoint).mT
    order, lower, upper = _unpack(lu, pivots)
    if adjoint:
        return order @ _solve(lower.mT, _solve(upper.mT, b, vectors=False), vectors=False)
    return _solve(upper, _solve(lower, order.mT @ b, vectors=False), vectors=False)


def _solve(a: Tensor, b: Tensor, *, left: bool = True, vectors: bool = True) -> Tensor:
    """`vectors`: b may be vectors."""
    vector = vectors and (b.ndim == 1 or (b.ndim == a.ndim - 1 and tuple(b.shape) == tuple(a.shape[:-1])))
    b, y = b[..., None] if vector else b, _inverse(a.detach())
    x = _solved(lambda x: a @ x, lambda z: y @ z, b) if left else _solved(lambda x: x @ a, lambda z: z @ y, b)
    return x[..., 0] if vector else x


def _solve_ex(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A solution and the factors of its matrix, to which PyTorch gives no gradient."""
    lu, pivots, info = _lu_factor(a)
    return _solve(a, b, left=left), lu.detach(), pivots, info


def _tensor_inverse(a: Tensor, ind: int = 2) -> Tensor:
    matrix = a.reshape(math.prod(a.shape[:ind]), -1)
    return _inverse(matrix).reshape(*a.shape[ind:], *a.shape[:ind])


def _tensor_solution(a: Tensor, b: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    moved = a if dims is None else a.movedim(tuple(dims), tuple(range(-len(dims), 0)))
    matrix = moved.reshape(math.prod(b.shape), -1)
    return _solve(matrix, b.reshape(-1)).reshape(moved.shape[b.ndim :])


def _power(a: Tensor, n: int) -> Tensor:
    return torch.linalg.matrix_power(_inverse(a), -n) if n < 0 else NotImplemented


def _slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sign and logarithm of a determinant, by the diagonal of its factor."""
    lu, pivots, _ = _lu_factor(a)
    diagonal = lu.diagonal(0, -2, -1)
    swaps = (pivots != torch.arange(1, a.shape[-1] + 1)).sum(-1)
    sign = diagonal.detach().sign().prod(-1) * (1 - 2 * (swaps % 2))
    return sign, diagonal.abs().log().sum(-1), lu.detach(), pivots


def _geqrf(a: Tensor) -> tuple[Tensor, Tensor]:
    """R over the vectors of reflections, and their factors, by the conventions of LAPACK's geqrf."""
    whole, factors = _small(a) * 1, []
    for j in range(min(a.shape[-2:])):
        x, rest = whole[..., j : j + 1, j : j + 1], whole[..., j + 1 :, j : j + 1]
        square = rest.square().sum(-2, keepdim=True)
        none = square == 0  # nothing to reflect
        length = torch.where(none, 1, x * x + square).sqrt()
        corner = torch.where(none, x, torch.where(x < 0, length, -length))
        factor = torch.where(none, 0, 1 - x / torch.where(none, 1, corner))
        vector = rest / torch.where(none, 1, x - corner)
        top, below = whole[..., j : j + 1, j + 1 :], whole[..., j + 1 :, j + 1 :]
        change = factor * (top + vector.mT @ below)
        right = torch.cat([top - change, below - vector @ change], -2)
        block = torch.cat([torch.cat([corner, vector], -2), right], -1)
        lower = torch.cat([whole[..., j:, :j], block], -1)
        whole = torch.cat([whole[..., :j, :], lower], -2)
        factors.append(factor[..., 0, 0])
    return whole, torch.stack(factors, -1) if factors else a.new_zeros((*a.shape[:-2], 0))


def _qr(a: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Factors, and their first-order changes where PyTorch has a gradient (Walter and Lehmann, "Algorithmic
    differentiation of linear algebra functions", 2010)."""
    reflections, factors = _geqrf(a.detach())
    rows, columns = a.shape[-2:]
    size = rows if mode == "complete" else min(rows, columns)
    r = reflections[..., :size, :].triu()
    if mode == "r":
        return a.new_zeros(0), r
    q = _householder_product(torch.nn.functional.pad(reflections, (0, max(size - columns, 0)))[..., :size], factors)
    if size > columns:
        return q, r
    change, inverse = (a - a.detach())[..., :size], _inverse(r[..., :size])
    x = q.mT @ change @ inverse
    below = x.tril(-1)
    step = (x - below + below.mT) @ r[..., :size]
    q = q + (change - q @ step) @ inverse
    return q, torch.cat([r[..., :size] + step, q.mT @ a[..., size:]], -1) if columns > size else r + step


def _householder_times(a: Tensor, tau: Tensor, other: Tensor, left: bool = True, transpose: bool = False) -> Tensor:
    """The whole product of reflections times a matrix."""
    rows = a.shape[-2]
    q = _householder_product(torch.nn.functional.pad(a, (0, rows - a.shape[-1])), tau)
    q = q.mT if transpose else q
    return q @ other if left else other @ q


def _vander(x: Tensor, *, N: int | None = None) -> Tensor:
    rows = x.unsqueeze(-1).expand(*x.shape, (x.shape[-1] if N is None else N) - 1)
    return torch.cat([torch.ones_like(x).unsqueeze(-1), rows], -1).cumprod(-1)


def _exponential(a: Tensor) -> Tensor:
    """Taylor's series of the matrix divided by a power of 2, and as many squares."""
    size = _small(a).detach().abs().sum(-1, keepdim=True).amax(-2, keepdim=True)
    squares = size.clamp(min=1).log2().ceil()
    x = a / 2**squares
    total = term = torch.eye(a.shape[-1], dtype=a.dtype)
    for k in range(1, _TERMS):
        term = term @ x / k
        total = total + term
    for k in range(_SQUARES):
        total = torch.where(k < squares, total @ total, total)
    return torch.where(squares > _SQUARES, math.nan, total)


def _householder_product(a: Tensor, tau: Tensor) -> Tensor:
    """The first columns of a product of reflections, whose vectors stand below the diagonal."""
    rows, columns = _small(a).shape[-2:]
    q = torch.eye(rows, columns, dtype=a.dtype).expand(a.shape)
    vectors = a.tril(-1) + torch.eye(rows, columns, dtype=a.dtype)
    for j in reversed(range(tau.shape[-1])):
        v = vectors[..., j : j + 1]
        q = q - tau[..., j, None, None] * v @ (v.mT @ q)
    return q
