"""Reading of ONNX files, which are untrusted and checked before anything is allocated for them."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path

import numpy as np
import onnx

from ..errors import ModelError, OpenDimensionsError, UsageError, expect, nearest
from ..language.types import DTYPES, PACKED, TensorType, dtype_from_onnx, show_onnx_dtype
from ..support.files import regular
from ..support.memory import contents_at
from .beside import attach_state
from .graphs import first_output
from .limits import Budget
from .mapped import read, stamp_of

#: older opsets are converted to this one by onnx's version converter
TARGET_OPSET = 18
#: deepest nesting of subgraphs
MAX_DEPTH = 64
#: files of external data that models read by path in this process point to: such a model may be loaded again
_CHECKED: set[str] = set()


def read_model(
    model: str | PathLike[str] | onnx.ModelProto, *, max_bytes: int | None = None, budget: Budget | None = None
) -> onnx.ModelProto:
    """Reads and checks a model; its external data is mapped, not read.  `budget` gets the size of the file.

    ModelError if the file is missing, truncated or not an ONNX model, declares a tensor larger than `max_bytes` (or the
    budget's), or refers to a file outside its own folder.
    """
    budget = budget or Budget(max_bytes)
    if isinstance(model, onnx.ModelProto):
        proto, folder = model, None
    else:
        path = Path(expect("model", model, (str, PathLike), "a path or an ONNX model"))
        try:
            before = stamp_of(regular(path))
            raw = read(path)
        except OSError as e:
            raise ModelError(f"cannot read '{path}': {e.strerror or e}") from None
        proto, folder = onnx.ModelProto(), path.resolve().parent
        try:
            proto.ParseFromString(raw)
        except Exception:
            if raw.startswith(b"version https://git-lfs"):
                raise ModelError(
                    f"'{path}' is only Git LFS's pointer to the model: `git lfs pull` fetches it"
                ) from None
            raise ModelError(f"'{path}' is no ONNX model, or it is truncated ({len(raw):,} bytes)") from None
        if not proto.graph.node and not proto.graph.output:
            raise ModelError(f"'{path}' holds no graph: it is empty, truncated or no ONNX model")
    nodes, tensors = _tensors((n for f in proto.functions for n in f.node), [proto.graph])
    try:
        for text in _all_names(proto):
            if not isinstance(text, str):  # protobuf returns bytes, or raises this, if a name is not UTF-8
                raise ModelError(f"the model has a name that is no UTF-8 text: {text!r:.60}")
        tensors += attach_state(proto, folder)
    except UnicodeDecodeError as e:
        raise ModelError(f"the model has a name that is no UTF-8 text: {e.object!r:.60}") from None
    budget.own(nodes, _check_tensors(tensors, folder, budget))
    if folder is not None and stamp_of(path) != before:  # offsets are those of the file before
        raise ModelError(f"'{path}' has changed while it was read: load it again")
    return proto


def _all_names(proto: onnx.ModelProto) -> Iterator[str]:
    """Every name in a model."""
    yield from (o.domain for o in proto.opset_import)
    for f in proto.functions:
        yield from (f.name, f.domain, *f.input, *f.output, *f.attribute, *(o.domain for o in f.opset_import))
        yield from (a.name for a in f.attribute_proto)
    yield from _names(proto.graph, (n for f in proto.functions for n in f.node))


def _names(graph: onnx.GraphProto, more: Iterable[onnx.NodeProto] = ()) -> Iterator[str]:
    """Every name in a graph, its subgraphs and further nodes."""
    yield graph.name
    for v in (*graph.input, *graph.output):
        yield v.name
        yield from (d.dim_param for d in v.type.tensor_type.shape.dim)
    yield from (t.name for t in graph.initializer)
    for node in (*graph.node, *more):
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        for a in node.attribute:
            yield a.name
            if a.type == onnx.AttributeProto.GRAPH:
                yield from _names(a.g)


def _tensors(nodes: Iterable[onnx.NodeProto], graphs: Iterable[onnx.GraphProto]) -> tuple[int, list[onnx.TensorProto]]:
    """The number of nodes, also inside subgraphs, and all tensors.  ModelError if they are nested too deeply."""
    count, depth = 0, 0
    tensors: list[onnx.TensorProto] = []
    level, lists = list(graphs), [nodes]
    while level or lists:
        lists += [g.node for g in level]
        tensors += [t for g in level for t in g.initializer]
        level = []
        for listed in lists:
            for node in listed:
                count += 1
                for a in node.attribute:
                    if a.type == onnx.AttributeProto.TENSOR:
                        tensors.append(a.t)
                    elif a.type == onnx.AttributeProto.GRAPH:
                        level.append(a.g)
        lists = []
        depth += 1
        if depth > MAX_DEPTH:
            raise ModelError(f"the model's subgraphs are nested more than {MAX_DEPTH} deep")
    return count, tensors


def _check_tensors(tensors: Iterable[onnx.TensorProto], folder: Path | None, budget: Budget) -> int:
    """Checks tensors against the contents of the file; returns their total bytes."""
    total = 0
    for t in tensors:
        name = dtype_from_onnx(t.data_type)
        if name is None:
            continue  # named where it is used
        if any(d < 0 for d in t.dims):
            raise ModelError(f"tensor '{t.name}' has a negative dimension: {list(t.dims)}")
        nbytes = _file_bytes(name, math.prod(t.dims))
        if not nbytes and (why := TensorType(name, tuple(t.dims)).impossible()):
            raise ModelError(f"tensor '{t.name}' {why}")
        if nbytes > budget.tensor_bytes:
            raise ModelError(
                f"tensor '{t.name}' {list(t.dims)} declares {nbytes:,} bytes; the limit is {budget.tensor_bytes:,} "
                "(max_bytes= or --max-bytes)"
            )
        if t.data_location == onnx.TensorProto.EXTERNAL:
            _map_external(t, folder, nbytes)
        elif t.HasField("raw_data") and len(t.raw_data) != nbytes:
            raise ModelError(
                f"tensor '{t.name}' {list(t.dims)} needs {nbytes:,} bytes, the file has {len(t.raw_data):,}"
            )
        total += nbytes
    return total


def _file_bytes(dtype: str, size: int) -> int:
    """Bytes of `size` elements in a file: small elements are packed there."""
    return -(-size * PACKED[dtype] // 8) if dtype in PACKED else size * DTYPES[dtype].itemsize


def _map_external(t: onnx.TensorProto, folder: Path | None, nbytes: int) -> None:
    """Checks an external tensor, and replaces its location by the absolute path of a file inside `folder`."""
    info = {e.key: e.value for e in t.external_data}
    location = info.get("location", "")
    held = contents_at(location) if folder is None else None
    if held is not None and held.array.nbytes == nbytes == int(info.get("length", -1)):
        return
    if folder is None and location not in _CHECKED:
        raise ModelError(f"tensor '{t.name}' has external data: load the model by its path, not as a ModelProto")
    try:
        path = Path(location) if folder is None else (folder / location).resolve()
        if folder is not None and (not location or os.path.isabs(location) or folder not in path.parents):
            raise ModelError(f"tensor '{t.name}' points outside the model's folder: '{location}' is not read")
        if path.exists() and not path.is_file():
            raise ModelError(f"tensor '{t.name}': external data '{location}' is no file")
        offset, length = int(info.get("offset", 0)), int(info.get("length", nbytes))
        size, stamp = path.stat().st_size, (folder is None and info.get("stamp")) or stamp_of(path)
    except (ValueError, OSError, RuntimeError) as e:  # RuntimeError: a link to itself
        raise ModelError(f"tensor '{t.name}': external data '{location}' cannot be read: {e}") from None
    if length != nbytes or offset < 0 or offset + nbytes > size:
        raise ModelError(
            f"tensor '{t.name}' {list(t.dims)} needs {nbytes:,} bytes at {offset:,} of '{location}', "
            f"which has {size:,} (declared length {length:,})"
        )
    del t.external_data[:]
    _CHECKED.add(str(path))
    entries = {"location": str(path), "offset": str(offset), "length": str(nbytes), "stamp": stamp}
    for key, value in entries.items():
        t.external_data.add(key=key, value=value)


def with_own_statistics(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, with a copy (Identity) of each normalisation statistic whose tensor has other uses too.

    Tools that merge equal tensors make one of fresh scales and variances, of fresh biases and means; a training step
    updates the statistics, and nothing else may change with them.
    """
    uses: dict[str, set[int]] = {}
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            uses.setdefault(name, set()).add(i if node.op_type == "BatchNormalization" else -1)
    shared = {n for n, at in uses.items() if at & {3, 4} and len(at) > 1}
    held = {t.name for t in model.graph.initializer}.union(*(n.output for n in model.graph.node))
    if not shared & held:
        return model
    split = onnx.ModelProto()
    split.CopyFrom(model)
    del split.graph.node[:]
    for node in model.graph.node:
        copy = split.graph.node.add()
        copy.CopyFrom(node)
        for i, what in ((3, "mean"), (4, "var")) if node.op_type == "BatchNormalization" else ():
            if i < len(node.input) and node.input[i] in shared:
                copy.input[i] = f"{first_output(node)}.running_{what}"
                split.graph.node.insert(
                    len(split.graph.node) - 1, onnx.helper.make_node("Identity", [node.input[i]], [copy.input[i]])
                )
    return split


def main_opset(model: onnx.ModelProto) -> int:
    """The version of ONNX's own operators; a model that imports other domains only has none of them."""
    versions = {o.domain: o.version for o in model.opset_import}
    return versions.get("", versions.get("ai.onnx", TARGET_OPSET if versions else 1))


def fixed_inputs(
    graph: onnx.GraphProto,
    initializers: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    batch: int | None,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, TensorType]:
    """The types of the graph's real inputs with every dimension known.

    UsageError if a dimension is not given, or if a given shape contradicts the model.
    """
    inputs = [i for i in graph.input if i.name not in initializers]
    for shape in expect("input_shapes", shapes, Mapping, "shapes by input").values():
        expect("input_shapes", shape, Sequence, "lists of dimensions by input")
    _check_names([i.name for i in graph.input], "input")
    _check_names([t.name for t in graph.initializer], "initializer")
    for name in shapes:
        if name not in {i.name for i in inputs}:
            raise UsageError(f"input_shapes: no input is called '{name}'{nearest(name, [i.name for i in inputs])}")
    if batch is not None and (not isinstance(batch, (int, np.integer)) or batch < 1):
        raise UsageError(f"batch must be a whole number of at least 1, not {batch}")
    for name, shape in shapes.items():
        if not all(isinstance(d, (int, np.integer)) and d >= 0 for d in shape):
            raise UsageError(f"input_shapes: '{name}' needs whole numbers that are not negative, not {list(shape)}")
    symbols = {**_sizes(inputs, sizes or {}), **_symbols(inputs, shapes, batch)}
    for name, size in (sizes or {}).items():
        if symbols[name] != size:
            raise UsageError(f"dims: '{name}' is {size}, but the batch or an input's shape makes it {symbols[name]}")
    _check_open(inputs, shapes, symbols, batch)
    types = {i.name: _fixed(i, shapes.get(i.name), symbols, batch) for i in inputs}
    for name, t in types.items():
        if why := t.impossible():
            raise (UsageError if batch or shapes else ModelError)(f"input '{name}' {why}")
    return types


def _check_names(names: Sequence[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if not name or name in seen:
            raise ModelError(f"the model has two {what}s called '{name}'" if name else f"an {what} has no name")
        seen.add(name)


def _symbols(
    inputs: Sequence[onnx.ValueInfoProto], shapes: Mapping[str, Sequence[int]], batch: int | None
) -> dict[str, int]:
    """Values of symbolic dimensions, from the given shapes and the batch."""
    sizes: dict[str, int] = {}
    for i in inputs:
        dims = i.type.tensor_type.shape.dim
        for d, size in zip(dims, shapes.get(i.name, ()), strict=False):
            if symbol(d):
                sizes.setdefault(symbol(d), int(size))
        if batch is not None and dims and symbol(dims[0]):
            sizes.setdefault(symbol(dims[0]), batch)
    return sizes


def _sizes(inputs: Sequence[onnx.ValueInfoProto], sizes: Mapping[str, int]) -> dict[str, int]:
    """Given sizes of open dimensions, checked."""
    names = list(dict.fromkeys(open_names(inputs)))
    for name, size in sizes.items():
        if name not in names:
            which = f"; open are: {', '.join(names)}" if names else "; no input has open dimensions"
            raise UsageError(f"dims: no open dimension is called '{name}'{nearest(name, names)}{which}")
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise UsageError(f"dims: '{name}' must be a whole number of at least 1, not {size!r}")
    return {n: int(size) for n, size in sizes.items()}


def symbol(d: onnx.TensorShapeProto.Dimension) -> str:
    """The name of an open dimension; "" where it has none, which Paddle's exporter writes as "?"."""
    return "" if d.dim_param == "?" else d.dim_param


def open_names(inputs: Sequence[onnx.ValueInfoProto]) -> dict[str, list[tuple[str, int]]]:
    """Where each open dimension stands, as (input, axis), by its name: its symbol, or `INPUT.AXIS`."""
    names: dict[str, list[tuple[str, int]]] = {}
    for i in inputs:
        for axis, d in enumerate(i.type.tensor_type.shape.dim):
            if not d.HasField("dim_value") or d.dim_value < 0:
                names.setdefault(symbol(d) or f"{i.name}.{axis}", []).append((i.name, axis))
    return names


def _check_open(
    inputs: Sequence[onnx.ValueInfoProto],
    shapes: Mapping[str, Sequence[int]],
    symbols: Mapping[str, int],
    batch: int | None,
) -> None:
    """UsageError that names every dimension that is left open, and what fixes them."""
    missing = {
        name: where
        for name, places in open_names(inputs).items()
        if name not in symbols
        and (where := [(i, a) for i, a in places if i not in shapes and not (a == 0 and batch is not None)])
    }
    if not missing:
        return
    first = [n for n, places in missing.items() if any(axis == 0 for _, axis in places)]
    others = [n for n in missing if n not in first]
    listed = ", ".join(
        f"{n} ({', '.join(f'axis {axis} of {i}' for i, axis in places)})"
        if f"{places[0][0]}.{places[0][1]}" != n
        else n
        for n, places in missing.items()
    )
    api = [*(["batch=8"] if first else []), *([f"dims={dict.fromkeys(others, 16)}"] if others else [])]
    command = [*(["--batch 8"] if first else []), *(f"--dim {shlex.quote(n)}=16" for n in others)]
    raise OpenDimensionsError(
        f"{'dimensions' if len(missing) > 1 else 'a dimension'} of the inputs "
        f"{'are' if len(missing) > 1 else 'is'} open: "
        f"{listed}. Give sizes, for example {', '.join(api)} ({' '.join(command)})"
    )


def _fixed(
    i: onnx.ValueInfoProto, sizes: Sequence[int] | None, symbols: Mapping[str, int], batch: int | None
) -> TensorType:
    if not i.type.HasField("tensor_type"):
        raise ModelError(f"input '{i.name}' is no tensor; only tensors can be fed")
    dtype = dtype_from_onnx(i.type.tensor_type.elem_type)
    if dtype is None:
        kind = show_onnx_dtype(i.type.tensor_type.elem_type)
        raise ModelError(f"input '{i.name}' has element type {kind}, which is not supported")
    has_shape = i.type.tensor_type.HasField("shape")
    dims = list(i.type.tensor_type.shape.dim)
    if sizes is not None:
        if has_shape and (
            len(sizes) != len(dims)
            or any(
                d.HasField("dim_value") and d.dim_value > 0 and d.dim_value != g
                for d, g in zip(dims, sizes, strict=True)
            )
        ):
            rest = [d.dim_value in (0, g) for d, g in zip(dims[1:], sizes[1:], strict=False)]
            hint = (
                f": batch={sizes[0]} opens a batch that the file fixes"
                if len(sizes) == len(dims) > 0 and all(rest)
                else ""
            )
            raise UsageError(f"input '{i.name}' is {_show(dims)} in the model; {list(sizes)} does not fit{hint}")
        return TensorType(dtype, tuple(int(d) for d in sizes))
    if not has_shape:
        raise UsageError(f"input '{i.name}' has no shape in the model: give input_shapes={{'{i.name}': (...)}}")
    shape = []
    for axis, d in enumerate(dims):
        size = d.dim_value if d.HasField("dim_value") else symbols.get(symbol(d) or f"{i.name}.{axis}", 0)
        if size <= 0 and axis == 0 and batch is not None and not d.dim_value:
            size = batch
        shape.append(size)
    return TensorType(dtype, tuple(shape))


def _show(dims: Sequence[onnx.TensorShapeProto.Dimension]) -> str:
    return "[" + ", ".join(str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in dims) + "]"


def at_sizes(
    graph: onnx.GraphProto, shapes: Mapping[str, tuple[int, ...]], batch: int | None, sizes: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """The inputs' shapes with another batch (None: the same) and other sizes of `other_dimensions`, by their names.

    The batch: dynamic first dimensions, and dimensions of their names.  UsageError if no first dimension is dynamic.
    """
    others = other_dimensions(graph, shapes)
    changed = {place: size for name, size in sizes.items() for place in others[name]}
    if batch is not None:
        elsewhere = {place for places in others.values() for place in places}
        first = [p for p in open_dimensions(graph) if p[0] in shapes and p not in elsewhere]
        fixed = next((s[0] for s in shapes.values() if s), 1)
        if not first and batch != fixed:
            raise UsageError(
                f"the model fixes its batch at {fixed}, so that it cannot be made for {batch}: load it with "
                f"batch={batch}, which opens it, or export it with a dynamic first dimension"
            )
        changed |= dict.fromkeys(first, batch)
    return {n: tuple(changed.get((n, i), d) for i, d in enumerate(s)) for n, s in shapes.items()}


def other_dimensions(graph: onnx.GraphProto, names: Iterable[str]) -> dict[str, list[tuple[str, int]]]:
    """Where each open dimension besides the batch stands, as (input of `names`, axis), by its name."""
    wanted = set(names)
    by_name = open_names([i for i in graph.input if i.name in wanted])
    return {name: places for name, places in by_name.items() if all(axis for _, axis in places)}


def open_dimensions(graph: onnx.GraphProto) -> list[tuple[str, int]]:
    """(input, axis) of every dynamic dimension of the model."""
    weights = {t.name for t in graph.initializer}
    return [
        (i.name, axis)
        for i in graph.input
        if i.name not in weights
        for axis, d in enumerate(i.type.tensor_type.shape.dim)
        if not d.HasField("dim_value")
    ]
