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
    reading, found = model.reading() if candidates else None, {}
    for node in candidates:
        t = model.tensors[node.input[1]]
        fits = t.data_type in CODES_8 and len(t.dims) == 2
        if reading is not None and fits and product_of(reading, node) is not None:
            found[t.name] = (t.dims[0], t.dims[1])
    return found


def product_of(reading: Reading, node: onnx.NodeProto) -> Product | None:
    """The product that a node begins; None where its input is not quantised in the graph, or it ends otherwise."""
    scale, zero = PRODUCTS[node.op_type]
    names = [*node.input, *[""] * 6]
    if node.op_type == "DynamicQuantizeMatMul":
        return Product(names[0], node, names[scale], names[zero])
    made = reading.maker(names[0])
    if made is None or made.op_type != "DynamicQuantizeLinear":
        return None
    if scale:
        return Product(made.input[0], node, names[scale], names[zero])
    own, last = "", node
    missing = {made.output[1]}
    while missing or not own:
        after = reading(last.output[0])
        if len(after) != 1 or after[0].op_type not in ("Cast", "Mul"):
            return None
        before, last = last.output[0], after[0]
        if last.op_type == "Mul":
            found = _sources(reading, [i for i in last.input if i != before])
            missing -= found
            own = next((i for i in found if reading.maker(i) is None), own)
    return Product(made.input[0], last, own, names[zero])


def _sources(reading: Reading, names: list[str]) -> set[str]:
    """What scales are made of."""
    found = set()
    while names:
        name = names.pop()
        made = reading.maker(name)
        if made is not None and made.op_type in _FORMS:
            names += made.input if made.op_type == "Mul" else made.input[:1]
        else:
            found.add(name)
    return found


def whole(graph: Graph, codes: str, p: Product) -> np.ndarray:
    """The numbers [in, out] that codes stand for."""
    own, scale, zero = _parts(graph, codes, p)
    return (own.astype(np.float32) - zero.astype(np.float32)) * scale


def _parts(graph: Graph, codes: str, p: Product) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scale and zero point.  UsageError where they are not in the model."""
    own, scale = graph.constant(codes), graph.constant(p.scale)
    zero = graph.constant(p.zero) if p.zero else np.zeros((), np.float32)
    if scale is None or zero is None or own is None:
        raise UsageError(f"the contents of '{codes}', or its scale and zero point, are not in the model")
    return own, scale, zero


def rounded(graph: Graph, codes: str, p: Product, change: np.ndarray) -> tuple[np.ndarray, float]:
    """The codes with a change [in, out] added, at the scale that they have, and how far this is off the sum, as a part
    of the change."""
    own, scale, _ = _parts(graph, codes, p)
    limits = np.iinfo(own.dtype)
    steps = change / np.where(scale == 0, 1, scale).astype(np.float64)
    held = np.rint(own + steps).clip(limits.min, limits.max)
    off = np.linalg.norm((held - own - steps) * scale)
    return held.astype(own.dtype), float(off / (np.linalg.norm(change) or 1))
