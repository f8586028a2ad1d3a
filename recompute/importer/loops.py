"""Unrolling of Loop and Scan: a program has no control flow, so it contains the nodes of every iteration.

Loop-invariant nodes are run once, before the first iteration; carried values are not copied; slices and results of a
Scan along its first axis are views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.helper import make_node

from ..errors import ModelError
from ..language.types import DTYPES, dtype_from_onnx
from .graphs import first_output
from .inputs import unknown
from .limits import NODE
from .state import ImportState
from .subgraph import Subgraph, final_names
from .trips import Scope, written_nodes
from .unrolled import charge

#: attribute by which a Scan of opset 8 passes onnx's version converter as a Loop (see `hide_old_scans`)
OLD_SCAN = "recompute_scan_8"


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def check_trips(
    importer: ImportState, body: Subgraph, trips: int, types: dict[str, tuple[int, ...]], what: str
) -> None:
    """LimitError if a loop, with nested loops, would become too many nodes, before any is written.

    `types`: shapes of the body's inputs, as far as they are known.
    """
    scope = Scope.of(importer, body, types)
    nodes = trips * sum(written_nodes(n, scope) for n in body.nodes)
    if nodes:
        importer.budget.check_work(nodes * NODE, f"{what}, {nodes:,} nodes when its loops are written out")


# -- Loop --------------------------------------------------------------------------------------------------------------


def unroll_loop(importer: ImportState, node: onnx.NodeProto) -> None:
    """Unrolls a Loop whose trip count, or whose condition in each iteration, is known."""
    if any(a.name == OLD_SCAN for a in node.attribute):
        scan_of_opset_8(importer, node)
        return
    limit = _trip_count(importer, node)
    goes_on = True
    if len(node.input) > 1 and node.input[1]:
        goes_on = _condition(importer, node.input[1], "its condition (input 1)")
    body = Subgraph(importer, node, "body")
    carried = len(node.input) - 2
    inputs = [v.name for v in body.graph.input]
    if len(inputs) != carried + 2 or len(body.graph.output) < carried + 1 or carried < 0:
        raise ModelError(
            f"it carries {carried} values, but its body has {len(inputs)} inputs and {len(body.graph.output)} outputs"
        )
    if len(body.graph.output) - 1 < len(node.output):
        raise ModelError(f"its body has {len(body.graph.output)} outputs, the node {len(node.output)}")
    prefix = first_output(node)
    values = list(node.input[2:])
    collected: list[list[str]] = [[] for _ in body.graph.output[carried + 1 :]]
    if goes_on and (limit is None or limit > 0):
        truth = f"{prefix}/goes_on"
        importer.known[truth] = importer.constant(np.array(True))
        body.names[inputs[1]] = truth  # it is true whenever the body runs
        body.hoist([inputs[0], *inputs[2:]])
        with importer.budget.again():
            values = _iterate(body, limit, prefix, values, collected)
    for outer, inner in zip(node.output[:carried], values, strict=False):
        if outer:
            importer.alias(outer, inner)
    for i, (outer, parts) in enumerate(zip(node.output[carried:], collected, strict=False)):
        if outer:
            _stack(importer, outer, parts, 0, body.graph.output[carried + 1 + i])


def _iterate(
    body: Subgraph, limit: int | None, prefix: str, values: list[str], collected: list[list[str]]
) -> list[str]:
    """Runs the body until the trip count is reached or its condition is false; returns the carried values."""
    importer = body.importer
    inputs = [v.name for v in body.graph.input]
    outputs = [v.name for v in body.graph.output]
    problems = importer.problems()
    if outputs[0] in body.names:  # the condition is the same in each iteration
        always = _condition(importer, body.names[outputs[0]], "the condition of its body")
        limit = limit if always else 1
        if limit is None:
            raise ModelError("it never ends: it has no trip count, and its condition is always true")
        check_trips(importer, body, limit, {}, f"{limit:,} iterations")
    t = 0
    while limit is None or t < limit:
        charge(importer.budget, body.units, f"after {t:,} iterations")
        number = f"{prefix}/{t}/number"
        importer.known[number] = importer.constant(np.array(t, np.int64))
        names = body.inline(f"{prefix}/{t}", {inputs[0]: number, **dict(zip(inputs[2:], values, strict=True))})
        if importer.problems() > problems:
            break
        values = [names.get(o, o) for o in outputs[1 : 1 + len(values)]]
        for parts, o in zip(collected, outputs[1 + len(values) :], strict=True):
            parts.append(names.get(o, o))
        t += 1
        if (limit is None or t < limit) and not _condition(
            importer, names.get(outputs[0], outputs[0]), f"whether it goes on after {t} iterations"
        ):
            break
    return values


def _trip_count(importer: ImportState, node: onnx.NodeProto) -> int | None:
    """The largest number of iterations; None if only the condition ends the loop."""
    if not node.input or not node.input[0]:
        return None
    contents = importer.contents(node.input[0])
    if contents is None:
        raise ModelError(f"its trip count ('{node.input[0]}') {unknown(importer, node.input[0])}")
    if contents.array.size != 1:
        raise ModelError(f"its trip count has {contents.array.size} elements, it needs one")
    return int(contents.array.reshape(()))


def _condition(importer: ImportState, name: str, what: str) -> bool:
    contents = importer.contents(name)
    if contents is None:
        raise ModelError(f"{what} {unknown(importer, name)}")
    if contents.array.size != 1:
        raise ModelError(f"{what} has {contents.array.size} elements, it needs one")
    return bool(contents.array.reshape(()))


# -- Scan --------------------------------------------------------------------------------------------------------------


def unroll_scan(importer: ImportState, node: onnx.NodeProto) -> None:
    """Unrolls a Scan; its number of steps is the length of its scan inputs."""
    options = _attributes(node)
    m = int(options.get("num_scan_inputs", 0))
    n = len(node.input) - m
    if m < 1 or n < 0 or not all(node.input):
        raise ModelError(f"it has {len(node.input)} inputs, of which num_scan_inputs={m} are scanned")
    body = Subgraph(importer, node, "body")
    k = len(body.graph.output) - n
    if len(body.graph.input) != len(node.input) or k < 0 or len(node.output) > n + k:
        raise ModelError(
            f"it has {len(node.input)} inputs and {len(node.output)} outputs, its body "
            f"{len(body.graph.input)} and {len(body.graph.output)}"
        )
    ways = _listed(options, "scan_input_directions", m)
    axes = _listed(options, "scan_input_axes", m)
    steps = _steps(importer, node.input[n:], axes)
    prefix = first_output(node)
    body.hoist([v.name for v in body.graph.input])
    types = {v.name: importer.type_of(x).shape for v, x in zip(body.graph.input, node.input, strict=True) if x}
    for v, axis in zip(body.graph.input[n:], axes, strict=True):
        shape = list(types[v.name])
        del shape[axis]
        types[v.name] = tuple(shape)
    check_trips(importer, body, steps, types, f"{steps:,} steps")
    charge(importer.budget, steps * body.units, f"{steps:,} steps")
    rows = [
        _rows(importer, f"{prefix}/{v.name}", x, axis, steps)[:: -1 if way else 1]
        for v, x, axis, way in zip(body.graph.input[n:], node.input[n:], axes, ways, strict=True)
    ]
    with importer.budget.again():
        values, collected = _scan(importer, body, prefix, list(node.input[:n]), rows, steps, node.output)
    for outer, inner in zip(node.output[:n], values, strict=False):
        if outer:
            importer.alias(outer, inner)
    ways, axes = _listed(options, "scan_output_directions", k), _listed(options, "scan_output_axes", k)
    for i, (outer, parts) in enumerate(zip(node.output[n:], collected, strict=False)):
        if outer:
            _stack(importer, outer, parts[:: -1 if ways[i] else 1], axes[i], body.graph.output[n + i])


def _scan(
    importer: ImportState,
    body: Subgraph,
    prefix: str,
    values: list[str],
    rows: Sequence[Sequence[str]],
    steps: int,
    final: Sequence[str],
) -> tuple[list[str], list[list[str]]]:
    """Runs the body for each step.  Returns the final state and, for each scan output, its parts in order.

    `final`: the names that the last step gives to the state that it writes.
    """
    inputs = [v.name for v in body.graph.input]
    outputs = [v.name for v in body.graph.output]
    n = len(values)
    collected: list[list[str]] = [[] for _ in outputs[n:]]
    problems = importer.problems()
    for t in range(steps):
        if t == steps - 1:
            body.targets = final_names(body, final[:n])
        names = body.inline(f"{prefix}/{t}", dict(zip(inputs, [*values, *(r[t] for r in rows)], strict=True)))
        if importer.problems() > problems:
            break
        values = [names.get(o, o) for o in outputs[:n]]
        for parts, o in zip(collected, outputs[n:], strict=True):
            parts.append(names.get(o, o))
    body.targets = {}
    return values, collected


def _listed(options: Mapping[str, Any], name: str, count: int) -> list[int]:
    """A list attribute; zeros if it is absent."""
    axes = [int(i) for i in options.get(name, ())]
    if axes and len(axes) != count:
        raise ModelError(f"its {name} has {len(axes)} numbers, it needs {count}")
    return axes or [0] * count


def _steps(importer: ImportState, names: Sequence[str], axes: Sequence[int]) -> int:
    lengths = set()
    for name, axis in zip(names, axes, strict=True):
        t = importer.type_of(name)
        if not -t.ndim <= axis < t.ndim:
            raise ModelError(f"scan axis {axis} is not an axis of '{name}' ({t})")
        lengths.add(t.shape[axis])
    if len(lengths) != 1:
        raise ModelError(f"its scan inputs have different numbers of steps: {sorted(lengths)}")
    return lengths.pop()


def _rows(importer: ImportState, prefix: str, source: str, axis: int, steps: int) -> list[str]:
    """The slices of a value along an axis, without that axis: views, after the axis is moved to the front."""
    t = importer.type_of(source)
    axis %= t.ndim
    if steps == 0:
        return []
    if axis:
        perm = [axis, *(i for i in range(t.ndim) if i != axis)]
        _run(importer, "Transpose", [source], [f"{prefix}/first"], perm=perm)
        source = f"{prefix}/first"
    if steps == 1:
        rows = [source]
    else:
        rows = [f"{prefix}/{i}/kept" for i in range(steps)]
        sizes = _constant(importer, f"{prefix}/sizes", [1] * steps)
        _run(importer, "Split", [source, sizes], rows, axis=0)
    axes = _constant(importer, f"{prefix}/axes", [0])
    for i, row in enumerate(rows):
        _run(importer, "Squeeze", [row, axes], [f"{prefix}/{i}"])
    return [f"{prefix}/{i}" for i in range(steps)]


def _stack(importer: ImportState, outer: str, parts: Sequence[str], axis: int, declared: onnx.ValueInfoProto) -> None:
    """outer = parts along a new axis."""
    if not parts:
        if not importer.problems():
            importer.known[outer] = importer.constant(_empty(outer, axis, declared))
        return
    ndim = importer.type_of(parts[0]).ndim + 1
    if not -ndim <= axis < ndim:
        raise ModelError(f"scan output axis {axis} is not an axis of '{outer}', which has {ndim}")
    axis %= ndim
    axes = _constant(importer, f"{outer}/axes", [0])
    rows = [f"{outer}/{i}/row" for i in range(len(parts))]
    for part, row in zip(parts, rows, strict=True):
        _run(importer, "Unsqueeze", [part, axes], [row])
    joined = f"{outer}/first" if axis else outer
    _run(importer, "Concat", rows, [joined], axis=0)
    if axis:
        perm = [*range(1, axis + 1), 0, *range(axis + 1, ndim)]
        _run(importer, "Transpose", [joined], [outer], perm=perm)


def _empty(outer: str, axis: int, declared: onnx.ValueInfoProto) -> np.ndarray:
    """The scan output of a loop without iterations: no rows of the type that the body declares."""
    t = declared.type.tensor_type
    dtype = dtype_from_onnx(t.elem_type)
    dims = [d.dim_value if d.HasField("dim_value") else -1 for d in t.shape.dim]
    if dtype is None or not t.HasField("shape") or min(dims, default=0) < 0:
        raise ModelError(f"it has no iterations, and its body does not declare the type of '{outer}'")
    axis %= len(dims) + 1
    return np.zeros((*dims[:axis], 0, *dims[axis:]), DTYPES[dtype])


def _constant(importer: ImportState, name: str, data: Sequence[int]) -> str:
    importer.known[name] = importer.constant(np.array(data, np.int64))
    return name


def _run(importer: ImportState, op_type: str, ins: Sequence[str], outs: Sequence[str], **attributes: Any) -> None:
    importer.used.update(outs)
    importer.run_node(make_node(op_type, ins, outs, **attributes))


# -- Scan of opset 8 ---------------------------------------------------------------------------------------------------


def hide_old_scans(graph: onnx.GraphProto) -> None:
    """Writes Scan nodes of opset 8 as marked Loops: onnx's version converter would drop their batch dimension.

    The converter keeps a Loop as it is, and converts its body.
    """
    for node in graph.node:
        if node.op_type == "Scan" and node.domain in ("", "ai.onnx"):
            node.op_type = "Loop"
            node.attribute.append(onnx.helper.make_attribute(OLD_SCAN, 1))
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                hide_old_scans(a.g)


def scan_of_opset_8(importer: ImportState, node: onnx.NodeProto) -> None:
    """(sequence_lens?, states [batch, ...], scan inputs [batch, steps, ...]): each batch element scans by itself."""
    options = _attributes(node)
    m = int(options.get("num_scan_inputs", 0))
    n = len(node.input) - 1 - m
    body = Subgraph(importer, node, "body")
    k = len(body.graph.output) - n
    if m < 1 or n < 0 or k < 0 or len(body.graph.input) != n + m or len(node.output) > n + k:
        raise ModelError(f"its inputs and outputs do not fit its body and num_scan_inputs={m}")
    ways = _listed(options, "directions", m)
    states, scanned = list(node.input[1 : 1 + n]), list(node.input[1 + n :])
    batch = _steps(importer, node.input[1:], [0] * (n + m))
    steps = _steps(importer, scanned, [1] * m)
    lengths = _lengths(importer, node.input[0], batch, steps)
    prefix = first_output(node)
    body.hoist([v.name for v in body.graph.input])
    check_trips(importer, body, batch * steps, {}, f"{batch:,} times {steps:,} steps")
    charge(importer.budget, batch * steps * body.units, f"{batch:,} times {steps:,} steps")
    split = [_rows(importer, f"{prefix}/in{i}", x, 0, batch) for i, x in enumerate([*states, *scanned])]
    names: list[list[str]] = [[] for _ in range(n + k)]
    for b in range(batch):
        here = f"{prefix}/{b}"
        rows = []
        for i, way in enumerate(ways):
            parts = _rows(importer, f"{here}/in{i}", split[n + i][b], 0, steps)[: lengths[b]]
            rows.append(parts[:: -1 if way else 1])
        with importer.budget.again():
            values, collected = _scan(importer, body, here, [s[b] for s in split[:n]], rows, lengths[b], [])
        if importer.problems():
            return
        for i, name in enumerate(values):
            names[i].append(name)
        for i, parts in enumerate(collected):
            names[n + i].append(f"{here}/out{i}")
            _stack(importer, f"{here}/out{i}", _padded(importer, here, parts, steps), 0, body.graph.output[n + i])
    for outer, parts, declared in zip(node.output, names, body.graph.output, strict=False):
        if outer:
            _stack(importer, outer, parts, 0, declared)


def _padded(importer: ImportState, prefix: str, parts: list[str], steps: int) -> list[str]:
    """Zeros for the steps after a sequence's end."""
    if len(parts) == steps or not parts:
        return parts
    t = importer.type_of(parts[0])
    importer.known[f"{parts[0]}/none"] = importer.constant(np.zeros(t.shape, t.numpy))
    return [*parts, *[f"{parts[0]}/none"] * (steps - len(parts))]


def _lengths(importer: ImportState, name: str, batch: int, steps: int) -> list[int]:
    if not name:
        return [steps] * batch
    contents = importer.contents(name)
    if contents is None:
        raise ModelError("its sequence lengths are computed from data; a static program needs them known")
    lengths = [int(n) for n in contents.array.reshape(-1)]
    if len(lengths) != batch or not all(min(1, steps) <= n <= steps for n in lengths):
        raise ModelError(f"its sequence lengths {lengths[:8]} do not fit {batch} sequences of {steps} steps")
    return lengths
