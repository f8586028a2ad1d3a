"""Weights of products of integers (MatMulInteger and ONNX Runtime's fused forms): where real numbers go in and out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from ..errors import UsageError
from .graph import Graph, Reading

#: operators whose second input is such a weight → positions of its scale and zero point (0: scaled behind it)
PRODUCTS = {"MatMulInteger": (0, 3), "DynamicQuantizeMatMul": (2, 3), "MatMulIntegerToFloat": (3, 5)}
#: element types of codes
CODES_8 = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
#: operators behind which a scale is the same number
_FORMS = ("Mul", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Identity")


@dataclass(frozen=True)
class Product:
    """A product with a weight of integers: `x`, the real numbers that it multiplies; `last`, the node that gives real
    numbers; names of the weight's scale and zero point ("": none)."""

    x: str
    last: onnx.NodeProto
    scale: str
    zero: str


def integer_weights(model: Graph) -> dict[str, tuple[int, int]]:
    """Matrices of 8-bit integers [in, out] that products of what is quantised in the graph read, with their shapes."""
    candidates = [n for n in model.nodes if n.op_type in PRODUCTS and len(n.input) > 1 and n.input[1] in model.tensors]
    reading, weights = model.reading() if candidates else None, {}
    for node in candidates:
        t = model.tensors[node.input[1]]
        fits = t.data_type in CODES_8 and len(t.dims) == 2
        if reading is not None and fits and product_of(reading, node) is not None:
            weights[t.name] = (t.dims[0], t.dims[1])
    return weights


def product_of(reading: Reading, node: onnx.NodeProto) -> Product | None:
    """The product that a node begins; None where its input is not quantised in the graph, or it ends otherwise."""
    scale, zero = PRODUCTS[node.op_type]
    names = [*node.input, *[""] * 6]
    if node.op_type == "DynamicQuantizeMatMul":
        return Product(names[0], node, names[scale], names[zero])
    maker = reading.maker(names[0])
    if maker is None or maker.op_type != "DynamicQuantizeLinear":
        return None
    if scale:
        return Product(maker.input[0], node, names[scale], names[zero])
    codes, last = "", node
    missing = {maker.output[1]}
    while missing or not codes:
        after = reading(last.output[0])
        if len(after) != 1 or after[0].op_type not in ("Cast", "Mul"):
            return None
        before, last = last.output[0], after[0]
        if last.op_type == "Mul":
            sources = _sources(reading, [i for i in last.input if i != before])
            missing -= sources
            codes = next((i for i in sources if reading.maker(i) is None), codes)
    return Product(maker.input[0], last, codes, names[zero])


def _sources(reading: Reading, names: list[str]) -> set[str]:
    """Names of the values from which scales are computed."""
    sources = set()
    while names:
        name = names.pop()
        maker = reading.maker(name)
        if maker is not None and maker.op_type in _FORMS:
            names += maker.input if maker.op_type == "Mul" else maker.input[:1]
        else:
            sources.add(name)
    return sources


def whole(graph: Graph, codes: str, p: Product) -> np.ndarray:
    """The numbers [in, out] that codes stand for."""
    integers, scale, zero = _parts(graph, codes, p)
    return (integers.astype(np.float32) - zero.astype(np.float32)) * scale


def _parts(graph: Graph, codes: str, p: Product) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scale and zero point.  UsageError where they are not in the model."""
    integers, scale = graph.constant(codes), graph.constant(p.scale)
    zero = graph.constant(p.zero) if p.zero else np.zeros((), np.float32)
    if scale is None or zero is None or integers is None:
        raise UsageError(f"the contents of '{codes}', or its scale and zero point, are not in the model")
    return integers, scale, zero


def rounded(graph: Graph, codes: str, p: Product, change: np.ndarray) -> tuple[np.ndarray, float]:
    """The codes with a change [in, out] added, at the scale that they have, and how far this is off the sum, as a part
    of the change."""
    integers, scale, _ = _parts(graph, codes, p)
    limits = np.iinfo(integers.dtype)
    steps = change / np.where(scale == 0, 1, scale).astype(np.float64)
    held = np.rint(integers + steps).clip(limits.min, limits.max)
    off = np.linalg.norm((held - integers - steps) * scale)
    return held.astype(integers.dtype), float(off / (np.linalg.norm(change) or 1))
