"""Convolutions and products with weights, and the values around them that are quantised."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...language.ir import Block, Operator, Role, Value
from ..matching.graph import Graph, result

#: operators that only move values, or choose among them: what they make of quantised values is quantised
_MOVES = frozenset(["Reshape", "Transpose", "MaxPool", "Identity", "Dropout", "Detach"])
#: activations that integers have as bounds of what is clipped
_CLIPS = frozenset(["Relu", "Relu6", "Clip"])
_NORMS = frozenset(["BatchNormTrain", "BatchNormalization"])


@dataclass(frozen=True)
class Layer:
    """A Conv, Gemm or MatMul: its position, the activation and the weight it reads, and the weight's axis of output
    channels.  `reader`: the position of what reads the weight, the layer itself or a Transpose."""

    at: int
    x: Value
    weight: Value
    axis: int
    reader: int


def layers_of(block: Block) -> list[Layer]:
    """All of a block's forward pass, in order."""
    graph, weights = Graph(block), {v.name for v in (*block.parameters, *block.buffers)}
    layers = (_layer(graph, i, op, weights) for i, op in enumerate(block.operators))
    return [layer for layer in layers if layer is not None]


def named(block: Block, layer: Layer) -> tuple[str, str]:
    """The names by which globs find a layer: those of its weight and its output."""
    return layer.weight.name, next(block.operators[layer.at].writes()).name


def _layer(graph: Graph, at: int, op: Operator, weights: set[str]) -> Layer | None:
    axis = _channels(op) if op.role is Role.FORWARD else None
    if axis is None:
        return None
    x, w = op.inputs[:2]
    reader = at
    if w is not None and w.name not in weights and (turned := graph.producer(w, "Transpose")) is not None:
        reader = graph.places[w.name]
        perm, w = turned.op.perm, next(turned.reads())  # type: ignore[attr-defined]
        axis = perm[axis] if perm is not None else w.ndim - 1 - axis
    if x is None or w is None or w.name not in weights or x.name in weights or w.dtype not in ("f32", "f64"):
        return None
    return Layer(at, x, w, axis, reader) if x.size and w.size else None


def _channels(op: Operator) -> int | None:
    """The axis of output channels of input 1; None for what is no layer."""
    kind, w = op.op, op.inputs[1] if len(op.inputs) > 1 else None
    if w is None:
        return None
    if kind.name == "Conv":
        return 0
    plain = kind.name in ("Gemm", "MatMul") and w.ndim == 2 and not kind.transA  # type: ignore[attr-defined]
    return (0 if kind.transB else 1) if plain else None  # type: ignore[attr-defined]


def root_of(graph: Graph, x: Value) -> Value:
    """The value of which x is a rearrangement, or a part."""
    return graph.above(x, *_MOVES)


def end_of(graph: Graph, held: Collection[str], layer: Layer) -> Value | None:
    """The result of a layer, behind its bias, normalisation and activation; None if it is a result of the program, or
    only a loss reads it.  `held`: parameters and buffers."""
    op = graph.block.operators[layer.at]
    steps = ["Add"] if op.op.name == "MatMul" else [*_NORMS] if op.op.name == "Conv" else []
    for wanted in (steps, [*_CLIPS]):
        v = result(op)
        after = [*graph.below(op, 1)][-1]
        if after is op or after.op.name not in wanted:
            continue
        if after.op.name == "Add" and not any(r != v and r.name in held and r.ndim <= 1 for r in after.reads()):
            continue
        if after.op.name not in _NORMS or after.inputs[0] == v:
            op = after
    v = result(op)
    read = any(reader.role is Role.FORWARD for reader in graph.readers(v))
    return v if read and v.name not in graph.outputs else None
