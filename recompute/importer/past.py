"""Keys and values of a past, which generation feeds to attention: a program trains without, and a word is said."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator

import onnx

from ..errors import ModelWarning
from .graphs import names_read, needed, without_fields

#: operators → inputs that are a past, outputs that hold it for the next run, inputs that say lengths with it
_PAST: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    ("com.microsoft", "GroupQueryAttention"): ((3, 4), (1, 2), (5, 6)),
    ("com.microsoft", "MultiHeadAttention"): ((6, 7), (1, 2), (8, 9)),
    ("com.microsoft", "Attention"): ((4,), (1,), (6,)),
    ("", "Attention"): ((4, 5), (1, 2), ()),
}
_SHARES = "past_present_share_buffer"


def without_past(model: onnx.ModelProto, *sizes: Collection[str] | None) -> onnx.ModelProto:
    """The model without a past that is inputs of open length, and without what only this needs; itself where there is
    none.  `sizes`: inputs, and open dimensions, whose sizes are given: such a past stays.

    Attention then begins at the first token of what it is given.  Inputs that nothing else reads (lengths, and masks
    that only say how long the past is, too) and outputs that are the past of a next run are left out (ModelWarning).
    """
    graph = model.graph
    fed = {i.name for i in graph.input} - {t.name for t in graph.initializer}
    sized = {name for names in sizes for name in names or ()}
    unknown = {i.name for i in graph.input if i.name in fed and _is_open(i, sized)}
    read, past = set(names_read(graph.node)), list[str]()
    present: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if (joined := _joined(node, unknown, graph)) is not None:
            past.append(joined)
            present.add(node.output[0])
            nodes.append(onnx.helper.make_node("Identity", [node.input[1]], [node.output[0]], name=node.name))
            continue
        ins, outs, lengths = _PAST.get((node.domain, node.op_type), ((), (), ()))
        pasts = [node.input[i] for i in ins if i < len(node.input) and node.input[i]]
        if not pasts or not unknown.issuperset(pasts):
            nodes.append(node)
            continue
        past += pasts
        present.update(node.output[i] for i in outs if i < len(node.output) and node.output[i])
        nodes.append(_begun(node, (*ins, *lengths), read))
    if not past:
        return model
    outputs = [o for o in graph.output if o.name not in present]
    nodes = needed(nodes, {o.name for o in outputs})
    still = set(names_read(nodes)).intersection(past)  # its length
    nodes = [*(n for i in graph.input if i.name in still for n in _empty(i, graph, past)), *nodes]
    now = {*names_read(nodes), *(o.name for o in outputs)}
    written = {o for n in nodes for o in n.output}
    gone = [
        i.name for i in graph.input if i.name in read and i.name in fed and (i.name not in now or i.name in written)
    ]
    result = without_fields(model, "graph")
    result.graph.CopyFrom(without_fields(graph, "node", "input", "output"))
    result.graph.node.extend(nodes)
    result.graph.input.extend(i for i in graph.input if i.name not in gone)
    result.graph.output.extend(outputs)
    _tell(gone, len(graph.output) - len(outputs))
    return result


def _joined(node: onnx.NodeProto, unknown: Collection[str], graph: onnx.GraphProto) -> str | None:
    """The past that a Concat joins keys or values to, along their length, for attention and for the next run."""
    if node.op_type != "Concat" or node.domain not in ("", "ai.onnx") or len(node.input) != 2:
        return None
    past, axis = node.input[0], next((a.i for a in node.attribute if a.name == "axis"), 0)
    if past not in unknown or node.output[0] not in {o.name for o in graph.output}:
        return None
    ndim = next(len(i.type.tensor_type.shape.dim) for i in graph.input if i.name == past)
    return past if ndim > 2 and axis % ndim == ndim - 2 else None


def _empty(past: onnx.ValueInfoProto, graph: onnx.GraphProto, others: Collection[str]) -> Iterator[onnx.NodeProto]:
    """Nodes that make a past of length 0, for what reads its shape; none where another dimension is open that no other
    input has."""
    dims = list(past.type.tensor_type.shape.dim)
    shapes = [(i.name, list(i.type.tensor_type.shape.dim)) for i in graph.input if i.name not in others]
    make, parts, nodes = onnx.helper.make_node, list[str](), list[onnx.NodeProto]()
    for axis, d in enumerate(dims):
        parts.append(f"{past.name}/size{axis}")
        if d.HasField("dim_value") or axis == len(dims) - 2:
            number = 0 if axis == len(dims) - 2 else d.dim_value
            nodes.append(make("Constant", [], [parts[-1]], value=onnx.helper.make_tensor("", 7, [1], [number])))
            continue
        places = (
            (n, a) for n, all_ in shapes for a, o in enumerate(all_) if o.dim_param and o.dim_param == d.dim_param
        )
        source, at = next(places, (None, 0))
        if source is None:
            return
        nodes.append(make("Constant", [], [f"{parts[-1]}/at"], value=onnx.helper.make_tensor("", 7, [1], [at])))
        nodes.append(make("Shape", [source], [f"{parts[-1]}/of"]))
        nodes.append(make("Gather", [f"{parts[-1]}/of", f"{parts[-1]}/at"], [parts[-1]]))
    yield from nodes
    yield make("Concat", parts, [f"{past.name}/sizes"], axis=0)
    value = onnx.helper.make_tensor("", past.type.tensor_type.elem_type, [1], [0])
    yield make("ConstantOfShape", [f"{past.name}/sizes"], [past.name], value=value)


def _is_open(i: onnx.ValueInfoProto, sized: Collection[str]) -> bool:
    """Whether the length of a past [..., length, head size] is open."""
    dims = i.type.tensor_type.shape.dim
    if len(dims) < 2 or dims[-2].HasField("dim_value") or i.name in sized:
        return False
    return dims[-2].dim_param not in sized and f"{i.name}.{len(dims) - 2}" not in sized


def _begun(node: onnx.NodeProto, at: tuple[int, ...], read: set[str]) -> onnx.NodeProto:
    """The node without the inputs `at`, and the outputs behind the first that nothing in the graph reads."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for i in at:
        if i < len(copy.input):
            copy.input[i] = ""
    for i, name in enumerate(copy.output):
        copy.output[i] = name if not i or name in read else ""
    for a in [a for a in copy.attribute if a.name == _SHARES]:
        copy.attribute.remove(a)
    return copy


def _tell(inputs: list[str], outputs: int) -> None:
    shown = ", ".join(inputs[:3]) + (f" and {len(inputs) - 3} more" if len(inputs) > 3 else "")
    warnings.warn(
        f"training begins without a past: the inputs {shown} are left out, and {outputs} outputs for a next run; the "
        "trained file has them",
        ModelWarning,
        stacklevel=3,
    )
