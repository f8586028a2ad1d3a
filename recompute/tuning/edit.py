"""Cutting a model at a value, and appending a new head or replacing one: `rc.edit`."""

from __future__ import annotations

import math

import onnx
from onnx import helper

from ..errors import UsageError
from ..exporter.inference import restricted
from ..language.types import DTYPES
from .graph import Graph, edits
from .heads import drawn, features_out, replace_head

__all__ = ["cut", "linear", "replace_head"]


@edits
def cut(model: Graph, at: str) -> None:
    """Makes a value the model's only output: what comes after it, and what only that needs, is dropped.

    `model`: a path, a ModelProto, or a Program from before losses and `minimize`; it stays as it is.  The result is a
    ModelProto, or a Program for a Program.  UsageError where the model has no such value.
    """
    model.known(at)
    _only_outputs(model, [at])


@edits
def linear(
    model: Graph,
    out_features: int,
    *,
    name: str = "head",
    at: str | None = None,
    output: str | None = None,
    bias: bool = True,
    in_features: int | None = None,
    seed: int = 0,
) -> None:
    """Appends a linear layer, y = x · Wᵀ + b, whose result is an output in the place of `at`.

    `at`: the value it reads (default: the model's only output); `output`: the name of its result (default: `name`).
    Its parameters are `NAME.weight` [out, in] and `NAME.bias`, uniform in ±1/√in as PyTorch's Linear draws them, by
    `seed` and their names.  `in_features`: the last dimension of `at`, where the model does not tell it.
    The kind of `model` and of the result as for `cut`.
    """
    outputs = model.outputs()
    if at is None and len(outputs) != 1:
        raise UsageError(f"the model has {len(outputs)} outputs ({', '.join(outputs)}): say by at= which one is read")
    source = outputs[0] if at is None else at
    model.known(source)
    append_linear(model, source, (out_features, in_features), name, output or name, bias=bias, seed=seed)


def append_linear(
    model: Graph, x: str, features: tuple[int, int | None], name: str, output: str, *, bias: bool, seed: int
) -> None:
    """Appends a linear layer to a graph; see `linear`."""
    size, width = features
    features_out(size)
    kind, dims = model.type_of(x) or (None, [])
    known = dims[-1] if dims else None
    if known is not None and width not in (None, known):
        raise UsageError(f"'{x}' has {known} features, not in_features={width}")
    width = width or known
    if width is None:
        raise UsageError(f"the model does not tell the last dimension of '{x}': give in_features=")
    numbers = DTYPES.get(kind or "f32", DTYPES["f32"])
    names = [model.fresh(f"{name}.weight"), *([model.fresh(f"{name}.bias")] if bias else ())]
    for n, shape in zip(names, [(size, width), (size,)], strict=False):
        model.add_tensor(n, drawn(n, shape, 1 / math.sqrt(width), seed).astype(numbers))
    y = model.fresh(output)
    if len(dims) == 2 and (bias or model.opset >= 11):  # a Gemm before 11 has a bias
        model.nodes.append(helper.make_node("Gemm", [x, *names], [y], name=y, transB=1))
    else:
        turned = model.fresh(f"{name}.weight.transposed")
        model.nodes.append(helper.make_node("Transpose", [names[0]], [turned], name=turned, perm=[1, 0]))
        product = model.fresh(f"{output}.product") if bias else y
        model.nodes.append(helper.make_node("MatMul", [x, turned], [product], name=product))
        if bias:
            model.nodes.append(helper.make_node("Add", [product, names[1]], [y], name=y))
    before = [o for o in model.model.graph.output if o.name != x]
    del model.model.graph.output[:]
    model.model.graph.output.extend([*before, _declared(model, y)])
    model.also_trained(names)


def _declared(model: Graph, name: str) -> onnx.ValueInfoProto:
    return model.info(name) or onnx.ValueInfoProto(name=name)


def _only_outputs(model: Graph, wanted: list[str]) -> None:
    """Makes values the model's outputs, and drops what they do not need."""
    graph = model.model.graph
    infos = [_declared(model, n) for n in wanted]
    del graph.node[:]
    graph.node.extend(model.nodes)
    restricted(graph, wanted)
    del graph.output[:]
    graph.output.extend(infos)
    model.refresh()
