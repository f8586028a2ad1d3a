"""Control flow, sequences and optionals, which are evaluated at compile time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from ..errors import ModelError
from .costs import MAX_SEQUENCE
from .inputs import unknown
from .limits import NODE
from .loops import unroll_loop, unroll_scan
from .state import ImportState
from .subgraph import take_branch

# -- sequences: lists of value names, known at compile time -----------------------------------------------------------


def _split_to_sequence(importer: ImportState, node: onnx.NodeProto) -> None:
    options = {a.name: a.i for a in node.attribute}
    source = importer.type_of(node.input[0])
    axis = options.get("axis", 0) % max(source.ndim, 1)
    length = source.shape[axis]
    if len(node.input) > 1 and node.input[1]:
        contents = importer.contents(node.input[1])
        if contents is None:
            raise ModelError(f"its split, '{node.input[1]}', {unknown(importer, node.input[1])}")
        array = contents.array
        size = int(array) if array.ndim == 0 else 0
        if size > 0:
            _check_length(importer, -(-length // size), 0)
        sizes = [min(size, length - i) for i in range(0, length, size)] if size else array.tolist()
        squeeze = False
    else:
        _check_length(importer, length, 0)
        sizes, squeeze = [1] * length, not options.get("keepdims", 1)
    _check_length(importer, len(sizes), 2)
    parts = [f"{node.output[0]}/{i}" for i in range(len(sizes))]
    held = [f"{p}/kept" for p in parts] if squeeze else parts
    importer.known[f"{node.output[0]}/sizes"] = importer.constant(np.array(sizes, np.int64))
    importer.known[f"{node.output[0]}/axis"] = importer.constant(np.array([axis], np.int64))
    body = [onnx.helper.make_node("Split", [node.input[0], f"{node.output[0]}/sizes"], held, axis=axis)]
    if squeeze:
        axes = f"{node.output[0]}/axis"
        body += [onnx.helper.make_node("Squeeze", [h, axes], [p]) for h, p in zip(held, parts, strict=True)]
    importer.used.update([*held, *parts])
    importer.run_nodes(body)
    importer.sequences[node.output[0]] = parts


def _check_length(importer: ImportState, length: int, nodes: int) -> None:
    """Charges a sequence: a list, and `nodes` for each of its tensors.  ModelError if it is too long."""
    if length > MAX_SEQUENCE:
        raise ModelError(f"a sequence of {length:,} tensors is too long: the limit is {MAX_SEQUENCE:,}")
    importer.budget.take(8 * length)
    importer.budget.spend(length * (nodes * NODE + 10), f"a sequence of {length:,} tensors")


def _sequence_at(importer: ImportState, node: onnx.NodeProto) -> None:
    items = importer.sequences[node.input[0]]
    at = _position(importer, node.input[1], len(items))
    importer.run_nodes([onnx.helper.make_node("Identity", [items[at]], [node.output[0]], name=node.name)])


def _position(importer: ImportState, name: str, length: int) -> int:
    contents = importer.contents(name)
    if contents is None:
        raise ModelError(f"its position {unknown(importer, name)}")
    at = int(contents.array.reshape(()))
    if not -length <= at <= length:
        raise ModelError(f"position {at} is outside of a sequence of {length}")
    return at


def _sequence_insert(importer: ImportState, node: onnx.NodeProto) -> None:
    items = list(importer.sequences[node.input[0]])
    at = _position(importer, node.input[2], len(items)) if len(node.input) > 2 and node.input[2] else len(items)
    items.insert(at, node.input[1])
    _check_length(importer, len(items), 0)
    importer.sequences[node.output[0]] = items


def _sequence_erase(importer: ImportState, node: onnx.NodeProto) -> None:
    items = list(importer.sequences[node.input[0]])
    del items[_position(importer, node.input[1], len(items)) if len(node.input) > 1 and node.input[1] else -1]
    importer.sequences[node.output[0]] = items


def _concat_from_sequence(importer: ImportState, node: onnx.NodeProto) -> None:
    options = {a.name: a.i for a in node.attribute}
    items, axis = list(importer.sequences[node.input[0]]), options["axis"]
    _check_length(importer, len(items), 1)
    body = []
    if options.get("new_axis", 0):
        axes = f"{node.output[0]}/axes"
        importer.known[axes] = importer.constant(np.array([axis], np.int64))
        for i, item in enumerate(items):
            items[i] = f"{node.output[0]}/{i}"
            body.append(onnx.helper.make_node("Unsqueeze", [item, axes], [items[i]]))
    body.append(onnx.helper.make_node("Concat", items, [node.output[0]], axis=axis, name=node.name))
    importer.used.update(items)
    importer.run_nodes(body)


def _sequence_length(importer: ImportState, node: onnx.NodeProto) -> None:
    length = np.array(len(importer.sequences[node.input[0]]), np.int64)
    importer.known[node.output[0]] = importer.constant(length)


def _sequence_construct(importer: ImportState, node: onnx.NodeProto) -> None:
    importer.sequences[node.output[0]] = list(node.input)


def _sequence_empty(importer: ImportState, node: onnx.NodeProto) -> None:
    importer.sequences[node.output[0]] = []


def on_sequences(importer: ImportState, node: onnx.NodeProto) -> None:
    """Other operators that take sequences or optionals."""
    if node.op_type == "Identity":
        importer.alias(node.output[0], node.input[0])
    elif node.op_type == "SequenceMap":
        importer.expand_node(node)
    else:
        raise ModelError("this operator on sequences and optionals is not supported")


# -- optionals: another name for what they hold, or nothing ----------------------------------------------------------


def _optional(importer: ImportState, node: onnx.NodeProto) -> None:
    if node.input and node.input[0]:
        importer.alias(node.output[0], node.input[0])
    else:
        importer.nothing.add(node.output[0])


def _optional_has_element(importer: ImportState, node: onnx.NodeProto) -> None:
    held = bool(node.input) and bool(node.input[0]) and node.input[0] not in importer.nothing
    importer.known[node.output[0]] = importer.constant(np.array(held))


def _optional_get_element(importer: ImportState, node: onnx.NodeProto) -> None:
    if node.input[0] in importer.nothing:
        raise ModelError(f"it reads the optional '{node.input[0]}', which is empty")
    importer.alias(node.output[0], node.input[0])


#: operators that the importer evaluates itself
CONTROL: dict[str, Callable[[ImportState, onnx.NodeProto], None]] = {
    "If": take_branch,
    "Loop": unroll_loop,
    "Scan": unroll_scan,
    "SplitToSequence": _split_to_sequence,
    "SequenceAt": _sequence_at,
    "SequenceConstruct": _sequence_construct,
    "SequenceEmpty": _sequence_empty,
    "SequenceInsert": _sequence_insert,
    "SequenceErase": _sequence_erase,
    "SequenceLength": _sequence_length,
    "ConcatFromSequence": _concat_from_sequence,
    "Optional": _optional,
    "OptionalHasElement": _optional_has_element,
    "OptionalGetElement": _optional_get_element,
}
