"""Constant folding: compile-time evaluation of shape arithmetic and of constant expressions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference

from ..errors import ModelError
from ..language.kernels import bits_are_portable, numpy_computed
from ..language.types import DTYPES, MAX_DIMENSIONS, TensorType, dtype_from_onnx, dtype_to_onnx, show_onnx_dtype
from ..ops.reference.nodes import check_attributes
from .costs import MAX_SIZES, TEXT, bytes_of, may_fold, ml_results, work_of
from .exact import PLAIN, by_rule, converted, is_exact
from .limits import EVALUATED, Budget
from .tensors import tensor_array
from .text import evaluate_text

#: results with more elements than this are not folded but computed in the step
MAX_FOLDED = 1 << 24
#: most bytes that the evaluation of one node may need
_MOST_BYTES = 1 << 29
#: random operators, whose results must not be fixed by folding
_NEVER = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial",
          "Dropout", "If", "Loop", "Scan", "Optional", "SequenceConstruct"}  # fmt: skip
#: kinds of NumPy arrays of strings
_TEXT = "OUST"
#: smallest magnitude of a mask's "minus infinity": weights are smaller
_MASK_LIMIT = 1e8


@dataclass
class Known:
    """A value known at compile time, and its origin.

    `origin`: "initializer", "constant" (a Constant node), "fill" (ConstantOfShape), or "folded".  `trains`: it is a
    parameter whatever its shape, so that nothing made of it is computed at compile time.
    """

    array: np.ndarray
    origin: str
    trains: bool = False

    @property
    def type(self) -> TensorType:
        """The type of the contents; strings have element type "string"."""
        if self.array.dtype.kind in _TEXT:
            return TensorType("string", self.array.shape)
        return TensorType.of(self.array)

    @staticmethod
    def of_initializer(t: onnx.TensorProto) -> Known:
        """An initializer; its bytes are not copied.  ModelError for element types that are not supported."""
        if dtype_from_onnx(t.data_type) is None and t.data_type != onnx.TensorProto.STRING:
            kind = show_onnx_dtype(t.data_type)
            raise ModelError(f"initializer '{t.name}' has element type {kind}, which is not supported")
        return Known(tensor_array(t), "initializer")

    def all_equal(self) -> bool:
        """Whether the elements are all equal, as those of a fresh bias or scale are."""
        return bool((self.array == self.array.flat[0]).all()) if self.array.size else True

    def is_mask(self) -> bool:
        """Whether the contents are an additive mask: an element is infinite or very large."""
        sample = self.array.reshape(-1)
        if sample.size > 1 << 22:  # blocks, so that a mapped file is not read as a whole
            starts = np.linspace(0, sample.size - 4096, 256).astype(np.int64)
            sample = np.concatenate([sample[i : i + 4096] for i in starts.tolist()])
        return sample.size > 0 and not bool(np.all(np.abs(sample.astype(np.float64)) < _MASK_LIMIT))


def static_shape_value(
    node: onnx.NodeProto, type_of: Callable[[str], TensorType], known: Mapping[str, Known]
) -> dict[str, Known] | None:
    """Shape and Size: known because every shape is.  CastLike of what is known: known because every type is."""
    if node.op_type not in ("Shape", "Size", "CastLike") or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "CastLike":
        x, like = known.get(node.input[0]), type_of(node.input[1])
        if x is None or is_weight(x) or x.array.size > MAX_FOLDED or like.dtype not in PLAIN:
            return None
        return {node.output[0]: Known(converted(x.array, like.dtype), "folded")}
    shape = type_of(node.input[0]).shape
    if node.op_type == "Size":
        return {node.output[0]: Known(np.array(math.prod(shape), np.int64), "folded")}
    options = {a.name: a.i for a in node.attribute}
    part = shape[options.get("start", 0) : options.get("end", len(shape))]
    return {node.output[0]: Known(np.array(part, np.int64), "folded")}


def fold(node: onnx.NodeProto, constants: Mapping[str, Known], opset: int, budget: Budget) -> dict[str, Known] | None:
    """Evaluates a node whose inputs are all known; None if it must stay in the program.

    Float initializers with dimensions are weights: expressions of them are computed in the step, so that they are
    trained.  LimitError if the evaluation exceeds `budget`.
    """
    if node.domain not in ("", "ai.onnx", "ai.onnx.ml") or node.op_type in _NEVER:
        return None
    if node.op_type == "Constant":
        return {node.output[0]: Known(_constant(node), "constant")}
    if any(n and n not in constants for n in node.input):
        return None
    ins = {n: constants[n] for n in node.input if n}
    if node.op_type == "Identity" and ins:
        source = constants[node.input[0]]
        return {node.output[0]: Known(source.array, source.origin, source.trains)}
    if any(is_weight(k) for k in ins.values()):
        return None
    if node.op_type == "ConstantOfShape":
        return {node.output[0]: Known(_constant_of_shape(node, ins[node.input[0]].array), "fill")}
    if not ins or not may_fold(node) or sum(k.array.size for k in ins.values()) > MAX_FOLDED:
        return None
    if node.op_type in TEXT:
        texts = evaluate_text(node, [ins[n].array for n in node.input if n], budget)
        return None if texts is None else _named(node, texts)
    same = is_exact(node) or _by_hand(node, [ins[n].array for n in node.input if n]) is not None
    by_machine = not same and any(k.type.is_float for k in ins.values())
    if (by_machine and bits_are_portable()) or not _affordable(node, ins, opset, budget):
        return None
    check_attributes(node)
    results = _evaluate(node, ins, opset)
    if results and not same and (by_machine or any(k.type.is_float for k in results.values())):
        if bits_are_portable():
            return None
        numpy_computed(f"a constant of a model, by {node.op_type}")
    return results


def _affordable(node: onnx.NodeProto, ins: Mapping[str, Known], opset: int, budget: Budget) -> bool:
    """Whether a node is small enough to be evaluated at load time; if so, its work is charged."""
    arrays = [ins[n].array for n in node.input if n]
    by_hand = _by_hand(node, arrays)
    results = _results(node, ins, opset) if by_hand is None else by_hand[0]
    if results is None or results > MAX_FOLDED:
        return False
    work = work_of(node, arrays, results)
    if work > budget.most_of_one or bytes_of(node, arrays, results) > _MOST_BYTES:
        return False
    budget.spend(work + (0 if by_hand else budget.of_one(EVALUATED)), "computing it")
    return True


def remember(known: dict[str, Known], computed: Mapping[str, Known], budget: Budget) -> None:
    """Stores folded values.  LimitError if they exceed the budget."""
    for k in computed.values():
        if k.origin == "folded" and 0 not in k.array.strides:
            budget.take(k.array.nbytes)
    known.update(computed)


def is_weight(k: Known) -> bool:
    """Whether a known value may be trained, so that nothing made of it is computed when the model is loaded."""
    if k.trains:
        return True
    if not k.type.is_float or k.type.ndim == 0:
        return False
    return k.origin == "initializer" or (k.origin == "fill" and k.array.size > 1)


def _results(node: onnx.NodeProto, ins: Mapping[str, Known], opset: int) -> int | None:
    """Upper bound of the elements of the results; None if ONNX's type inference does not give one."""
    arrays = [ins[n].array for n in node.input if n]
    try:
        if node.op_type == "Range":
            start, limit, delta = (float(a.reshape(())) for a in arrays)
            return max(0, math.ceil((limit - start) / delta))
        if node.op_type == "Expand":
            pairs = itertools.zip_longest(arrays[0].shape[::-1], arrays[1].tolist()[::-1], fillvalue=1)
            return math.prod(max(d, abs(s)) for d, s in pairs)
        if node.op_type in _BY_CONTENTS:
            return _BY_CONTENTS[node.op_type](*arrays)
        if node.domain == "ai.onnx.ml":
            return ml_results(node, arrays)
        types, contents = {n: k.type for n, k in ins.items()}, {n: k.array for n, k in ins.items()}
        return max(map(_elements, infer_outputs(node, types, contents, opset).values()), default=0)
    except Exception:  # the operator's own type rule raises the error
        return None


def infer_outputs(
    node: onnx.NodeProto, types: Mapping[str, TensorType], contents: Mapping[str, np.ndarray], opset: int
) -> dict[str, onnx.TypeProto]:
    """The outputs' types by ONNX's type inference, from the inputs' types and known contents."""
    schema = onnx.defs.get_schema(node.op_type, opset, "" if node.domain == "ai.onnx" else node.domain)
    protos = {n: onnx.helper.make_tensor_type_proto(dtype_to_onnx(t.dtype), t.shape) for n, t in types.items()}
    data = {n: onnx.numpy_helper.from_array(a, n) for n, a in contents.items() if a.size <= MAX_SIZES}
    imports = [onnx.helper.make_opsetid(node.domain, opset)]
    return onnx.shape_inference.infer_node_outputs(schema, node, protos, data, opset_imports=imports)


def _elements(t: onnx.TypeProto) -> int:
    """Elements of a type; unknown dimensions count as 1, as data-dependent results are not larger than the data."""
    return math.prod(d.dim_value for d in t.tensor_type.shape.dim if d.HasField("dim_value"))


def _constant(node: onnx.NodeProto) -> np.ndarray:
    if not node.attribute:
        raise ModelError("a constant without a value")
    a = node.attribute[0]
    if a.name == "value":
        if dtype_from_onnx(a.t.data_type) is None and a.t.data_type != onnx.TensorProto.STRING:
            kind = show_onnx_dtype(a.t.data_type)
            raise ModelError(f"a constant has element type {kind}, which is not supported")
        return tensor_array(a.t)
    if a.name in ("value_float", "value_floats"):
        return np.array(a.f if a.name == "value_float" else list(a.floats), np.float32)
    if a.name in ("value_int", "value_ints"):
        return np.array(a.i if a.name == "value_int" else list(a.ints), np.int64)
    if a.name in ("value_string", "value_strings"):
        texts = [t.decode("utf-8", "replace") for t in (a.strings if a.name == "value_strings" else [a.s])]
        return np.array(texts, object).reshape((-1,) if a.name == "value_strings" else ())
    raise ModelError(f"a constant given by '{a.name}' is not supported")


def _constant_of_shape(node: onnx.NodeProto, shape: np.ndarray) -> np.ndarray:
    """A view of one element: nothing is allocated, however large the shape."""
    value: Any = np.zeros((), np.float32)
    for a in node.attribute:
        if a.name == "value":
            value = onnx.numpy_helper.to_array(a.t).reshape(())
    if shape.size > MAX_DIMENSIONS:
        raise ModelError(f"its shape has {shape.size:,} dimensions, {MAX_DIMENSIONS} are possible")
    if shape.size and int(shape.min()) < 0:
        raise ModelError(f"ConstantOfShape has a negative dimension: {shape.tolist()}")
    return np.broadcast_to(value, tuple(int(d) for d in shape))


def _evaluate(node: onnx.NodeProto, ins: Mapping[str, Known], opset: int) -> dict[str, Known] | None:
    try:
        by_hand = _by_hand(node, [ins[n].array for n in node.input if n])
        results = _reference(node, ins, opset) if by_hand is None else [by_hand[1]()]
    except Exception as e:  # the program may be able to run nodes that the evaluator cannot
        if isinstance(e, MemoryError):
            raise
        return None
    if any(not isinstance(r, np.ndarray) and not np.isscalar(r) for r in results):
        return None
    return _named(node, results)


def _named(node: onnx.NodeProto, results: Sequence[Any]) -> dict[str, Known] | None:
    """Results by the names of the node's outputs; None if one has an unsupported element type."""
    named = {}
    for name, r in zip(node.output, results, strict=False):
        r = np.asarray(r)
        if r.dtype.kind in _TEXT:
            r = r.astype(object)
        elif r.dtype not in DTYPES.values():
            return None
        if name:
            named[name] = Known(r, "folded")
    return named


def _by_hand(node: onnx.NodeProto, arrays: Sequence[np.ndarray]) -> tuple[int, Callable[[], Any]] | None:
    """The most common shape arithmetic, without the evaluator: the number of result elements, and a function for them.

    None if ONNX's evaluator must compute it, or raise the error.
    """
    op_type, options = node.op_type, {a.name: a.i for a in node.attribute}
    if node.domain not in ("", "ai.onnx"):
        return None
    try:
        rule = by_rule(node, arrays)
        size = arrays[0].size if op_type not in _BROADCAST else math.prod(np.broadcast(*arrays).shape)
    except (ValueError, OverflowError):
        return None
    if rule is not None or options.keys() - {"axis"} or "" in node.input:
        return rule
    if op_type in _QUICK and not options:
        return size, lambda: _QUICK[op_type](*arrays)
    axis, x = options.get("axis", 0), arrays[0]
    if op_type not in ("Gather", "Concat") or not all(-a.ndim <= axis < a.ndim for a in arrays[:1]):
        return None
    if op_type == "Gather":
        return arrays[1].size * x.size // max(x.shape[axis], 1), lambda: np.take(x, arrays[1], axis=axis)
    return sum(a.size for a in arrays), lambda: np.concatenate(arrays, axis)


def _reference(node: onnx.NodeProto, ins: Mapping[str, Known], opset: int) -> list[Any]:
    """ONNX's own evaluator, for one node."""
    from onnx.reference import ReferenceEvaluator

    inputs = [onnx.ValueInfoProto(name=n) for n in ins]
    outputs = [onnx.ValueInfoProto(name=o) for o in node.output if o]
    graph = onnx.helper.make_graph([node], "fold", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(node.domain, opset)])
    results = ReferenceEvaluator(model).run(None, {n: k.array for n, k in ins.items()})
    by_name = dict(zip([o.name for o in outputs], results, strict=True))
    return [by_name.get(o) for o in node.output]


def _product(array: np.ndarray) -> int:
    return math.prod(abs(int(d)) for d in array.reshape(-1)[:64])


#: operators whose result size depends on the contents of inputs: upper bound of the elements
_BY_CONTENTS: dict[str, Callable[..., int]] = {
    "OneHot": lambda indices, depth, *_: indices.size * _product(depth),
    "HannWindow": _product,
    "HammingWindow": _product,
    "BlackmanWindow": _product,
    "MelWeightMatrix": lambda bins, length, *_: _product(bins) * (_product(length) + 1),
    "CenterCropPad": lambda x, shape: max(x.size, 1) * _product(shape),
    "NonZero": lambda x: x.size * x.ndim,
    "DFT": lambda x, length=None, *_: x.size * (_product(length) if length is not None else 1),
}
_BROADCAST = ("Add", "Sub", "Mul", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Where")
# the commonest shape arithmetic, without the evaluator's set-up
_QUICK: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Equal": np.equal,
    "Less": np.less,
    "Greater": np.greater,
    "LessOrEqual": np.less_equal,
    "GreaterOrEqual": np.greater_equal,
    "Where": np.where,
    "Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(axes.reshape(-1).tolist())),
    "Squeeze": lambda x, axes=None: np.squeeze(x, None if axes is None else tuple(axes.reshape(-1).tolist())),
    "Reshape": lambda x, shape: x.reshape(tuple(shape.tolist())) if 0 not in shape else _fallback(),
}


def _fallback() -> Any:
    raise NotImplementedError
