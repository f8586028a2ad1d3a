"""Models that fix their batch, made for any: the numbers that hold it are found, and the result is checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx

from ..errors import RecomputeError, UsageError
from ..language.types import DTYPES, dtype_from_onnx
from .graphs import names_read
from .tensors import tensor_array

_BATCH = "batch"
#: a model and inputs → its outputs by name, in inference mode
Run = Callable[[onnx.ModelProto, dict[str, np.ndarray]], Mapping[str, np.ndarray]]


def fixed_batch(graph: onnx.GraphProto) -> int | None:
    """The batch that a model fixes: the first dimension of its first input with dimensions; None: one is open."""
    weights = {t.name for t in graph.initializer}
    found = [list(i.type.tensor_type.shape.dim) for i in graph.input if i.name not in weights]
    firsts = [dims[0] for dims in found if dims]
    if not firsts or any(not d.HasField("dim_value") or d.dim_value < 1 for d in firsts):
        return None
    return int(firsts[0].dim_value)


#: elements of an input that is drawn, at most
_MOST = 1 << 28


def rebatched(model: onnx.ModelProto, batch: int | None, run: Run) -> onnx.ModelProto:
    """The model with an open batch instead of the one that it fixes.

    The first dimension of inputs, and the numbers that hold the batch in the shapes of Reshape and Expand, are changed;
    then samples of two batches, run one after another in the model and together in the result, must give the same.
    UsageError where they do not.  The model itself where nothing is to be changed.
    """
    fixed = fixed_batch(model.graph)
    if fixed is None or batch in (None, fixed):
        return model
    try:
        made = _opened(model, fixed)
        why = _differs(model, made, fixed, run)
    except RecomputeError as e:
        why = str(e)
    if why:
        raise UsageError(
            f"the model fixes its batch at {fixed}, and it could not be made for {batch} ({why}): load it with "
            f"batch={fixed}, or export it with a dynamic first dimension (torch.onnx.export(..., dynamic_shapes=...))"
        )
    return made


def _opened(model: onnx.ModelProto, fixed: int) -> onnx.ModelProto:
    """A copy whose inputs have an open first dimension, with shapes to match."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    known = {t.name: tensor_array(t) for t in graph.initializer if t.data_type == onnx.TensorProto.INT64}
    for n in graph.node:
        if n.op_type == "Constant" and n.attribute and n.attribute[0].name == "value":
            known[n.output[0]] = onnx.numpy_helper.to_array(n.attribute[0].t)
    weights = {t.name for t in graph.initializer}
    fed: set[str] = set()
    for i in graph.input:
        dims = i.type.tensor_type.shape.dim
        if i.name not in weights and dims and dims[0].dim_value == fixed:
            dims[0].dim_param = _BATCH
            fed.add(i.name)
    for o in (*graph.output, *graph.value_info):
        o.type.tensor_type.ClearField("shape")
    del graph.value_info[:]
    nodes = list(graph.node)
    del graph.node[:]
    first = sorted(fed)[0]
    for node in nodes:
        depends = not fed.isdisjoint(names_read([node]))
        if node.op_type in ("Reshape", "Expand") and len(node.input) > 1 and node.input[1] in known:
            shape = known[node.input[1]].reshape(-1).tolist()
            found = _reshaped(shape, fixed) if node.op_type == "Reshape" and depends else None
            if node.op_type == "Expand" and shape and shape[0] == fixed:
                graph.node.extend(_sized(node, first, shape[1:]))
            elif found is not None:
                node.input[1] = f"{node.output[0]}/shape_of_any_batch"
                graph.initializer.append(onnx.numpy_helper.from_array(np.array(found, np.int64), node.input[1]))
        if depends:
            fed.update(node.output)
        graph.node.append(node)
    return made


def _reshaped(shape: list[int], fixed: int) -> list[int] | None:
    """The target of a Reshape with the batch left open; None where it is already."""
    rest = shape[1:]
    if shape and shape[0] == fixed:
        return [0 if -1 in rest else -1, *rest]
    if not shape or -1 in shape:
        return None
    at = next((i for i, d in enumerate(shape) if d == fixed), 0)
    return None if shape[0] == 0 else [*shape[:at], -1, *shape[at + 1 :]]


def _sized(node: onnx.NodeProto, source: str, rest: list[int]) -> list[onnx.NodeProto]:
    """Nodes that make a shape of the batch of an input and of further sizes, which becomes the node's."""
    name, make = f"{node.output[0]}/any_batch", onnx.helper.make_node
    constant = onnx.numpy_helper.from_array
    node.input[1] = f"{name}/shape"
    return [
        make("Shape", [source], [f"{name}/dims"]),
        make("Constant", [], [f"{name}/first"], value=constant(np.zeros(1, np.int64))),
        make("Gather", [f"{name}/dims", f"{name}/first"], [f"{name}/batch"]),
        make("Constant", [], [f"{name}/rest"], value=constant(np.array(rest, np.int64))),
        make("Concat", [f"{name}/batch", f"{name}/rest"], [node.input[1]], axis=0),
    ]


def _differs(model: onnx.ModelProto, made: onnx.ModelProto, fixed: int, run: Run) -> str:
    """How the results of two batches together differ from those of each; "" where they do not."""
    g = np.random.default_rng(0)
    parts: list[dict[str, np.ndarray]] = [{}, {}]
    opened = {i.name for i in made.graph.input if any(d.dim_param == _BATCH for d in i.type.tensor_type.shape.dim[:1])}
    weights = {t.name for t in model.graph.initializer}
    for i in (i for i in model.graph.input if i.name not in weights):
        t = i.type.tensor_type
        shape = [d.dim_value for d in t.shape.dim]
        if min(shape, default=1) < 0 or math.prod(shape) > _MOST:
            return f"'{i.name}' of shape {shape} cannot be drawn to try it"
        drawn = [_drawn(g, dtype_from_onnx(t.elem_type) or "f32", shape) for _ in parts]
        for part, array in zip(parts, drawn if i.name in opened else drawn[:1] * 2, strict=True):
            part[i.name] = array
    both = {n: np.concatenate([p[n] for p in parts]) if n in opened else a for n, a in parts[0].items()}
    one, other, together = run(model, parts[0]), run(model, parts[1]), run(made, both)
    for name, got in together.items():
        a, b = np.asarray(one[name], np.float64), np.asarray(other[name], np.float64)
        wanted = [a + b, (a + b) / 2] if a.shape == got.shape else []
        if a.ndim and a.shape[0] and got.shape == (2 * a.shape[0], *a.shape[1:]):
            wanted = [np.concatenate([a, b])]
        scale = max(float(np.abs(a).max(initial=0)), float(np.abs(b).max(initial=0)))
        if not any(np.allclose(got, w, rtol=1e-3, atol=1e-4 * scale + 1e-9, equal_nan=True) for w in wanted):
            return f"'{name}' of two samples together is not that of each"
    return ""


def _drawn(g: np.random.Generator, dtype: str, shape: list[int]) -> np.ndarray:
    """Numbers that most models accept: normal ones, 0 or 1 where they are whole."""
    if dtype[0] in "fb" and dtype != "bool":
        return g.standard_normal(shape).astype(DTYPES[dtype])
    return (g.integers(0, 2, max(math.prod(shape), 0)).reshape(shape)).astype(DTYPES[dtype])
