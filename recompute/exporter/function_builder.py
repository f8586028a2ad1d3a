"""Conversion of operators to standard ONNX nodes, for bodies of exported functions and for the main graph."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, helper

from ..errors import ModelError
from ..language.builder import Builder, Names
from ..language.ir import Operator, Value
from ..language.op import Op
from ..language.types import DTYPES, TensorType, dtype_from_onnx, dtype_to_onnx
from ..support.room import need_room

#: the domain of exported functions
DOMAIN = "onnx_recompute"
#: opset of exported models
OPSET = 21
#: deepest nesting of expansions
_MAX_DEPTH = 30


class FunctionBuilder:
    """Collects the nodes of a function's body.  Every name denotes one value.

    For `export` methods of operators: `node`, `call`, `ints`, `array`, `zero`, `scalar`,
    `cast_like`, `fresh`, `shape`, `type`, `expand`.
    """

    def __init__(self, names: Names, types: Mapping[str, TensorType]) -> None:
        self.names = names
        self.types = dict(types)
        self.nodes: list[onnx.NodeProto] = []
        #: begins fresh names
        self.prefix = ""
        self._arrays: dict[tuple, str] = {}
        self._constants: dict[str, np.ndarray] = {}
        self._made: dict[str, onnx.NodeProto] = {}
        self._depth = 0

    # -- for `export` --------------------------------------------------------------------------------------

    def node(self, op_type: str, ins: Sequence[str], outs: Sequence[str], **attributes: Any) -> None:
        """A node of ONNX's default domain; attributes that are None or empty are left out, "" is an absent value."""
        schema = _schema(op_type)
        node = onnx.NodeProto(op_type=op_type, name=next((o for o in outs if o), op_type))
        node.input.extend(_trimmed(ins))
        node.output.extend(_trimmed(outs))
        for name, value in attributes.items():
            if value is not None and not (isinstance(value, (tuple, list)) and not value):
                node.attribute.append(_attribute(schema, name, value))
        for o in node.output:
            self._made[o] = node
        self.append(node)

    def call(self, op_type: str, *ins: str, **attributes: Any) -> str:
        """A node with one output; returns its name."""
        out = self.fresh(op_type.lower())
        self.node(op_type, ins, [out], **attributes)
        return out

    def fresh(self, hint: str) -> str:
        """An unused name."""
        return self.names.take(f"{self.prefix}.{hint}" if self.prefix else hint)

    def array(self, array: np.ndarray) -> str:
        """The name of a constant; equal constants are shared."""
        array = np.asarray(array)
        t = TensorType.of(array)
        key = (t, array.tobytes())
        if key not in self._arrays:
            name = self.names.take(f"const.{t.dtype}" if self.prefix else f"c{len(self._arrays)}")
            self._arrays[key] = name
            self._constants[name] = array
            self.types[name] = t
            self.store(name, array)
        return self._arrays[key]

    def ints(self, values: Sequence[int]) -> str:
        """The name of an int64 constant vector (axes, shapes)."""
        return self.array(np.array(list(values), np.int64))

    def scalar(self, value: object, like: str) -> str:
        """The name of a constant without dimensions, of `like`'s element type."""
        return self.array(np.array(value, DTYPES[self.type(like).dtype]))

    def zero(self, like: str) -> str:
        """0 of `like`'s element type."""
        return self.scalar(0, like)

    def cast_like(self, name: str, like: str) -> str:
        """`name` cast to `like`'s element type."""
        return self.call("Cast", name, to=dtype_to_onnx(self.type(like).dtype))

    def shape(self, name: str) -> tuple[int, ...]:
        """The dimensions of a value."""
        return self.type(name).shape

    def type(self, name: str) -> TensorType:
        """The type of a value; for results of `node`, by ONNX's own inference."""
        if name not in self.types:
            if name not in self._made:
                raise ModelError(f"export: there is no value '{name}'")
            self._infer(self._made[name])
        return self.types[name]

    # -- overridden for the main graph ---------------------------------------------------------------------

    def append(self, node: onnx.NodeProto) -> None:
        """Adds a finished node."""
        self.nodes.append(node)

    def store(self, name: str, array: np.ndarray) -> None:
        """Declares a constant: a Constant node, since functions have no initializers."""
        node = helper.make_node("Constant", [], [name], name=name, value=tensor_of(name, array))
        self.append(node)

    # -- operators of this package -------------------------------------------------------------------------

    def apply(self, op: Op, ins: Sequence[str], outs: Sequence[str]) -> None:
        """Writes `op` as standard nodes: by its `export`, as its ONNX operator, or by its expansion, in this order.

        ModelError if it has none.
        """
        types = op.infer(*(self.type(n) if n else None for n in ins))
        outs = [*outs, *[""] * (len(types) - len(outs))]
        for name, t in zip(outs, types, strict=True):
            if name:
                self.types[name] = t
        if op.export(self, ins, outs):
            return
        if op.onnx_name and self._onnx_has(op.onnx_name, ins, outs):
            self.node(op.onnx_name, ins, outs, **_attributes_of(op))
        else:
            self.expand(op, ins, outs)

    def _onnx_has(self, op_type: str, ins: Sequence[str], outs: Sequence[str]) -> bool:
        """Whether ONNX's operator takes these element types and has these outputs."""
        if not onnx.defs.has(op_type, OPSET):
            return False
        schema = _schema(op_type)
        formals = schema.inputs
        kinds = [formals[min(i, len(formals) - 1)].types if n else () for i, n in enumerate(ins)]
        fit = all(not n or _ONNX_KINDS[self.type(n).dtype] in k for n, k in zip(ins, kinds, strict=True))
        return fit and len(_trimmed(outs)) <= schema.max_output

    def expand(self, op: Op, ins: Sequence[str], outs: Sequence[str]) -> None:
        """Writes the expansion of `op`.  ModelError if it has none."""
        from ..passes.cleanup.dead_code import prune

        b = Builder(self.names, prefix=self.prefix)
        results = op.expand(b, *(Value(n, self.type(n)) if n else None for n in ins))
        if results is None:
            kinds = ", ".join(dict.fromkeys(self.type(n).dtype for n in ins if n))
            raise ModelError(f"operator {op.name} of {kinds} has no form in ONNX's opset {OPSET}")
        pairs = [(v, o) for v, o in zip(results, outs, strict=False) if o and v is not None]
        if len(pairs) < sum(map(bool, outs)):
            raise ModelError(f"operator {op.name}: its `expand` does not return all used outputs")
        names = {c.value.name: self.array(c.numpy()) for c in b.constants}
        written = {v.name for o in b.operators for v in o.writes()}
        copies = []
        for v, o in pairs:
            if v.name in written and v.name not in names:
                names[v.name] = o
            else:  # an input, a constant, or an output returned twice
                copies.append((names.get(v.name, v.name), o))
        wanted = [v.name for v, _ in pairs]
        self._apply_all(op, [o.renamed(names) for o in prune(b.operators, wanted)])
        for source, target in copies:
            self.node("Identity", [source], [target])

    def _apply_all(self, op: Op, body: Sequence[Operator]) -> None:
        if self._depth >= _MAX_DEPTH:
            raise ModelError(f"operator {op.name}: expansions nest more than {_MAX_DEPTH} deep")
        self._depth += 1
        for o in body:
            self.apply(
                o.op, ["" if v is None else v.name for v in o.inputs], ["" if v is None else v.name for v in o.outputs]
            )
        self._depth -= 1

    def _infer(self, node: onnx.NodeProto) -> None:
        """Types of a node's outputs, by ONNX's shape inference."""
        inputs = {n: type_proto(self.type(n)) for n in node.input if n}
        data = {n: tensor_of(n, self._constants[n]) for n in node.input if n in self._constants}
        types = onnx.shape_inference.infer_node_outputs(
            _schema(node.op_type), node, inputs, data, opset_imports=[helper.make_opsetid("", OPSET)]
        )
        for name in node.output:
            t = types[name].tensor_type if name in types else None
            dtype = dtype_from_onnx(t.elem_type) if t is not None else None
            if t is None or dtype is None or any(not d.HasField("dim_value") for d in t.shape.dim):
                raise ModelError(f"export: ONNX cannot infer the type of '{name}' ({node.op_type})")
            self.types[name] = TensorType(dtype, tuple(d.dim_value for d in t.shape.dim))


def _trimmed(names: Sequence[str]) -> list[str]:
    """The names without absent ones at the end."""
    trimmed = [n or "" for n in names]
    while trimmed and not trimmed[-1]:
        trimmed.pop()
    return trimmed


@functools.cache
def _schema(op_type: str) -> onnx.defs.OpSchema:
    if not onnx.defs.has(op_type, OPSET):
        raise ModelError(f"export: ONNX's opset {OPSET} has no operator '{op_type}'")
    return onnx.defs.get_schema(op_type, OPSET)


def _attributes_of(op: Op) -> dict[str, Any]:
    """The fields that ONNX has by the same name; ModelError if it lacks one that differs from its default."""
    assert op.onnx_name is not None
    fields = _schema(op.onnx_name).attributes
    attributes = {}
    for field in dataclasses.fields(op):
        value = getattr(op, field.name)
        if field.name in fields:
            attributes[field.name] = value
        elif field.default is dataclasses.MISSING or value != field.default:
            raise ModelError(f"{op.name}: ONNX's {op.onnx_name} has no attribute '{field.name}': it needs `export`")
    return attributes


# element types as ONNX's schemas write them
_ONNX_KINDS = {
    "f16": "tensor(float16)",
    "bf16": "tensor(bfloat16)",
    "f32": "tensor(float)",
    "f64": "tensor(double)",
    "bool": "tensor(bool)",
    **{name: f"tensor({'u' if name[0] == 'u' else ''}int{name[1:]})" for name in DTYPES if name[0] in "ui"},
    "f8e4m3fn": "tensor(float8e4m3fn)",
    "f8e4m3fnuz": "tensor(float8e4m3fnuz)",
    "f8e5m2": "tensor(float8e5m2)",
    "f8e5m2fnuz": "tensor(float8e5m2fnuz)",
    "f8e8m0": "tensor(float8e8m0)",
    "f4e2m1": "tensor(float4e2m1)",
}
_CASTS: dict[int, Any] = {
    AttributeProto.FLOAT: float,
    AttributeProto.INT: int,
    AttributeProto.STRING: str,
    AttributeProto.FLOATS: lambda v: [float(x) for x in v],
    AttributeProto.INTS: lambda v: [int(x) for x in v],
    AttributeProto.STRINGS: lambda v: [str(x) for x in v],
    AttributeProto.TENSOR: lambda v: tensor_of("", v) if isinstance(v, np.ndarray) else v,
}


def _attribute(schema: onnx.defs.OpSchema, name: str, value: Any) -> AttributeProto:
    """An attribute with the type in the schema."""
    if name not in schema.attributes:
        raise ModelError(f"export: ONNX's {schema.name} has no attribute '{name}'")
    kind = int(schema.attributes[name].type.value)  # type: ignore[attr-defined]
    return helper.make_attribute(name, _CASTS.get(kind, lambda v: v)(value), attr_type=kind)


def tensor_of(name: str, array: np.ndarray) -> onnx.TensorProto:
    """An array as a tensor with raw bytes."""
    proto = onnx.TensorProto()
    fill_tensor(proto, name, array)
    return proto


def fill_tensor(proto: onnx.TensorProto, name: str, array: np.ndarray) -> None:
    """Writes an array into an empty tensor, which saves a copy if the tensor is already part of a message."""
    t = TensorType.of(array)
    proto.name, proto.data_type = name, dtype_to_onnx(t.dtype)
    proto.dims.extend(t.shape)
    need_room(2 * array.nbytes)  # as bytes, and in the tensor
    proto.raw_data = array.tobytes()


def type_proto(t: TensorType) -> onnx.TypeProto:
    """A type as ONNX writes it."""
    return helper.make_tensor_type_proto(dtype_to_onnx(t.dtype), t.shape)


def value_info(name: str, t: TensorType) -> onnx.ValueInfoProto:
    """A typed name."""
    return helper.make_value_info(name, type_proto(t))


def set_metadata(proto: Any, entries: Mapping[str, str]) -> None:
    """Sets entries of a model's or node's metadata."""
    old = {p.key: p for p in proto.metadata_props}
    for key, value in entries.items():
        if key in old:
            old[key].value = value
        else:
            proto.metadata_props.add(key=key, value=value)
