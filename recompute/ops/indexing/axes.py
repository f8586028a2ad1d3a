"""The indices of gathers and scatters: those of the indices' own axes, and those that data and results share."""

from __future__ import annotations

from collections.abc import Sequence

from ...language.factors import SUM, Factor, factor
from ...language.types import TensorType


def gathered(x: Sequence[int], indices: TensorType, axis: int) -> list[tuple[int, int | None, int | None, int]]:
    """The axes of Gather from shape `x` along `axis`: size, and axes in x, in the indices, in the result."""
    factors: list[tuple[int, int | None, int | None, int]] = [
        (d, None, i, axis + i) for i, d in enumerate(indices.shape)
    ]
    factors += [(d, a, None, a if a < axis else a + indices.ndim - 1) for a, d in enumerate(x) if a != axis]
    return factors


def elements(x: Sequence[int], indices: TensorType, axis: int, *, back: bool = False) -> list[Factor]:
    """Factors of GatherElements, (x, indices) → y, or `back`: (indices, dy) → dx.

    Along another axis than `axis` the first elements of x are taken, so that x is cut only if it is as long as the
    indices.
    """
    factors = [(a, d, a if a != axis else None) for a, d in enumerate(indices.shape) if a == axis or x[a] == d]
    if back:
        return [factor(d, [a, a], [SUM if at is None else at]) for a, d, at in factors]
    return [factor(d, [at, a], [a]) for a, d, at in factors]


def coordinates(x: Sequence[int], indices: TensorType, batch: int) -> list[tuple[int, int | None, int | None, int]]:
    """The axes of GatherND from shape `x`, as `gathered` gives them."""
    last = indices.ndim - 1
    taken = batch + indices.shape[-1]
    factors: list[tuple[int, int | None, int | None, int]] = [
        (d, i if i < batch else None, i, i) for i, d in enumerate(indices.shape[:-1])
    ]
    factors += [(d, taken + i, None, last + i) for i, d in enumerate(x[taken:])]
    return factors


def forward(found: Sequence[tuple[int, int | None, int | None, int]]) -> list[Factor]:
    """Factors of (x, indices) → y."""
    return [factor(d, [x, i], [y]) for d, x, i, y in found]


def backward(found: Sequence[tuple[int, int | None, int | None, int]]) -> list[Factor]:
    """Factors of (indices, dy) → dx: what several slices of the indices took is added up."""
    return [factor(d, [i, y], [SUM if x is None else x]) for d, x, i, y in found]
