"""Types of a graph's values by ONNX's inference, whose open dimensions have the names that the file gives them."""

from __future__ import annotations

import onnx

#: sizes that stand for open dimensions: large primes, which no shape of a network has
_SIZES = (999_983, 999_979, 999_961, 999_959, 999_953, 999_931, 999_917, 999_907)


def inferred(model: onnx.ModelProto, name: str) -> onnx.ValueInfoProto | None:
    """The declaration of a value; None where inference does not find it.

    Where inference makes up a name for an open dimension, the dimension gets that of the input's dimension which it
    is equal to: found by an inference with numbers in the place of names.  Others have no name.
    """
    types = _infer(model, name)
    symbols = {d.dim_param for i in model.graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}
    if types is None or all(not d.dim_param or d.dim_param in symbols for d in _dims(types)):
        return types
    sizes = dict(zip(sorted(symbols), _SIZES, strict=False))
    light = onnx.ModelProto.FromString(model.SerializeToString())
    for value in (*light.graph.input, *light.graph.output, *light.graph.value_info):
        for d in _dims(value):
            if d.dim_param in sizes:
                d.dim_value = sizes[d.dim_param]
            elif d.dim_param:
                d.ClearField("dim_param")
    again = _infer(light, name)
    names = {size: symbol for symbol, size in sizes.items()}
    numbers = [0] * len(_dims(types)) if again is None else [d.dim_value for d in _dims(again)]
    for d, number in zip(_dims(types), numbers, strict=False):
        if d.dim_param and d.dim_param not in symbols:
            d.ClearField("dim_param")
            if number in names:
                d.dim_param = names[number]
    return types


def _infer(model: onnx.ModelProto, name: str) -> onnx.ValueInfoProto | None:
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    return next((v for v in (*graph.value_info, *graph.output, *graph.input) if v.name == name), None)


def _dims(value: onnx.ValueInfoProto) -> list[onnx.TensorShapeProto.Dimension]:
    return list(value.type.tensor_type.shape.dim)
