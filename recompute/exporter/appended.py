"""Operators that were appended to a loaded program (a new head), as nodes behind those of its model."""

from __future__ import annotations

import onnx
from onnx import helper

from ..errors import ModelError
from ..importer.convert import raised
from ..importer.model import main_opset
from ..language.builder import Names
from ..language.ir import Block, Role, leading_to
from ..language.program import Program
from ..passes.cleanup.for_test import ForTest
from ..training.state import contents
from .compiled import listed
from .function_builder import OPSET, FunctionBuilder, fill_tensor, tensor_of, type_proto
from .quantised import unquantised


def appended_block(program: Program) -> Block | None:
    """The appended operators in inference mode that the program's new outputs need, as a block of these outputs; losses
    are not among them.  None if there are none."""
    if program.imported is None:
        return None
    block = unquantised(program.forward_block)
    there = program.imported.values()
    outputs = [
        v
        for op in block.operators
        if op.role is Role.FORWARD
        for v in op.writes()
        if v.name in block.outputs and v.name not in there
    ]
    if not outputs:
        return None
    forward = ForTest(tuple(v.name for v in outputs)).run(block)
    new = [op for op in forward.operators if all(v.name not in there for v in op.writes())]
    return forward.with_operators(leading_to(new, outputs))


def with_appended(model: onnx.ModelProto, program: Program, new: Block) -> onnx.ModelProto:
    """The model with further operators, their parameters and their outputs; in opset 21.

    ModelError where they read what the model does not compute under that name.
    """
    model = raised(model, OPSET) if main_opset(model) < OPSET else model
    graph = model.graph
    written = {v.name for op in new.operators for v in op.writes()}
    reads = {v.name: v for op in new.operators for v in op.reads() if v.name not in written}
    there = _names(graph)
    constants = {c.value.name: c for c in new.constants}
    for name, v in reads.items():
        if name in there:
            continue
        if name in constants:
            graph.initializer.append(tensor_of(name, constants[name].numpy()))
        elif v in (*program.block.parameters, *program.block.buffers):
            fill_tensor(graph.initializer.add(), name, contents(program, v))
    missing = sorted(set(reads) - _names(graph))
    if missing:
        raise ModelError(listed("appended operators read values that the original model does not have", missing))
    builder = FunctionBuilder(
        Names(_names(graph) | written), {v.name: v.type for op in new.operators for v in op.reads()}
    )
    for op in new.operators:
        builder.prefix = next(op.writes()).name
        ins, outs = (["" if v is None else v.name for v in vs] for vs in (op.inputs, op.outputs))
        x, y = op.inputs[0] if op.inputs else None, op.outputs[0]
        if op.op.name == "Reshape" and x is not None and y is not None and x.shape[:1] == y.shape[:1] == (new.batch,):
            builder.node("Reshape", [ins[0], builder.ints((0, *y.shape[1:]))], outs)  # 0: any batch
        else:
            builder.apply(op.op, ins, outs)
    graph.node.extend(builder.nodes)
    _declare_outputs(graph, new)
    return model


def _names(graph: onnx.GraphProto) -> set[str]:
    """All values of a graph."""
    names = {t.name for t in graph.initializer} | {i.name for i in graph.input}
    return names.union(o for n in graph.node for o in n.output)


def _declare_outputs(graph: onnx.GraphProto, new: Block) -> None:
    """The program's new outputs become the graph's, their first dimension dynamic where the first input's is."""
    first = next((i.type.tensor_type.shape.dim for i in graph.input if i.type.tensor_type.shape.dim), None)
    for v in (v for op in new.operators for v in op.writes() if v.name in new.outputs):
        dims: list[int | str] = list(v.shape)
        if dims and first is not None and not first[0].HasField("dim_value") and dims[0] == new.batch:
            dims[0] = first[0].dim_param or "N"
        kind = type_proto(v.type).tensor_type.elem_type
        graph.output.append(helper.make_tensor_value_info(v.name, kind, dims))
