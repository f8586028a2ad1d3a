"""Weights of integers trained as floats: dequantised, trained like any other weight, and rounded to the file's form."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx
from onnx import helper

from ..errors import UsageError, nearest
from ..exporter.trained import export_trained
from ..importer.graphs import needed
from ..language.program import Program
from ..support.patterns import Patterns
from . import few_bits, integers
from .graph import File, Graph, Reading, edits, model_of
from .merge import replace_weight
from .weights import Weight, matrices, weight_of

__all__ = ["dequantize", "requantize"]

#: the entry of the model's metadata that says which float stands for which codes
MASTERS = "recompute.dequantized"
#: operators → the input that is a bias
_BIAS = {"MatMulNBits": 5, "DynamicQuantizeMatMul": 4, "MatMulIntegerToFloat": 6}


@edits
def dequantize(model: Graph, patterns: str | Sequence[str] | None = None) -> None:
    """Puts floating-point weights, which train, in the place of weights of integers.

    Those are MatMulNBits, MatMulBnb4 and GatherBlockQuantized (by the names of their codes), integers that
    MatMulInteger reads behind DynamicQuantizeLinear, DynamicQuantizeMatMul and MatMulIntegerToFloat (by the names of
    the integers), and weights behind DequantizeLinear (by the name of what it makes).  `patterns`: names or globs
    (default: all).  What the graph quantises for such products alone is no longer rounded.  `model`: a path, a
    ModelProto, or a Program from before losses and `minimize`; it stays as it is.  `requantize` rounds what was trained
    to the file's own form.
    UsageError where nothing of the kind is there, or matches.
    """
    shapes, readers = matrices(model), model.reading()
    packed, lines = few_bits.few_bits(model), _dequantized(model)
    products = [*packed, *integers.integer_weights(model)]
    wanted = Patterns("*" if patterns is None else patterns)
    names = [*products, *lines]
    if (useless := wanted.useless(names)) is not None:
        raise UsageError(f"dequantize: no weight of integers is called '{useless}'{nearest(useless, names)}")
    weights = {n: weight_of(readers, n, *shapes[n]) for n in products if wanted.fit(n)}
    masters = {name: _product(model, w, packed.get(name)) for name, w in weights.items()}
    for name, node in lines.items():
        if wanted.fit(name):
            _line(model, name, node, masters)
    model.nodes = needed(model.nodes, set(model.outputs()))
    model.drop_unread(list(model.tensors))
    model.unfreeze(masters.values())
    model.also_trained(masters.values())
    model.say(MASTERS, masters)


def requantize(model: Program | File, original: File) -> onnx.ModelProto:
    """The original model, before `dequantize`, with what was trained: weights rounded to its own form.

    Blocks of MatMulNBits, MatMulBnb4 and GatherBlockQuantized keep their scale and zero point, or get those of their
    new range, whichever is closer; other integers are rounded at the scale that they have.  Other tensors are taken as
    they are.  `model`: a Program (what it trained), a path or a ModelProto.  UsageError where it was not made by
    `dequantize` of the original.
    """
    trained = Graph(export_trained(model) if isinstance(model, Program) else model_of(model))
    masters, graph = trained.said(MASTERS), Graph(model_of(original))
    if not isinstance(masters, dict):
        raise UsageError("the model was not made by rc.dequantize: it does not say which weights were integers")
    gone = next((n for n in masters if n not in graph.tensors), None)
    if gone is not None:
        raise UsageError(f"the original has no tensor '{gone}', which the model was dequantized from")
    arrays: dict[str, np.ndarray] = {}
    packed, reading = few_bits.few_bits(graph), graph.reading()
    for codes, name in masters.items():
        array = trained.constant(name)
        if array is None:
            raise UsageError(f"the contents of '{name}' are not in the model")
        if codes in packed:
            turned = few_bits.CODES[reading(codes)[0].op_type] == 1
            arrays |= few_bits.rounded(graph, packed[codes], array.T if turned else array)[0]
        else:
            arrays[codes] = _rounded(graph, reading, codes, array)
    for name, t in trained.tensors.items():
        tensor = graph.tensors.get(name)
        array = None if tensor is None or tuple(tensor.dims) != tuple(t.dims) else trained.constant(name)
        if array is not None and array.dtype.kind == "f" and name not in arrays:
            arrays[name] = array
    for name, array in arrays.items():
        replace_weight(graph, name, array)
    return graph.finish()


def _dequantized(model: Graph) -> dict[str, onnx.NodeProto]:
    """DequantizeLinear nodes by output: of integers of the file with several axes, not scaled in blocks."""
    masters = {}
    for n in model.nodes:
        held = n.op_type == "DequantizeLinear" and all(i in model.tensors for i in n.input if i)
        blocks = any(a.name == "block_size" and a.i for a in n.attribute)
        if held and not blocks and len(model.tensors[n.input[0]].dims) > 1:
            masters[n.output[0]] = n
    return masters


def _line(model: Graph, name: str, node: onnx.NodeProto, masters: dict[str, str]) -> None:
    """Replaces a DequantizeLinear; those of the same codes have one master."""
    codes, scale, zero = _spread(model, node)
    array = (codes.astype(scale.dtype) - zero) * scale
    model.nodes.remove(node)
    first = masters.setdefault(node.input[0], name)
    if first == name:
        model.add_tensor(name, array)
        return
    held = model.constant(first)
    if held is None or not np.array_equal(held, array):
        raise UsageError(f"'{node.input[0]}' stands for two weights, '{first}' and '{name}': it has one master only")
    model.nodes.insert(0, helper.make_node("Identity", [first], [name]))


def _spread(model: Graph, node: onnx.NodeProto) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, and scale and zero point that broadcast to them."""
    codes, scale, *zero = (model.constant(i) for i in node.input if i)
    assert codes is not None and scale is not None
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1) % codes.ndim
    each = [-1 if i == axis else 1 for i in range(codes.ndim)]
    points = np.zeros((), scale.dtype) if not zero or zero[0] is None else zero[0].astype(scale.dtype)
    one, other = (a.reshape(each) if a.size > 1 else a.reshape(()) for a in (scale, points))
    return codes, one, other


def _product(model: Graph, w: Weight, packed: few_bits.FewBits | None) -> str:
    """Replaces the products of a weight; the name of its master, [in, out] or a table's [rows, width]."""
    if packed is not None:
        array = few_bits.whole(model, packed)
        array = array if w.kind == "embedding" else np.ascontiguousarray(array.T)
    else:
        reading = model.reading()
        product = integers.product_of(reading, reading(w.name)[0])
        assert product is not None
        array = integers.whole(model, w.name, product)
    name = model.fresh(f"{w.module}.weight" if f"{w.module}.weight" != w.name else f"{w.name}.float")
    model.add_tensor(name, array.astype(helper.tensor_dtype_to_np_dtype(w.onnx_type)))
    for site in w.sites:
        old, y = site.node, site.node.output[0]
        at = _BIAS.get(old.op_type, 0)
        bias = old.input[at] if 0 < at < len(old.input) else ""
        if w.kind == "embedding":
            nodes = [helper.make_node("Gather", [name, old.input[1]], [y], name=old.name, axis=0)]
        else:
            first = model.fresh(f"{y}.product") if bias else y
            nodes = [helper.make_node("MatMul", [site.x or old.input[0], name], [first], name=old.name)]
            nodes += [helper.make_node("Add", [first, bias], [y])] if bias else []
        place = model.places()[id(old)]
        model.nodes[place : place + 1] = nodes
    return name


def _rounded(graph: Graph, reading: Reading, codes: str, array: np.ndarray) -> np.ndarray:
    """The integers of a weight of the original that hold a master."""
    node = reading(codes)[0]
    if node.op_type == "DequantizeLinear":
        own, scale, zero = _spread(graph, node)
        limits = ml_dtypes.iinfo(own.dtype)
        steps = array / np.where(scale == 0, 1, scale)
        return np.rint(steps + zero).clip(limits.min, limits.max).astype(own.dtype)
    product = integers.product_of(reading, node)
    if product is None:
        raise UsageError(f"'{codes}' is read by {node.op_type} in the original, which the model was not made from")
    return integers.rounded(graph, codes, product, array - integers.whole(graph, codes, product))[0]
