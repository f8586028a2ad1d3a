"""Valid models, and damage to them that knows ONNX: attributes, tensors, types, wires, names, order, opsets."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from contrib_cases import cases
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

HERE = Path(__file__).parent.parent
#: sizes, axes and counts that nobody expects
ODD = [0, -1, 1, 2, 3, -2, 7, 100, 1000, 2**31, -(2**31), 2**40, 2**63 - 1, -(2**63)]
#: what PyTorch's exporters wrote; named one by one so that a seed stays the file that it is
EXPORTED = """
attention.dynamo.train conv1d.dynamo.eval conv1d.ts.train conv3d.ts.eval convnext.dynamo.eval.opt
encoder.dynamo.eval.opt mlp_activations.dynamo.eval mlp_activations2.dynamo.eval mlp_batchnorm.dynamo.eval
mlp_batchnorm.ts.train mlp_fresh.ts.train mlp_gelu.ts.train mobilenet.dynamo.eval mobilenet.ts.train
norms.ts.train
"""
NAMES = ["", "x", "/", "a b", "\n", "é/ö", "0", "%x", 'q"q', "x" * 300, "None", "step", "y.grad", "\u202e", "'"]


@functools.cache
def corpus(everything: bool = True) -> list[tuple[str, bytes]]:
    """(name, file) of valid models: nets, each operator of com.microsoft, control flow, onnx's own operator tests."""
    paths = [HERE.parent / "recompute/models/mlp.onnx", HERE.parent / "recompute/models/lenet.onnx"]
    paths += [HERE / f"data/pytorch/{name}.onnx" for name in EXPORTED.split()]
    found = [(p.name, p.read_bytes()) for p in paths] * 6
    found += [(name, model.SerializeToString()) for name, (model, _) in cases().items()]
    found += [(f"control {i}", m.SerializeToString()) for i, m in enumerate(_control_flow())] * 8
    if everything:
        from onnx.backend.test.case.node import collect_testcases

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own arithmetic
            models = [(c.name, c.model) for c in collect_testcases(None)]
        found += [(n, m.SerializeToString()) for n, m in models if m is not None and m.ByteSize() < 20_000]
    return found


def _control_flow() -> Iterator[ModelProto]:
    from importer.test_control_flow import counted, recurrent

    for arguments in ((3,), (3, "c"), (None, "c", None)):
        if arguments[0] is not None:
            yield counted(*arguments)
    yield recurrent(4)[0]
    yield recurrent(3, scan_input_axes=[1], scan_output_directions=[1])[0]
    yield _with_function()


def _with_function() -> ModelProto:
    """A function that calls another one, an If in it."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    then = helper.make_graph([helper.make_node("Relu", ["a"], ["t"])], "t", [], [onnx.ValueInfoProto(name="t")])
    other = helper.make_graph([helper.make_node("Neg", ["a"], ["e"])], "e", [], [onnx.ValueInfoProto(name="e")])
    made = helper.make_node("If", ["c"], ["b"], then_branch=then, else_branch=other)
    yes = helper.make_tensor("c", TensorProto.BOOL, [], [True])
    inner = helper.make_function("f", "Inner", ["a"], ["b"], [helper.make_node("Constant", [], ["c"], value=yes), made],
                                 opsets)  # fmt: skip
    outer = helper.make_function("f", "Outer", ["a", "w"], ["d"], [helper.make_node("Inner", ["a"], ["b"], domain="f"),
                                 helper.make_node("MatMul", ["b", "w"], ["d"])], opsets)  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("Outer", ["x", "w"], ["y"], domain="f")], "g",
        [helper.make_tensor_value_info("x", 1, ["n", 3])], [helper.make_tensor_value_info("y", 1, None)],
        [helper.make_tensor("w", 1, [3, 2], [1.0] * 6)],
    )  # fmt: skip
    return helper.make_model(graph, functions=[inner, outer], opset_imports=opsets, ir_version=8)


# -- one change --------------------------------------------------------------------------------------------------------


def graphs(model: ModelProto) -> list[GraphProto]:
    """The main graph and all inside it."""
    found = [model.graph]
    for g in found:
        found += [a.g for n in g.node for a in n.attribute if a.type == AttributeProto.GRAPH]
    return found


def any_node(r: random.Random, model: ModelProto) -> NodeProto | None:
    """A node of any graph or function, None where there is none."""
    lists = [g.node for g in graphs(model) if g.node] + [f.node for f in model.functions if f.node]
    return r.choice(r.choice(lists)) if lists else None


def change_attribute(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    if not node.attribute:
        return
    a = r.choice(node.attribute)
    how = r.random()
    if how < 0.2:
        a.CopyFrom(helper.make_attribute(a.name, r.choice([1, 1.5, "x", [1, 2], [0.5], ["a"], [0] * 70])))
    elif how < 0.25:
        a.name = r.choice(["", "axis", "axes", "value", "body", "then_branch", "training_mode"])
    elif how < 0.3:
        a.type = r.choice(sorted(AttributeProto.AttributeType.values()))
    elif a.type == AttributeProto.INT:
        a.i = r.choice(ODD)
    elif a.type == AttributeProto.FLOAT:
        a.f = r.choice([-1.0, float("nan"), float("inf"), 1e30, 0.0])
    elif a.type == AttributeProto.INTS and len(a.ints):
        if r.random() < 0.7:
            a.ints[r.randrange(len(a.ints))] = r.choice(ODD)
        else:
            a.ints.append(r.choice(ODD))
    elif a.type == AttributeProto.STRING:
        a.s = r.choice([b"", b"SAME_UPPER", b"VALID", b"linear", b"\xff", b"ij,jk->ik", b"Relu", b"reverse", b"mean"])
    elif a.type == AttributeProto.TENSOR:
        change_tensor(r, a.t)
    else:
        node.attribute.remove(a)


def add_attribute(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    """One that the operator knows, with a value of its type that nobody expects."""
    if not onnx.defs.has(node.op_type):
        return
    known = onnx.defs.get_schema(node.op_type).attributes
    if not known:
        return
    name = r.choice(sorted(known))
    kind = getattr(known[name].type, "value", known[name].type)
    odd: dict[int, Any] = {1: r.choice([-1.0, 1e30]), 2: r.choice(ODD), 3: r.choice(["", "x", "reflect", "NOTSET"]),
                           6: [1e30], 7: [r.choice(ODD) for _ in range(r.randrange(6))], 8: ["Tanh", "x"]}  # fmt: skip
    kept = [a for a in node.attribute if a.name != name]
    if int(kind) in odd and (odd[int(kind)] != [] or not isinstance(odd[int(kind)], list)):
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, odd[int(kind)])])


def change_tensor(r: random.Random, t: TensorProto) -> None:
    how = r.random()
    if t.data_type in (TensorProto.INT64, TensorProto.INT32) and how < 0.6:
        try:
            array = onnx.numpy_helper.to_array(t).copy()
        except Exception:
            return
        if array.size:
            odd = [n for n in ODD if abs(n) < 2 ** (8 * array.itemsize - 1)]
            array.reshape(-1)[r.randrange(array.size)] = r.choice(odd)
        t.CopyFrom(onnx.numpy_helper.from_array(array, t.name))
    elif len(t.dims) and how < 0.7:
        t.dims[r.randrange(len(t.dims))] = r.choice(ODD)
    elif how < 0.75:
        t.dims.append(r.choice(ODD))
    elif how < 0.8:
        t.data_location = 1
        t.external_data.add(key="location", value=r.choice(["../x", "/etc/passwd", "", "damaged.onnx", "\0"]))
    elif how < 0.85 and t.raw_data:
        t.raw_data = t.raw_data[: r.randrange(len(t.raw_data))]
    else:
        t.data_type = r.randrange(30)


def change_weight(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    graph = r.choice(graphs(model))
    if not graph.initializer:
        return
    t = r.choice(graph.initializer)
    if r.random() < 0.2:  # a weight becomes an input, or both
        graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)))
        if r.random() < 0.5:
            graph.initializer.remove(t)
    else:
        change_tensor(r, t)


def change_input(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    graph = r.choice(graphs(model))
    infos = [*graph.input, *graph.value_info, *graph.output]
    if not infos:
        return
    v = r.choice(infos)
    dims, how = v.type.tensor_type.shape.dim, r.random()
    if len(dims) and how < 0.5:
        dims[r.randrange(len(dims))].dim_value = r.choice(ODD)
    elif how < 0.6:
        dims.add().dim_value = 3
    elif how < 0.7:
        v.type.tensor_type.elem_type = r.randrange(30)
    elif how < 0.8:
        v.ClearField("type")
    elif how < 0.9:
        graph.value_info.append(helper.make_tensor_value_info(r.choice(_names(model)), 1, [r.choice(ODD)]))
    elif len(dims):
        dims[r.randrange(len(dims))].dim_param = r.choice(["n", "", "batch", "1"])


def _names(model: ModelProto) -> list[str]:
    nodes = [n for g in graphs(model) for n in g.node] + [n for f in model.functions for n in f.node]
    return ["", *(name for n in nodes for name in (*n.input, *n.output))]


def change_wires(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    side = r.choice([node.input, node.input, node.output])
    how, names = r.random(), _names(model)
    if len(side) and how < 0.5:
        side[r.randrange(len(side))] = r.choice(names)
    elif len(side) and how < 0.75:
        del side[-1]
    else:
        side.append(r.choice(names))


def change_operator(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    if r.random() < 0.15:
        node.domain = r.choice(["", "ai.onnx", "ai.onnx.ml", "com.microsoft", "f", "odd"])
        return
    often = "If Loop Scan SequenceAt ConcatFromSequence LSTM Resize Einsum TopK Constant Range Tile Expand Attention"
    often += " RotaryEmbedding BatchNormalization Pad Slice Nothing ConstantOfShape RandomNormal EyeLike Split Reshape"
    node.op_type = r.choice(often.split()) if r.random() < 0.6 else r.choice(_all_operators())


@functools.cache
def _all_operators() -> list[str]:
    return sorted({s.name for s in onnx.defs.get_all_schemas()})


def change_name(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    """A value renamed everywhere, to something odd or to another value's name."""
    names = [n for n in _names(model) if n]
    if not names:
        return
    old, new = r.choice(names), r.choice([*NAMES, *names[:3]])
    for g in graphs(model):
        for n in g.node:
            n.input[:] = [new if i == old else i for i in n.input]
            n.output[:] = [new if o == old else o for o in n.output]
        for v in (*g.input, *g.output, *g.initializer):
            if v.name == old:
                v.name = new
    node.name = r.choice(NAMES)


def change_order(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    how = r.random()
    graph = r.choice(graphs(model))
    if how < 0.3 and model.opset_import:
        versions = [-1, 0, 6, 7, 9, 11, 13, 17, 18, 21, 28, 2**40]
        r.choice(model.opset_import).version = r.choice(versions)
    elif how < 0.4:
        model.opset_import.append(helper.make_opsetid(r.choice(["", "odd", "com.microsoft"]), r.choice([1, 18, 2**40])))
    elif how < 0.6 and graph.node:
        graph.node.remove(r.choice(graph.node))
    elif how < 0.75 and graph.node:
        graph.node.append(r.choice(graph.node))
    elif how < 0.85 and len(graph.node) > 1:
        i, j = r.randrange(len(graph.node)), r.randrange(len(graph.node))
        a, b = NodeProto(), NodeProto()
        a.CopyFrom(graph.node[i])
        b.CopyFrom(graph.node[j])
        graph.node[i].CopyFrom(b)
        graph.node[j].CopyFrom(a)
    elif graph.output:
        v = r.choice(graph.output)
        v.name = r.choice([*_names(model), *(i.name for i in graph.input), *(t.name for t in graph.initializer)])
    if model.functions and r.random() < 0.2:
        f = r.choice(model.functions)
        f.name = r.choice(["Inner", "Outer", "", "Relu"])


def change_size(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    """A size in all weights, inputs and lists at once, so that they still fit each other: 0 more often than others."""
    every = graphs(model)
    sizes = [d for g in every for t in g.initializer for d in t.dims]
    sizes += [d.dim_value for g in every for v in g.input for d in v.type.tensor_type.shape.dim if d.dim_value]
    if not sizes:
        return
    old, new = r.choice(sizes), r.choice([0, 0, 0, 1, 2, 5, 17])
    for g in every:
        for v in (*g.input, *g.output, *g.value_info):
            for d in v.type.tensor_type.shape.dim:
                if d.dim_value == old:
                    d.dim_value = new
        for t in g.initializer:
            if old in t.dims:
                _resize(t, [new if d == old else d for d in t.dims])


def _resize(t: TensorProto, shape: list[int]) -> None:
    try:
        array = onnx.numpy_helper.to_array(t)
        t.CopyFrom(onnx.numpy_helper.from_array(np.resize(array, shape), t.name))
    except Exception:  # damaged before
        return


def change_dtype(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    """An element type in all weights, inputs and casts at once."""
    every = graphs(model)
    known = [t.data_type for g in every for t in g.initializer]
    known += [v.type.tensor_type.elem_type for g in every for v in g.input]
    if not known:
        return
    old, new = r.choice(known), r.choice([1, 10, 11, 16, 2, 3, 4, 5, 6, 7, 9, 12, 13])
    for g in every:
        for v in (*g.input, *g.output, *g.value_info):
            if v.type.tensor_type.elem_type == old:
                v.type.tensor_type.elem_type = new
        for t in g.initializer:
            if t.data_type == old:
                _retype(t, new)
        for a in (a for n in g.node for a in n.attribute if a.name in ("to", "dtype") and a.i == old):
            a.i = new


def _retype(t: TensorProto, new: int) -> None:
    try:
        with np.errstate(all="ignore"):
            array = onnx.numpy_helper.to_array(t).astype(helper.tensor_dtype_to_np_dtype(new))
        t.CopyFrom(onnx.numpy_helper.from_array(array, t.name))
    except Exception:
        return


CHANGES: list[Callable[[random.Random, ModelProto, NodeProto], None]] = [
    change_attribute, change_attribute, change_attribute, add_attribute, change_weight, change_weight, change_input,
    change_wires, change_operator, change_order, change_name, change_size, change_size, change_dtype, change_dtype,
]  # fmt: skip


def damaged_model(r: random.Random, raw: bytes) -> bytes:
    """A model's file with one to three changes to the model."""
    model = ModelProto()
    model.ParseFromString(raw)
    for _ in range(r.randint(1, 3)):
        node = any_node(r, model)
        if node is not None:
            r.choice(CHANGES)(r, model, node)
    try:
        return model.SerializeToString()
    except Exception:  # a name that protobuf does not take
        return raw
