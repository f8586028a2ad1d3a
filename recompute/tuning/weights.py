"""Where the weights of linear layers and tables are read in a graph, in the forms that exporters write."""

from __future__ import annotations

import re
from dataclasses import dataclass

import onnx

from ..errors import UsageError
from .few_bits import CODES, DOMAIN, few_bits
from .graph import Graph, Reading
from .integers import CODES_8, PRODUCTS, integer_weights, product_of

_STANDARD = ("", "ai.onnx")
#: shapes and element types by name
Matrices = dict[str, tuple[tuple[int, ...], int]]
#: suffixes that tools append to the name of a module's weight
_ENDINGS = re.compile(r"(\.MatMul)?\.q?weight(_Q\d+|_quant|_Bnb4)?$|_Q\d+$|_Bnb4$")


def module_of(weight: str) -> str:
    """The module that a weight belongs to: its name without `.weight`, or what tools write there for few bits."""
    return _ENDINGS.sub("", weight) or weight


@dataclass(frozen=True)
class Site:
    """A node that multiplies by a weight, or looks it up.

    `kind`: "linear" or "embedding".  `turned`: the weight is stored [out, in], as PyTorch's Linear does, rather than
    [in, out].  `x`: what is multiplied, where it is not the node's first input.
    """

    node: onnx.NodeProto
    kind: str
    turned: bool
    x: str = ""


@dataclass(frozen=True)
class Weight:
    """A weight of a model: its shape as it is stored, its element type, and the nodes that read it."""

    name: str
    shape: tuple[int, int]
    onnx_type: int
    sites: tuple[Site, ...]

    @property
    def module(self) -> str:
        """The module it belongs to."""
        return module_of(self.name)

    @property
    def packed(self) -> bool:
        """Whether it is stored in few bits, or as integers that a product reads."""
        return self.sites[0].node.domain == DOMAIN or bool(self.sites[0].x)

    @property
    def kind(self) -> str:
        """ "linear" or "embedding"."""
        return self.sites[0].kind

    @property
    def turned(self) -> bool:
        """Whether it is stored [out, in]."""
        return self.sites[0].turned

    @property
    def features(self) -> tuple[int, int]:
        """(in, out) of a linear layer; (rows, width) of a table."""
        return self.shape[::-1] if self.turned else self.shape


def matrices(model: Graph) -> dict[str, tuple[tuple[int, int], int]]:
    """Matrices of floating-point numbers by name: shape and element type; also 8-bit ones that are dequantised, and
    those in few bits and of products of integers, by the names of their codes."""
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    weights: Matrices = {t.name: (tuple(t.dims), t.data_type) for t in model.tensors.values()}
    integers = {n: f for n, f in weights.items() if f[1] in CODES_8 and len(f[0]) == 2}
    for node in model.nodes:
        a = node.attribute[0] if node.attribute else None
        if node.op_type == "Constant" and a is not None and a.name == "value":
            weights[node.output[0]] = tuple(a.t.dims), a.t.data_type
        elif node.op_type == "ConstantOfShape" and node.input[0] in model.tensors:
            shape = model.constant(node.input[0])
            assert shape is not None
            weights[node.output[0]] = tuple(shape.tolist()), a.t.data_type if a is not None else 1
        elif node.op_type in ("Cast", "Sub", "Mul") and node.domain in _STANDARD:
            _cast(model, node, integers, weights)
        elif node.op_type == "DequantizeLinear" and node.input[0] in weights and node.input[1] in weights:
            weights[node.output[0]] = weights[node.input[0]][0], weights[node.input[1]][1]
    packed = few_bits(model)
    parts = {n for w in packed.values() for n in (w.scales, w.zeros)}
    weights |= {n: (w.shape, w.onnx_type) for n, w in packed.items()}
    weights |= {n: (shape, onnx.TensorProto.FLOAT) for n, shape in integer_weights(model).items()}
    fit = {n: (s, k) for n, (s, k) in weights.items() if len(s) == 2 and min(s) > 0 and k in floats}
    return {n: w for n, w in fit.items() if n not in parts}


def _cast(model: Graph, node: onnx.NodeProto, integers: Matrices, found: Matrices) -> None:
    """Follows matrices of 8-bit integers through Cast, Sub and Mul: their product with a scale is a weight."""
    x = next((i for i in node.input if i in integers), None)
    if x is None or not all(i in model.tensors for i in node.input if i != x):
        return
    shape, kind = integers[x]
    if node.op_type == "Cast":
        integers[node.output[0]] = shape, next((a.i for a in node.attribute if a.name == "to"), kind)
    else:
        (found if node.op_type == "Mul" else integers)[node.output[0]] = shape, kind


def weight_of(readers: Reading, name: str, shape: tuple[int, int], onnx_type: int) -> Weight:
    """A weight with its readers (`Graph.reading`).  UsageError where one of them is no linear layer and no table."""
    sites: list[Site] = []
    for node in readers(name):
        if node.op_type in PRODUCTS and list(node.input).index(name) == 1:
            product = product_of(readers, node)
            if product is None:
                raise _refused(name, node)
            sites.append(Site(product.last, "linear", False, product.x))
        elif node.op_type == "Transpose" and node.domain in _STANDARD and len(shape) == 2:
            turned = node.output[0]
            sites += [_site(name, n, turned, turned=True) for n in readers(turned)]
        else:
            sites.append(_site(name, node, name, turned=False))
    if not sites:
        raise UsageError(f"no operator reads '{name}'")
    if len({(s.kind, s.turned) for s in sites}) > 1:
        raise UsageError(
            f"'{name}' is read in several ways ({', '.join(sorted({s.node.op_type for s in sites}))}), as a table and "
            "by a product: an adapter belongs to one of them. Export the model with untied weights, or leave it out"
        )
    return Weight(name, shape, onnx_type, tuple(sites))


def _site(name: str, node: onnx.NodeProto, read: str, *, turned: bool) -> Site:
    options = {a.name: a for a in node.attribute}
    at = list(node.input).index(read)
    if node.domain in _STANDARD and list(node.input).count(read) == 1:
        if node.op_type == "MatMul" and at == 1:
            return Site(node, "linear", turned)
        if node.op_type == "Gemm" and at == 1 and not _number(options, "transA", 0) and _plain(options):
            return Site(node, "linear", turned != bool(_number(options, "transB", 0)))
        if node.op_type == "Gather" and at == 0 and not turned and not _number(options, "axis", 0):
            return Site(node, "embedding", False)
    if node.domain == DOMAIN and CODES.get(node.op_type) == at:
        return Site(node, "linear" if at else "embedding", at > 0)
    raise _refused(name, node)


def _refused(name: str, node: onnx.NodeProto) -> UsageError:
    return UsageError(
        f"'{name}' is read by {node.op_type} (node '{node.name or node.output[0]}'): only the weights of linear layers "
        "(MatMul, Gemm without factors) and of tables (Gather) are supported; leave it out of the patterns"
    )


def _number(options: dict[str, onnx.AttributeProto], name: str, default: int) -> int:
    return int(options[name].i) if name in options else default


def _plain(options: dict[str, onnx.AttributeProto]) -> bool:
    return all(options[n].f == 1.0 for n in ("alpha", "beta") if n in options)
