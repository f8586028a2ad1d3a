"""The best step functions in place of derivatives of activations (Novikov, Bershatsky et al. 2022, arXiv 2202.00441).

`best_steps` minimises the integral of (f'(x) - steps(x))² over [-10, 10] among step functions with 2^bits levels (if
f' is even: levels of |x|).  Dynamic programming over a fine grid finds the borders; Newton's method refines them to the
Lloyd-Max conditions: each level is the mean of f' on its step, and at each border f' is half-way between two levels.
f and f' are the project's own operators in float64, so that whatever they compute is what is approximated.  Derivatives
that are step functions themselves are exact.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import UsageError
from ...language.builder import Builder, Names
from ...language.ir import Operator, Value, leading_to
from ...language.op import Op
from ...language.types import DTYPES, Array, TensorType, Types
from ..tiles import wide
from .slopes import MOST_BITS

#: derivatives are approximated from -REACH to REACH, uniformly weighted; beyond, the outermost levels continue
REACH = 10.0
#: cells of the grid of borders (kinks of the activations, at whole numbers, are borders), and Gauss points of a cell
_CELLS, _POINTS = 1000, 8
#: iterations of Newton's method
_ITERATIONS = 200

#: activations with smooth derivatives; f'(-x) = f'(x) for those in `EVEN`
EVEN = ("Sigmoid", "Tanh", "Softsign")
SMOOTH = (*EVEN, "Gelu", "Swish", "Mish", "Softplus", "Elu", "Celu", "Selu", "HardSwish")
#: activations whose derivatives are step functions
PIECEWISE = ("Relu", "LeakyRelu", "Relu6", "ThresholdedRelu", "HardSigmoid", "Clip")


@dataclass(frozen=True)
class Steps:
    """A step function: `levels[i]` where x (`even`: |x|) is above exactly i of the `bounds`.

    `error`: the integral of its squared error over [-REACH, REACH].
    """

    bounds: tuple[float, ...]
    levels: tuple[float, ...]
    error: float = 0.0
    even: bool = False

    @property
    def exact(self) -> bool:
        """Whether it is the derivative itself, to the bit."""
        return self.error == 0


# -- an activation and its derivative as functions of arrays -----------------------------------------------------------


@dataclass(frozen=True)
class Template:
    """The operators of an activation's gradient: from the values `x`, `y`, `dy`, `in1`, ... to `dx`, the result."""

    operators: tuple[Operator, ...]
    constants: tuple[Any, ...]
    dx: Value


def gradient_template(op: Op, types: Types) -> Template | None:
    """What an activation's gradient rule emits for its first input; None without a gradient of the output's type."""
    ins = [None if t is None else Value("x" if i == 0 else f"in{i}", t) for i, t in enumerate(types)]
    y = Value("y", op.infer(*types)[0])
    dy = Value("dy", y.type)
    b = Builder(Names([*(v.name for v in ins if v is not None), "y", "dy"]))
    dx = op.gradient(b, ins, [y], [dy])[0]
    if dx is None or dx.type != y.type:
        return None
    kept = leading_to(b.operators, [dx])
    read = {dx.name, *(v.name for o in kept for v in o.reads())}
    return Template(tuple(kept), tuple(c for c in b.constants if c.value.name in read), dx)


def _apply(op: Op, ins: Sequence[Any]) -> Array:
    """The first output of an operator by its own numerics."""
    types = [None if a is None else TensorType.of(a) for a in ins]
    outs = list(op.infer(*types)[:1])
    results = [np.empty(t.shape, t.numpy) for t in outs]
    with np.errstate(all="ignore"):
        op.compute(ins, results, [np.empty(t.shape, t.numpy) for t in op.scratch(types, outs)])
    return results[0]


def function_of(op: Op, dtype: str, others: Sequence[float | Array | None] = ()) -> Callable[[Array], Array]:
    """The activation, as a function of vectors."""
    constants = [None if a is None else np.asarray(a, DTYPES[dtype]) for a in others]
    return lambda x: _apply(op, [x, *constants])


def derivative_of(op: Op, dtype: str, others: Sequence[float | Array | None] = ()) -> Callable[[Array], Array]:
    """The activation's derivative as its gradient rule computes it, as a function of vectors."""
    constants = [None if a is None else np.asarray(a, DTYPES[dtype]) for a in others]

    def derivative(x: Array) -> Array:
        template = _template(op, dtype, x.size, tuple(None if a is None else a.shape for a in constants))
        env: dict[str, Any] = {c.value.name: c.numpy() for c in template.constants}
        env |= {f"in{i}": a for i, a in enumerate(constants, 1)}
        env |= {"x": x, "y": _apply(op, [x, *constants]), "dy": np.ones_like(x)}
        for o in template.operators:
            env[next(o.writes()).name] = _apply(o.op, [None if v is None else env[v.name] for v in o.inputs])
        return env[template.dx.name]

    return derivative


@functools.lru_cache(maxsize=256)
def _template(op: Op, dtype: str, size: int, others: tuple[tuple[int, ...] | None, ...]) -> Template:
    types = [TensorType(dtype, (size,)), *(None if s is None else TensorType(dtype, s) for s in others)]
    template = gradient_template(op, types)
    if template is None:
        raise UsageError(f"{op.name} has no gradient that is a function of its input")
    return template


# -- smooth derivatives ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def best_steps(op: Op) -> tuple[Steps, ...]:
    """The best step functions for 1, 2, 3 and 4 bits."""
    even = op.name in EVEN
    f, slope = function_of(op, "f64"), derivative_of(op, "f64")
    edges = np.linspace(0.0 if even else -REACH, REACH, _CELLS + 1)
    nodes, weights = np.polynomial.legendre.leggauss(_POINTS)
    half = (edges[1] - edges[0]) / 2
    inside = (edges[:-1, None] + half + half * nodes).reshape(-1)
    squares = (slope(inside) ** 2).reshape(_CELLS, _POINTS) @ weights * half
    total = np.concatenate([[0.0], np.cumsum(squares)])
    steps = []
    for borders in grid_borders(f(edges), total, edges, [2**bits for bits in range(1, MOST_BITS + 1)]):
        rough = edges[borders]
        bounds = min((rough, _refined(f, slope, rough, 2 * half)), key=lambda b: _error(f, b, total[-1]))
        rounded = np.array([float(f"{round(b, 9):.7g}") + 0.0 for b in bounds])
        levels = tuple(float(f"{v:.7g}") for v in _means(f, rounded))
        error = float(_error(f, rounded, total[-1])) * (2 if even else 1)
        steps.append(Steps(tuple(rounded[1:-1].tolist()), levels, error, even))
    return tuple(steps)


def grid_borders(f: Array, squares: Array, edges: Array, counts: Sequence[int]) -> list[list[int]]:
    """For each number of steps in `counts` the borders on the grid with the least error, as indices of edges.

    `f`: the function at the edges; `squares`: the integral of its squared derivative up to each.  The error of a step
    from i to j is the integral of f'² there, less (f(j) - f(i))² / (j - i).
    """
    n = len(edges)
    width = edges[:, None] - edges
    width[np.triu_indices(n)] = np.inf
    cost = squares[:, None] - squares - (f[:, None] - f) ** 2 / width
    cost[np.triu_indices(n)] = np.inf
    best, origins, borders = cost[:, 0], [np.zeros(n, int)], {}
    for steps in range(2, max(counts) + 1):
        sums = cost + best
        origin = sums.argmin(1)
        best = sums[np.arange(n), origin]
        origins.append(origin)
        if steps in counts:
            at = [n - 1]
            for back in reversed(origins):
                at.append(int(back[at[-1]]))
            borders[steps] = at[::-1]
    return [borders[c] for c in counts]


def _means(f: Callable[[Array], Array], bounds: Array) -> Array:
    return np.diff(f(bounds)) / np.diff(bounds)


def _error(f: Callable[[Array], Array], bounds: Array, total: float) -> float:
    """The integral of the squared error of the step function with these bounds."""
    return total - float(np.sum(_means(f, bounds) ** 2 * np.diff(bounds)))


def _refined(f: Callable[[Array], Array], slope: Callable[[Array], Array], rough: Array, cell: float) -> Array:
    """The rough bounds, each moved by at most a cell to where f' is half-way between its levels (Newton's method)."""
    bounds, near = rough.copy(), 1e-6
    inner, low, high = bounds[1:-1], rough[1:-1] - cell, rough[1:-1] + cell
    count = len(inner)
    # bounds at jumps of f' stay: they are kinks, which the grid has
    below, above = np.split(slope(np.concatenate([inner - 1e-9, inner + 1e-9])), 2)
    moving = np.abs(above - below) < 1e-3
    for _ in range(_ITERATIONS):
        levels = _means(f, bounds)
        left, here, right = slope(np.concatenate([inner - near, inner, inner + near])).reshape(3, count)
        steep = (right - left) / (2 * near)
        wanted = (levels[1:] + levels[:-1]) / 2 - here
        step = np.divide(wanted, steep, out=np.zeros(count), where=moving & (np.abs(steep) > 1e-9))
        inner[...] = np.clip(inner + np.clip(step, -cell / 4, cell / 4), low, high)
    return bounds


# -- derivatives that are step functions -------------------------------------------------------------------------------


def _kinks(op: Any, others: Sequence[float | Array | None]) -> list[float]:
    """Where the slope of a piecewise linear activation changes."""
    if op.name == "HardSigmoid":
        return sorted([-op.beta / op.alpha, (1 - op.beta) / op.alpha]) if op.alpha else []
    if op.name == "Clip":
        return sorted(float(a) for a in others if a is not None)
    return {"Relu6": [0.0, 6.0], "ThresholdedRelu": [getattr(op, "alpha", 0.0)]}.get(op.name, [0.0])


def exact_steps(op: Op, dtype: str, others: Sequence[float | Array | None] = ()) -> Steps | None:
    """The derivative of a piecewise linear activation in a type's own arithmetic.

    None if it has one value everywhere, or a kink is not finite.
    """
    kinks = _kinks(op, others)
    if not kinks or not all(map(math.isfinite, kinks)):
        return None
    slope, wide_slope = derivative_of(op, dtype, others), derivative_of(op, wide(dtype), others)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(kinks)]
    probes = [kinks[0] - 1 - abs(kinks[0]), *middles, kinks[-1] + 1 + abs(kinks[-1])]
    # levels in float32 for 16-bit types, whose gradients are multiplied in float32
    bounds, levels = [], [_at(wide_slope, probes[0], wide(dtype))]
    for before, after in itertools.pairwise(probes):
        if _at(slope, before, dtype) != _at(slope, after, dtype):
            bounds.append(_last_before_change(slope, before, after, dtype))
            levels.append(_at(wide_slope, after, wide(dtype)))
    return Steps(tuple(bounds), tuple(levels)) if bounds else None


def _at(slope: Callable[[Array], Array], x: float, dtype: str) -> float:
    return float(slope(np.array([x]).astype(DTYPES[dtype]))[0])


def _last_before_change(slope: Callable[[Array], Array], low: float, high: float, dtype: str) -> float:
    """The largest number of the type with the slope of `low`, by bisection over the numbers of the type in order."""
    numpy = DTYPES[dtype]
    word = np.dtype(f"i{numpy.itemsize}")
    least = np.iinfo(word).min

    def rank(x: float) -> int:
        bits = int(np.array([x]).astype(numpy).view(word)[0])
        return bits if bits >= 0 else least - bits

    def number(at: int) -> float:
        return float(np.array([at if at >= 0 else least - at]).astype(word).view(numpy)[0])

    before, after, level = rank(low), rank(high), _at(slope, low, dtype)
    while after - before > 1:
        middle = (before + after) // 2
        before, after = (middle, after) if _at(slope, number(middle), dtype) == level else (before, middle)
    return number(before)


# -- both --------------------------------------------------------------------------------------------------------------


def slope_of(op: Op, bits: int, dtype: str = "f32", others: Sequence[float | Array | None] = ()) -> Steps | None:
    """The step function that replaces an activation's derivative.

    None for operators without one, and if the derivative is constant or an attribute is 0 or not finite.  `others`: its
    further inputs, constants (those of Clip).  If the derivative is a step function itself, the result is exact, with
    as many levels as it needs, whatever `bits` is.  UsageError for bits other than 1 to 4.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= MOST_BITS:
        raise UsageError(f"derivatives of activations are approximated with 1 to {MOST_BITS} bits, not {bits}")
    if dtype not in ("f16", "bf16", "f32", "f64"):
        return None
    if op.name in PIECEWISE:
        return _exact(op, dtype, tuple(None if a is None else repr(float(np.asarray(a))) for a in others))
    if op.name not in SMOOTH or not _well_formed(op):
        return None
    return best_steps(op)[bits - 1]


@functools.lru_cache(maxsize=256)
def _exact(op: Op, dtype: str, others: tuple[str | None, ...]) -> Steps | None:
    return exact_steps(op, dtype, tuple(None if a is None else float(a) for a in others))


def _well_formed(op: Op) -> bool:
    """Whether all numeric attributes are finite and not 0: with 0, Swish is linear and Elu a Relu."""
    numbers = [v for v in dataclasses.asdict(op).values() if isinstance(v, (int, float))]
    return all(math.isfinite(v) and v != 0 for v in numbers)
