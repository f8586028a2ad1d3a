"""Convolutions and products with weights, and the values around them that are quantized."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...language.ir import Block, Operator, Role, Value

#: operators that only move values, or choose among them: what they make of quantized values is quantized
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
    weights = {v.name for v in (*block.parameters, *block.buffers)}
    producers = block.producers()
    found = (_layer(block, i, weights, producers) for i in range(len(block.operators)))
    return [layer for layer in found if layer is not None]


def named(block: Block, layer: Layer) -> tuple[str, str]:
    """The names by which globs find a layer: those of its weight and its output."""
    return layer.weight.name, next(block.operators[layer.at].writes()).name


def _layer(block: Block, at: int, weights: set[str], producers: dict[str, int]) -> Layer | None:
    op = block.operators[at]
    axis = _channels(op) if op.role is Role.FORWARD else None
    if axis is None:
        return None
    x, w = op.inputs[:2]
    reader = at
    made = producers.get(w.name) if w is not None else None
    if w is not None and w.name not in weights and made is not None and block.operators[made].op.name == "Transpose":
        reader = made
        perm = block.operators[made].op.perm  # type: ignore[attr-defined]
        w = block.operators[made].inputs[0]
        assert w is not None
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


def root_of(block: Block, producers: Mapping[str, int], x: Value) -> Value:
    """The value of which x is a rearrangement, or a part."""
    while x.name in producers:
        op = block.operators[producers[x.name]]
        if op.op.name not in _MOVES or op.role is not Role.FORWARD or op.inputs[0] is None or op.outputs[0] != x:
            break
        x = op.inputs[0]
    return x


def end_of(block: Block, readers: Mapping[str, list[int]], held: Collection[str], layer: Layer) -> Value | None:
    """What a layer makes, behind its bias, normalisation and activation; None where it is a result of the program, or
    only a loss reads it.  `held`: parameters and buffers."""
    op = block.operators[layer.at]
    v = next(op.writes())
    steps = ["Add"] if op.op.name == "MatMul" else [*_NORMS] if op.op.name == "Conv" else []
    for wanted in (steps, [*_CLIPS]):
        after = _only_reader(block, readers, v)
        if after is None or after.op.name not in wanted:
            continue
        if after.op.name == "Add" and not any(r != v and r.name in held and r.ndim <= 1 for r in after.reads()):
            continue
        if after.op.name in _NORMS and after.inputs[0] != v:
            continue
        v = next(after.writes())
    read = any(block.operators[i].role is Role.FORWARD for i in readers.get(v.name, ()))
    return v if read and v.name not in block.outputs else None


def _only_reader(block: Block, readers: Mapping[str, list[int]], v: Value) -> Operator | None:
    found = readers.get(v.name, [])
    if len(found) != 1 or v.name in block.outputs or block.operators[found[0]].role is not Role.FORWARD:
        return None
    return block.operators[found[0]]
