"""Models that fix their batch, made for any: the numbers that hold it are found, and the result is checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import onnx

from ..errors import RecomputeError, UsageError
from ..language.types import DTYPES, TensorType, dtype_from_onnx
from .graphs import first_output
from .model import symbol
from .opening import Opening
from .state import ImportState

_BATCH = "batch"
#: a model and inputs → its outputs by name, in inference mode
Run = Callable[[onnx.ModelProto, dict[str, np.ndarray]], Mapping[str, np.ndarray]]
#: elements of an input that is drawn, and of known values that may be shapes, at most
_MOST, _SMALL = 1 << 28, 64
#: batches that are run one by one and together: more than 2, which is a common size of other dimensions
_TIMES, _TRIES = 3, 20


class Trace(Protocol):
    """Imports a model with shapes of its inputs, in inference mode."""

    def __call__(
        self, model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], opening: Opening | None
    ) -> ImportState: ...


def fixed_batch(graph: onnx.GraphProto) -> int | None:
    """The batch that a model fixes: the first dimension of its first input with dimensions; None: one is open."""
    weights = {t.name for t in graph.initializer}
    shapes = [list(i.type.tensor_type.shape.dim) for i in graph.input if i.name not in weights]
    firsts = [dims[0] for dims in shapes if dims]
    if not firsts or any(not d.HasField("dim_value") or d.dim_value < 1 for d in firsts):
        return None
    return int(firsts[0].dim_value)


def rebatched(
    model: onnx.ModelProto, batch: int | None, sizes: Mapping[str, int], bound: Collection[str], run: Run, trace: Trace
) -> onnx.ModelProto:
    """The model with an open batch instead of the one that it fixes.

    The batch of inputs, and nodes that hold it in shapes and sizes or need it in other inputs, are changed
    (`Opening`); then samples of several batches, run one by one in the model and together in the result, must give the
    same rows.  UsageError where they do not.  The model itself where nothing is to be changed, or where `sizes`, by
    name, lack that of an open dimension.  `bound`: inputs that have values already.
    """
    fixed, shapes = fixed_batch(model.graph), _shapes(model.graph, sizes, bound)
    if fixed is None or batch in (None, fixed) or shapes is None:
        return model
    try:
        opened, axes = _opened(model, shapes, fixed, trace)
        why = _differs(model, opened, shapes, axes, run)
    except RecomputeError as e:
        why = str(e)
    if why:
        raise UsageError(
            f"the model fixes its batch at {fixed}, and it could not be made for {batch} ({why}): load it with "
            f"batch={fixed}, or export it with a dynamic first dimension (torch.onnx.export(..., dynamic_shapes=...))"
        )
    return opened


def _opened(
    model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], fixed: int, trace: Trace
) -> tuple[onnx.ModelProto, dict[str, int]]:
    """A copy with an open batch, and the axes of its inputs that have it."""
    axes = _batch_axes(model.graph, shapes, fixed)
    before = trace(model, shapes, None)
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    graph = opened.graph
    for i in graph.input:
        if i.name in axes:
            i.type.tensor_type.shape.dim[axes[i.name]].dim_param = _BATCH
    for o in (*graph.output, *graph.value_info):
        o.type.tensor_type.ClearField("shape")
    del graph.value_info[:]
    names = [n for n in (*before.env, *before.known) if before.has(n)]
    outputs = {first_output(n) for n in graph.node}
    constants = {n: k.array for n, k in before.known.items() if k.type.size <= _SMALL and k.type.dtype != "string"}
    there = {n: before.type_of(n).shape for n in names}
    opening = Opening(there, constants, (fixed, _TIMES * fixed), next(iter(axes.items())), outputs)
    larger = {n: tuple(_TIMES * d if axes.get(n) == axis else d for axis, d in enumerate(s)) for n, s in shapes.items()}
    after = trace(opened, larger, opening)
    for o in graph.output:
        if o.type.HasField("tensor_type") and after.has(o.name):
            sizes = _dims(there.get(o.name, ()), after.type_of(o.name).shape, _TIMES * fixed)
            o.type.CopyFrom(onnx.helper.make_tensor_type_proto(o.type.tensor_type.elem_type, sizes))
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        change = opening.changes.get(first_output(node))
        graph.node.extend([node] if change is None else change.applied(node))
    return opened, axes


def _dims(before: tuple[int, ...], after: tuple[int, ...], batch: int) -> list[int | str | None]:
    """Dimensions of an output, at the file's batch and at another: those that grew hold the batch, or what it is in."""
    alike = before if len(before) == len(after) else (1, *before)  # a batch of 1 that the file drops
    if len(alike) != len(after):
        return [None] * len(after)
    return [a if a == b else _BATCH if a == batch else None for a, b in zip(after, alike, strict=True)]


def _batch_axes(graph: onnx.GraphProto, shapes: Mapping[str, tuple[int, ...]], fixed: int) -> dict[str, int]:
    """The axis of each input that has the batch: the first, or the second of a recurrent operator's first state.

    Single numbers beside larger inputs are settings, which have none.
    """
    states = {n for node in graph.node if node.op_type in ("LSTM", "GRU", "RNN") for n in node.input[5:7]}
    largest = max(map(len, shapes.values()))
    axes: dict[str, int] = {}
    for name, dims in shapes.items():
        axis = 1 if name in states and len(dims) == 3 else 0
        if len(dims) > axis and dims[axis] == fixed and (len(dims) > 1 or largest == 1):
            axes[name] = axis
    return axes


def _shapes(
    graph: onnx.GraphProto, sizes: Mapping[str, int], bound: Collection[str]
) -> dict[str, tuple[int, ...]] | None:
    """The shapes of a model's inputs, but `bound` ones, at sizes of open dimensions; None where one is missing."""
    weights = {t.name for t in graph.initializer}.union(bound)
    result: dict[str, tuple[int, ...]] = {}
    for i in graph.input:
        dims = i.type.tensor_type.shape.dim
        named = [sizes.get(symbol(d) or f"{i.name}.{axis}", d.dim_value) for axis, d in enumerate(dims)]
        if i.name not in weights:
            if not all(named):
                return None
            result[i.name] = tuple(named)
    return result


def _differs(
    model: onnx.ModelProto, made: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int],
    run: Run,
) -> str:  # fmt: skip
    """How the results of several batches together differ from those of each; "" where they do not."""
    g = np.random.default_rng(0)
    kinds = {i.name: dtype_from_onnx(i.type.tensor_type.elem_type) or "f32" for i in model.graph.input}
    parts: list[dict[str, np.ndarray]] = [{} for _ in range(_TIMES)]
    for name, shape in shapes.items():
        if min(shape, default=1) < 0 or math.prod(shape) > _MOST:
            return f"'{name}' of shape {list(shape)} cannot be drawn to try it"
        drawn = _different(g, TensorType(kinds[name], shape))
        for part, array in zip(parts, drawn if name in axes else drawn[:1] * _TIMES, strict=True):
            part[name] = array
    whole = {n: np.concatenate([p[n] for p in parts], axes[n]) if n in axes else a for n, a in parts[0].items()}
    each, together = [run(model, p) for p in parts], run(made, whole)
    for name, got in together.items():
        rows = [np.asarray(e[name], np.float64) for e in each]
        scale = max(float(np.abs(r).max(initial=0)) for r in rows)
        if got.size and np.isnan(np.asarray(got, np.float64)).all():
            return f"'{name}' is not a number for the samples that were drawn"
        wanted = _joined(rows, got.shape)
        if not any(np.allclose(got, w, rtol=1e-3, atol=1e-4 * scale + 1e-9, equal_nan=True) for w in wanted):
            return f"'{name}' of samples together is not that of each"
    return ""


def _joined(rows: Sequence[np.ndarray], shape: tuple[int, ...]) -> list[np.ndarray]:
    """Candidates for the result of batches together: all rows; sum and mean of a number; the value that all share."""
    one = rows[0].shape
    if one == shape:
        if not shape:
            return [np.sum(rows), np.mean(rows)]
        return [rows[0]] if all(np.array_equal(rows[0], r) for r in rows) else []
    if shape == (len(rows), *one):  # a batch of 1 that the file drops
        return [np.stack(rows)]
    axes = [i for i in range(len(one)) if shape == (*one[:i], len(rows) * one[i], *one[i + 1 :])]
    return [np.concatenate(rows, i) for i in axes]


def _different(g: np.random.Generator, t: TensorType) -> list[np.ndarray]:
    """Contents for each batch, as far as possible no two alike: what takes another sample's part would go unseen."""
    rows: list[np.ndarray] = []
    while len(rows) < _TIMES:
        tries = (_drawn(g, t) for _ in range(_TRIES))
        rows.append(next((a for a in tries if not any(np.array_equal(a, b) for b in rows)), _drawn(g, t)))
    return rows


def _drawn(g: np.random.Generator, t: TensorType) -> np.ndarray:
    """Numbers that most models accept: normal ones, 0 or 1 where they are whole."""
    if t.dtype[0] in "fb" and t.dtype != "bool":
        return g.standard_normal(t.shape).astype(DTYPES[t.dtype])
    return g.integers(0, 2, t.shape).astype(DTYPES[t.dtype])
