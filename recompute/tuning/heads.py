"""New heads in the place of old ones: `rc.edit.replace_head`."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from ..boundary import as_texts
from ..errors import UsageError, expect
from ..importer.schema import describe
from ..language.draws import generator, uniform
from ..language.scores import MOVES, Step, before_moves, scores_of
from ..language.types import DTYPES, dtype_from_onnx
from .graph import Graph, edits
from .weights import matrices

__all__ = ["drawn", "features_out", "replace_head"]

#: operators with one input that is no constant, through which a head is found; they take any number of features
_THROUGH = frozenset([
    "Exp", "Log", "HardSigmoid", "Sub", "Div", "Mul", "Relu", "Clip", "Dropout", "GlobalAveragePool", "GlobalMaxPool",
    "AveragePool", "MaxPool", "ReduceMean", "Resize", "Upsample",
])  # fmt: skip
#: operators that may read a value behind a head
_READERS = MOVES | _THROUGH | {
    "Softmax", "LogSoftmax", "Sigmoid", "Add", "Neg", "Reciprocal", "ReduceMax", "ReduceSum", "ReduceLogSumExp",
    "ArgMax", "TopK", "Shape", "Round",
    "Max", "Min", "Expand",
}  # fmt: skip


#: operators whose constant operand may have a number for each feature
_ELEMENTWISE = frozenset(["Add", "Sub", "Mul", "Div", "Max", "Min"])


#: layers whose features are along axis 1
_CONVOLUTIONS = ("Conv", "ConvTranspose")


@dataclass(frozen=True)
class Head:
    """The layer that makes an output: its product, the Add of its bias if that is apart, and its weight.

    `summand`: what the Add reads of the product, perhaps through Identity.
    """

    product: onnx.NodeProto
    add: onnx.NodeProto | None
    weight: str
    shape: tuple[int, ...]
    onnx_type: int
    summand: str = ""

    @property
    def last(self) -> onnx.NodeProto:
        """The node that makes its result."""
        return self.product if self.add is None else self.add

    @property
    def features(self) -> int:
        """The features of its result."""
        node = self.product
        turned = any(a.name == "transB" and a.i for a in node.attribute) or self.weight != node.input[1]
        return self.shape[0] if node.op_type == "Conv" or turned else self.shape[1]  # ConvTranspose: [in, out, ...]

    @property
    def bias(self) -> str:
        """The name of its bias, "" where it has none."""
        if self.add is not None:
            return next(i for i in self.add.input if i != self.summand)
        return self.product.input[2] if len(self.product.input) > 2 else ""


@edits
def replace_head(
    model: Graph, out_features: int, *, at: str | Sequence[str] | None = None, bias: bool = True, seed: int = 0
) -> None:
    """Replaces the layer that makes an output by a new one with another number of features; the outputs stay.

    `at`: the output, or a value before it (default: the only head); several names, or a glob of outputs: several heads.
    The layer is a Gemm, a MatMul and perhaps an Add, or a convolution, of a weight; Softmax, Sigmoid, poolings and what
    only moves numbers may follow it, and then follow the new one, which has the names of the old one.
    Weights are drawn as for `linear`.
    UsageError where there is no such layer, or something that follows needs the old number of features.
    """
    features_out(out_features)
    outputs = model.outputs()
    names = as_texts(outputs if at is None else at, "at")
    names = [n for name in names for n in ([name] if name in outputs else fnmatch.filter(outputs, name) or [name])]
    for name in names:
        model.known(name)
    heads = {name: _head(model, name) for name in names}
    heads = {name: h if h is None or _adds_bias(model, h) else None for name, h in heads.items()}
    ends = {h.last.output[0]: h for h in heads.values() if h is not None}
    if at is None and len(outputs) > 1 and len(ends) != 1:
        raise UsageError(f"the model has {len(outputs)} outputs ({', '.join(outputs)}): say by at= whose head it is")
    missing = [n for n, h in heads.items() if h is None]
    if missing and (at is not None or not ends):
        raise UsageError(
            f"'{missing[0]}' is not made by a Gemm, a MatMul and perhaps an Add, or a convolution, of a weight: cut "
            "the model where the new head begins (rc.edit.cut), and append it (rc.edit.linear)"
        )
    for head in ends.values():
        behind = _behind(model, head, int(out_features))
        _replace(model, head, int(out_features), bias=bias, seed=seed)
        _declare_again(model, behind)


def _head(model: Graph, name: str) -> Head | None:
    """The layer behind a value; None where something else makes it."""
    makers, weights, add, relu, before, summand = model.makers(), matrices(model), None, False, "", ""
    steps = _steps(model, makers)
    while name != before:
        before, name = name, before_moves(scores_of(name, steps).source, steps)[1]
        node = makers.get(name)
        rest = [] if node is None else [i for i in node.input if i and not _constant(model, makers, i)]
        if node is not None and node.op_type in _THROUGH and len(rest) == 1:
            name, relu = rest[0], relu or node.op_type == "Relu"
    if node is not None and node.op_type == "Add":
        rest = [i for i in rest if not _constant(model, makers, before_moves(i, steps)[1])]
        if len(rest) == 1:
            add, summand, node = node, rest[0], makers.get(rest[0])
        while node is not None and node.op_type == "Identity":
            node = makers.get(node.input[0])
    if node is None or node.op_type not in ("MatMul", "Gemm", *_CONVOLUTIONS):
        return None
    if any(a.name in ("transA", "group") and a.i > (a.name == "group") for a in node.attribute):
        return None
    weight = node.input[1]
    if node.op_type in _CONVOLUTIONS:
        held = model.constant(weight)
        if held is None or (relu and held.shape[2:] != (1,) * (held.ndim - 2)):
            return None
        return Head(node, add, weight, held.shape, helper.np_dtype_to_tensor_dtype(held.dtype), summand)
    turned = makers.get(weight)
    if turned is not None and turned.op_type == "Transpose":
        weight = turned.input[0]
    if relu or weight not in weights or node.input[0] in weights:
        return None
    return Head(node, add, weight, *weights[weight], summand)


def _adds_bias(model: Graph, head: Head) -> bool:
    """Whether an Add behind the product, if there is one, adds one number or one for each feature."""
    if head.add is None:
        return True
    makers = model.makers()
    held = model.constant(before_moves(head.bias, _steps(model, makers))[1])
    return held is None or held.size in (1, head.features)


def _steps(model: Graph, makers: dict[str, onnx.NodeProto]) -> Callable[[str], Step | None]:
    """How the values of a graph are made."""

    def made(name: str) -> Step | None:
        node = makers.get(name)
        if node is None:
            return None
        constant = model.constant(node.input[1]) if node.op_type == "ReduceSum" and len(node.input) > 1 else None
        axes = next(
            (list(a.ints) for a in node.attribute if a.name == "axes"), [] if constant is None else constant.tolist()
        )
        return Step(node.op_type, tuple(node.input), axes[0] if len(axes) == 1 else None)

    return made


def _constant(model: Graph, makers: dict[str, onnx.NodeProto], name: str) -> bool:
    return name in model.tensors or (name in makers and makers[name].op_type == "Constant")


def _behind(model: Graph, head: Head, size: int) -> set[str]:
    """The values that the head's result makes, where it may have another number of features.

    Shapes that a Reshape gives with the old number get the new one.  UsageError for what cannot follow.
    """
    old, makers = head.features, model.makers()
    reached = {head.last.output[0]}
    for node in model.nodes:
        if reached.isdisjoint(node.input):
            continue
        constants = [model.constant(i) for i in node.input if _constant(model, makers, i)]
        drops = old == 1 != size and _drops(model, head, node, constants)
        if (
            not drops
            and node.op_type in ("Reshape", "Expand")
            and node.input[0] in reached
            and constants
            and constants[0] is not None
        ):
            _reshape(model, node, constants[0], old, size)
        elif (
            drops
            or node.op_type not in _READERS
            or (node.op_type in _ELEMENTWISE and any(c is not None and c.size > 1 for c in constants))
            or (node.op_type == "Expand" and not constants and old in (model.type_of(node.output[0]) or ("", [old]))[1])
        ):
            raise UsageError(
                f"the head that makes '{head.last.output[0]}' cannot be replaced: {describe(node)} follows it, and "
                f"needs its {old} features; cut the model before it (rc.edit.cut)"
            )
        reached.update(node.output)
    return reached


def _drops(model: Graph, head: Head, node: onnx.NodeProto, constants: Sequence[np.ndarray | None]) -> bool:
    """Whether a node removes the axis of the features, which one feature does not need."""
    if node.op_type == "Reshape":
        return any(c is not None and c.tolist()[:1] == [-1] and 1 not in c.tolist() for c in constants)
    if node.op_type != "Squeeze":
        return False
    ones = next((list(a.ints) for a in node.attribute if a.name == "axes"), None)
    axes = ones if ones is not None or not constants or constants[0] is None else constants[0].tolist()
    t = model.type_of(node.input[0])
    if not axes or t is None:
        return True
    ndim = len(t[1])
    return (1 if head.product.op_type in _CONVOLUTIONS else ndim - 1) in [a % ndim for a in axes]


def _reshape(model: Graph, node: onnx.NodeProto, shape: np.ndarray, old: int, size: int) -> None:
    """Gives a Reshape the new number of features in the place of the old one."""
    places = [i for i, n in enumerate(shape.tolist()) if n == old]
    if len(places) == 1 or old == size:
        turned = shape.copy()
        turned[places] = size
        node.input[1] = model.fresh(f"{node.output[0]}.shape")
        model.add_tensor(node.input[1], turned)
        return
    dims = model.type_of(node.input[0])
    others = [] if dims is None else [d for d in dims[1] if d != old]
    if places or any(n > 1 and n not in others for n in shape.tolist()):
        raise UsageError(
            f"{describe(node)} follows the head and reshapes its {old} features to {shape.tolist()}: cut the model "
            "before it (rc.edit.cut)"
        )


def _replace(model: Graph, head: Head, size: int, *, bias: bool, seed: int) -> None:
    """Writes the new layer in the place of the old one."""
    node, y, x = head.product, head.last.output[0], head.product.input[0]
    old_bias = head.bias
    shape: tuple[int, ...] = (size, math.prod(head.shape) // head.features)
    if node.op_type in _CONVOLUTIONS:
        at = int(node.op_type == "ConvTranspose")
        shape = (*head.shape[:at], size, *head.shape[at + 1 :])
    model.nodes = [n for n in model.nodes if n is not node and n is not head.add]
    model.drop([n for n in (node.input[1], old_bias, head.summand) if n])
    names = [model.fresh(head.weight)]
    if bias:
        names.append(model.fresh(old_bias or f"{head.weight.removesuffix('.weight')}.bias"))
    numbers, limit = DTYPES[dtype_from_onnx(head.onnx_type) or "f32"], 1 / math.sqrt(math.prod(shape[1:]))
    for n, s in zip(names, [shape, (size,)], strict=False):
        model.add_tensor(n, drawn(n, s, limit, seed).astype(numbers))
    place = model.place_of(x) + 1
    for layer in reversed(list(_layer(model, node, [x, *names], y))):
        model.nodes.insert(place, layer)
    model.unfreeze(names)
    model.also_trained(names)


def _layer(model: Graph, old: onnx.NodeProto, reads: list[str], y: str) -> Iterator[onnx.NodeProto]:
    """The nodes of a layer with a weight [out, ...] in the place of another."""
    x, weight, *bias = reads
    dims = model.type_of(x)
    if old.op_type in _CONVOLUTIONS:
        layer = onnx.NodeProto()
        layer.CopyFrom(old)
        layer.input[:], layer.output[:] = reads, [y]
        yield layer
    elif (old.op_type == "Gemm" or (dims is not None and len(dims[1]) == 2)) and (bias or model.opset >= 11):
        yield helper.make_node("Gemm", reads, [y], name=y, transB=1)
    else:
        turned = model.fresh(f"{weight}.transposed")
        product = model.fresh(f"{y}.product") if bias else y
        yield helper.make_node("Transpose", [weight], [turned], name=turned, perm=[1, 0])
        yield helper.make_node("MatMul", [x, turned], [product], name=product)
        if bias:
            yield helper.make_node("Add", [product, *bias], [y], name=y)


def _declare_again(model: Graph, names: set[str]) -> None:
    """Infers the shapes of values anew."""
    graph = model.model.graph
    for i in [i for i, v in enumerate(graph.value_info) if v.name in names][::-1]:
        del graph.value_info[i]
    changed = [o for o in graph.output if o.name in names]
    for o in changed:
        o.type.tensor_type.ClearField("shape")
    for o in changed:
        info = model.info(o.name)
        if info is not None:
            o.CopyFrom(info)


def features_out(size: object) -> None:
    """UsageError unless a number of features is one."""
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
        raise UsageError(f"out_features must be a whole number of at least 1, not {size!r}")


def drawn(name: str, shape: tuple[int, ...], limit: float, seed: int) -> np.ndarray:
    """Uniform numbers in ±limit, in float64, which depend on the seed and the name only."""
    expect("seed", seed, (int, np.integer), "a whole number")
    return uniform(generator(seed, name), limit, shape)
