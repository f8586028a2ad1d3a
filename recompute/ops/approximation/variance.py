"""The variance of a sketch, E‖(SᵀX)ᵀ(SᵀY) - XᵀY‖², in closed form for every kind, and that of the batch itself.

Written for rows x_i, y_i of X [B, n] and Y [B, m], squared Frobenius norms, N = ‖X‖²‖Y‖², A = ‖XᵀY‖² and
D = Σ‖x_i‖²‖y_i‖²; all are exact, and take one pass over X and Y besides the product XᵀY.

* `gaussian`: (N + A) / k, and `rademacher`: (N + A - 2D) / k: the mean of k independent (Xᵀs)(sᵀY), by the fourth
  moments E[(s'Gs)(s'Hs)] = tr G tr H + 2 tr GH, less 2 Σ G_ii H_ii for signs.
* `rows`: (B - k) / (k (B - 1)) · (B D - A): a total estimated from k of B terms without replacement (Cochran 1977).
* `dct`, `dft`: the same for the P transformed rows, (P - k) / (k (P - 1)) · (P Q - A), as each choice of signs has the
  mean XᵀY; Q is the mean of Σ‖x̃_j‖²‖ỹ_j‖² over the signs (`_spread`).

The batch's own variance is the one of Bershatsky et al., arXiv 2201.13195, Lemma 2.1.
"""

from __future__ import annotations

import math

import numpy as np

from ...errors import UsageError
from ...language.types import Array
from .transforms import padded


def _matrices(x: Array, y: Array) -> tuple[np.ndarray, np.ndarray]:
    """Rows of features in float64.  UsageError where they are not of one batch."""
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    if x.ndim < 2 or y.ndim < 2 or math.prod(x.shape[:-1]) != math.prod(y.shape[:-1]):
        raise UsageError(f"x {list(x.shape)} and y {list(y.shape)} must be rows of features of the same batch")
    return x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])


def sketch_variance(kind: str, rows: int, x: Array, y: Array) -> float:
    """The mean square error of a weight's gradient xᵀy from sketches of `rows` rows (see the module's text)."""
    x, y = _matrices(x, y)
    batch = len(x)
    if not 1 <= rows <= batch:
        raise UsageError(f"rows must be in [1, {batch}], the rows of x, not {rows}")
    exact, squares = float(np.sum((x.T @ y) ** 2)), _squares(x, y)
    norms, products = float(squares[0].sum() * squares[1].sum()), float(squares[0] @ squares[1])
    match kind:
        case "gaussian":
            return (norms + exact) / rows
        case "rademacher":
            return (norms + exact - 2 * products) / rows
        case "rows":
            return _chosen(batch, rows, products, exact)
        case "dct" | "dft":
            return _chosen(padded(batch), rows, _spread(kind, x, y, exact), exact)
    raise UsageError(f"kind must be one of gaussian, rademacher, rows, dct, dft, not '{kind}'")


def batch_variance(x: Array, y: Array) -> float:
    """The variance of a gradient xᵀy that a batch of independent samples gives, estimated from this batch.

    B/(B - 1) Σ‖x_i‖²‖y_i‖² - ‖xᵀy‖²/(B - 1): Lemma 2.1 of Bershatsky et al., arXiv 2201.13195.
    """
    x, y = _matrices(x, y)
    batch = len(x)
    if batch < 2:
        raise UsageError("a batch of one sample has no variance: give two rows or more")
    a, b = _squares(x, y)
    return max(0.0, float(batch * (a @ b) - np.sum((x.T @ y) ** 2)) / (batch - 1))


def _squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.einsum("ij,ij->i", x, x), np.einsum("ij,ij->i", y, y)


def _chosen(count: int, rows: int, own: float, exact: float) -> float:
    """The variance of a sum of `count` terms with the sum of squares `own`, estimated from `rows` of them."""
    return 0.0 if rows == count else (count - rows) / (rows * (count - 1)) * max(0.0, count * own - exact)


def _spread(kind: str, x: np.ndarray, y: np.ndarray, exact: float) -> float:
    """The mean of Σ‖x̃_j‖²‖ỹ_j‖² over random signs, x̃ the transform of the signed and padded rows.

    With basis vectors f_j, G = XXᵀ and H = YYᵀ it is Σ W_ab (G_aa H_bb + 2 G_ab H_ab) - 2 Σ W_aa G_aa H_aa, where
    W_ab = Σ_j f_ja² f_jb² = c/P² + (1/2P) · how many of some permutations take a to b.  The squares of cosines are
    cosines of twice the angle, which are orthogonal but for mirrored rows: c = P - 1, and rows and mirrored rows for
    the DCT; c = P - 2, and a, -a, each moved by P/2 or not, for the real Fourier basis.
    """
    size, at = padded(len(x)), np.arange(len(x))
    half = size // 2
    if kind == "dct":
        most, partners = size - 1, [at, size - 1 - at]
    else:
        most, partners = size - 2, [at, (at + half) % size, -at % size, (half - at) % size]
    a, b = _squares(x, y)
    product = float(a @ b)
    variance = most / size**2 * (float(a.sum() * b.sum()) + 2 * exact - 2 * product)
    for other in partners:
        there = other < len(x)
        i, j = at[there], other[there]
        pairs = np.einsum("ij,ij->i", x[i], x[j]) * np.einsum("ij,ij->i", y[i], y[j])
        same = i == j
        variance += float(np.sum(a[i] * b[j]) + 2 * np.sum(pairs) - 2 * np.sum(a[i][same] * b[i][same])) / (2 * size)
    return variance
