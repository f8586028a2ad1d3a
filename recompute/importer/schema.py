"""Checks of nodes against ONNX's schemas."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import onnx

from ..errors import ModelError, UsageError

#: larger axes are invalid, and crash onnx's own type inference
_MOST = 1 << 10
_AXES = {"axis", "axes", "batch_dims", "batch_axis", "time_axis", "perm"}


@dataclass(frozen=True)
class _Rules:
    """The rules of a schema for a node.  `needed`: positions and names of required inputs."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    needed: tuple[tuple[int, str], ...]
    attributes: dict[str, int]
    required: tuple[str, ...]


def _number(kind: Any) -> int:
    """The AttributeProto number of an attribute's type (onnx's binding returns an enumeration)."""
    return int(getattr(kind, "value", kind))


@functools.lru_cache(maxsize=1024)
def _rules(op_type: str, opset: int) -> _Rules | None:
    """The rules of an operator; None if ONNX has no such operator."""
    try:
        schema = onnx.defs.get_schema(op_type, min(opset, onnx.defs.onnx_opset_version()))
    except Exception:
        return None
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return _Rules(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple((i, p.name) for i, p in enumerate(schema.inputs) if p.option == single),
        {name: _number(a.type) for name, a in schema.attributes.items()},
        tuple(name for name, a in schema.attributes.items() if a.required),
    )


def has_operator(op_type: str, opset: int) -> bool:
    """Whether ONNX has this operator at this opset."""
    return _rules(op_type, opset) is not None


def check_node(node: onnx.NodeProto, opset: int) -> None:
    """Checks numbers of inputs and outputs, required inputs and attributes, and types of attributes.

    Unknown attributes are ignored, as old files have some.  ModelError for the first violation; operators of other
    domains are not checked.
    """
    rules = _rules(node.op_type, opset) if node.domain in ("", "ai.onnx") else None
    if rules is None:
        return
    _check_count(len(node.input), *rules.inputs, "input")
    _check_count(len(node.output), *rules.outputs, "output")
    for i, name in rules.needed:
        if not node.input[i]:
            raise ModelError(f"its input {i} ({name}) is absent, but {node.op_type} needs it")
    types = {a.name: a.type for a in node.attribute}
    for name, actual in types.items():
        if actual != rules.attributes.get(name, actual):
            kinds = onnx.AttributeProto.AttributeType
            kind = kinds.Name(actual) if actual in kinds.values() else str(actual)
            raise ModelError(f"its attribute '{name}' is {kind}, ONNX requires {kinds.Name(rules.attributes[name])}")
    for a in node.attribute:
        if a.name in _AXES and any(abs(i) > _MOST for i in (a.i, *a.ints)):
            raise ModelError(f"its attribute '{a.name}' is {a.i or list(a.ints)}: no tensor has so many dimensions")
        if a.name == "batch_dims" and a.i < 0:
            raise ModelError(f"its attribute 'batch_dims' is {a.i}, it may not be negative")
    for name in rules.required:
        if name not in types:
            raise ModelError(f"its attribute '{name}' is absent, but {node.op_type} needs it")


def _check_count(n: int, least: int, most: int, what: str) -> None:
    if not least <= n <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}" if most < 1 << 30 else f"{least} or more"
        raise ModelError(f"it has {n} {what}{'s' * (n != 1)}, ONNX requires {wanted}")


def attribute_value(a: onnx.AttributeProto, *, decimal: bool = False) -> Any:
    """An attribute as Python: numbers, str, tuples, arrays; graphs stay protos.

    `decimal`: floats, which files hold in 32 bits, as the shortest decimal number that is the same in float32: 1e-5 in
    place of 9.99999974e-06.
    """
    value = onnx.helper.get_attribute_value(a)
    if decimal and isinstance(value, float):
        return _decimal(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    if isinstance(value, (list, tuple)) or (
        hasattr(value, "__len__") and not isinstance(value, (str, onnx.GraphProto))
    ):
        return tuple(
            v.decode("utf-8", "replace")
            if isinstance(v, bytes)
            else _decimal(v)
            if decimal and isinstance(v, float)
            else v
            for v in value
        )
    return value


def _decimal(value: float) -> float:
    """The shortest decimal number that is this one in float32; a plain fraction such as 1/6 where that is none."""
    number = np.float32(value)
    shortest = float(str(number))
    if not math.isfinite(shortest) or len(str(number).strip("-0.").replace(".", "")) < 7:
        return shortest
    fraction = float(Fraction(shortest).limit_denominator(64))
    return fraction if np.float32(fraction) == number else shortest


def describe(node: onnx.NodeProto) -> str:
    """The name of a node in errors: `node 'conv1' (Conv)`."""
    name = node.name or next((o for o in node.output if o), "")
    domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
    return f"node '{name}' ({domain}{node.op_type})"


def quantized_pairs(option: str | None) -> dict[str, tuple[Any, ...]] | None:
    """The importer's map from outputs of QuantizeLinear to their unrounded inputs; None: not needed.

    UsageError if `option` is neither None nor "ste".
    """
    if option not in (None, "ste"):
        raise UsageError(f"quantization must be None or 'ste', not {option!r}")
    return {} if option == "ste" else None
