"""Trained models for inference: the model that was loaded, with what was trained, and with what was appended to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike

import numpy as np
import onnx

from ..boundary import as_path, as_program, as_texts
from ..errors import ModelError, UsageError
from ..importer.graphs import first_output, without_fields
from ..importer.mapped import referring
from ..importer.subgraph import scope_of
from ..importer.tensors import in_type_of, tensor_array
from ..language.arrays import Arrays
from ..language.ir import Value
from ..language.program import Program, Variable
from ..language.types import TensorType, dtype_name, dtype_to_onnx
from ..ops.shape.custom_gradient import DOMAIN
from ..support.memory import Contents, is_stored
from ..training.averages import applied
from ..training.state import contents
from .appended import appended_block, with_appended
from .compiled import SMALL_BYTES, all_tensors, listed, save_beside, take_in
from .function_builder import fill_tensor, value_info
from .inference import differs_in_training, in_inference, restricted
from .quantised import quantised, range_buffers

__all__ = ["export_trained"]


def export_trained(
    program: Program,
    path: str | PathLike[str] | None = None,
    *,
    outputs: Sequence[str | Variable] | None = None,
    averaged: bool = False,
) -> onnx.ModelProto:
    """The model from which the program was loaded, with the trained values, for inference in any runtime.

    It computes what `program.evaluate` does: batch normalisation with the running statistics, without dropout.
    Parameters and running statistics replace the initializers, Constant, ConstantOfShape or Identity nodes of the same
    name, coefficients the attributes of linear models.
    A program after `prepare_qat` becomes an 8-bit model, with QuantizeLinear and DequantizeLinear.
    Operators and parameters that were appended to the program (a new head) follow, in opset 21; losses do not.
    The result contains all tensors: external data of the original are read, never written.  (Those of a program with
    arrays on disk are referred to, as long as the program has them; a file that is written contains them.)

    `outputs`: names of outputs, also of inner values (default: the model's outputs, without the loss that was trained
    where there are others, and the new ones); what only other outputs need is left out.  `path`: the result is also
    saved there.  `averaged`: with the moving averages of the weights (`rc.ExponentialMovingAverage`).

    UsageError if the program was not loaded from a model, ModelError if the model lacks a trained parameter.
    """
    if averaged:
        with applied(program):
            return export_trained(program, path, outputs=outputs)
    original = as_program(program).source
    if original is None:
        raise UsageError("export_trained needs a program that load() read from an ONNX model; this one has no source")
    values = {v.name: v for v in (*program.block.parameters, *program.block.buffers)}
    new = appended_block(program)
    read = () if new is None else (v.name for op in new.operators for v in op.reads())
    names = values.keys() & set(read) - _holders(original.graph) | range_buffers(program.forward_block)
    updated = {v.name for op in program.block.operators if op.op.updates for v in op.writes()}
    tensors = {t.name: t for t in original.graph.initializer}
    trained = {n: v for n, v in values.items() if n not in names and (n in updated or _changed(program, v, tensors))}
    model = _with_trained(program, _with_places(original, set(trained)), trained)
    in_inference(model.graph)
    if new is not None:
        model = with_appended(model, program, new)
    model = quantised(model, program)
    wanted = None if outputs is None else as_texts(outputs, "outputs")
    restricted(model.graph, _outputs(program, model.graph) if wanted is None else wanted)
    _without_domain(model)
    if path is not None:
        external = [e.value for t in all_tensors(original.graph) for e in t.external_data if e.key == "location"]
        save_beside(model, as_path(path), keep=external)
    return model


def _without_domain(model: onnx.ModelProto) -> None:
    """Takes back that the model needs the domain "recompute".  UsageError where it does."""
    if left := {n.op_type for n in model.graph.node if n.domain == DOMAIN}:
        raise UsageError(f"ONNX has no {', '.join(sorted(left))}: outputs=[...] leaves out what is computed with it")
    for at in reversed([i for i, o in enumerate(model.opset_import) if o.domain == DOMAIN]):
        del model.opset_import[at]


def _outputs(program: Program, graph: onnx.GraphProto) -> list[str]:
    """All outputs but the loss that was trained, unless it is the only one."""
    names = [o.name for o in graph.output]
    return [n for n in names if n != program.loss] or names


def _changed(program: Program, v: Value, tensors: Mapping[str, onnx.TensorProto]) -> bool:
    """Whether contents may differ from the model's: parameters, and buffers that are not the file's."""
    if v in program.block.parameters:
        return True
    array = dict.get(program.data, v.name)
    if array is None or v.name not in tensors:
        return False
    return array.flags.writeable or not np.array_equal(array, tensor_array(tensors[v.name]))


def _with_places(source: onnx.ModelProto, trained: set[str]) -> onnx.ModelProto:
    """The model, with its functions inlined where they hold trained weights, or operators that differ in training.

    ModelError if it has no place for a trained value.
    """
    missing = trained - _holders(source.graph)
    if source.functions and (missing or any(differs_in_training(f.node) for f in source.functions)):
        from onnx import inliner

        source = inliner.inline_local_functions(without_fields(source))  # weights inside have their own names
        missing = trained - _holders(source.graph)
    if missing:
        raise ModelError(listed("the original model has no place for these trained values", sorted(missing)))
    return source


def _with_trained(program: Program, source: onnx.ModelProto, trained: dict[str, Value]) -> onnx.ModelProto:
    """The model with the program's contents of the `trained` values, all tensors inside."""
    model = without_fields(source, "graph")
    graph = model.graph
    graph.CopyFrom(without_fields(source.graph, "initializer", "node"))
    graph.node.extend(n for n in source.graph.node if not (_is_constant(n) and n.output[0] in trained))
    data, referred = program.data, None
    if isinstance(data, Arrays) and any(map(is_stored, dict.values(data))):  # there may be no room for copies
        data.referred = referred = dict(data.referred)
    old = {t.name: t for t in source.graph.initializer}
    for name, t in old.items():
        if name in trained:
            _fill(graph.initializer.add(), name, _checked(contents(program, trained[name]), t), referred)
        else:
            graph.initializer.append(t)
    declared = {i.name for i in graph.input}
    nested = {name: place for name, *place in _nested(graph)}
    attributes = _attributes(graph)
    for name, v in trained.items():
        if name in attributes:
            numbers = contents(program, v).astype(np.float32).reshape(-1).tolist()
            attributes[name].floats[: len(numbers)] = numbers
        elif name in nested:
            _replace_nested(contents(program, v), *nested[name])
        elif name not in old:
            _fill(graph.initializer.add(), name, contents(program, v), referred)
            if source.ir_version < 4 and name not in declared:  # until IR 3 every initializer is an input too
                graph.input.append(value_info(name, v.type))
    take_in(graph)
    return model


def _fill(t: onnx.TensorProto, name: str, array: np.ndarray, referred: dict[str, Contents] | None) -> None:
    """Writes an array into an empty tensor; with `referred`, a reference to one that is not small, which it takes."""
    if referred is None or array.nbytes <= SMALL_BYTES:  # files of models have those inside
        fill_tensor(t, name, array)
        return
    held = referred[name] = getattr(array, "contents", None) or Contents(array, name, stays=True)
    kind = onnx.TensorProto(name=name, data_type=dtype_to_onnx(dtype_name(array.dtype)), dims=array.shape)
    t.CopyFrom(referring(kind, held.location, 0, array.nbytes))


def _holders(graph: onnx.GraphProto) -> set[str]:
    """The weights of the graph by name; copies of weights by Identity are separate weights."""
    holders = {t.name for t in graph.initializer}.union(n.output[0] for n in graph.node if _is_constant(n))
    return holders.union((name for name, _, _ in _nested(graph)), _attributes(graph))


def _attributes(graph: onnx.GraphProto) -> dict[str, onnx.AttributeProto]:
    """The attributes of linear models (ai.onnx.ml) that are weights, by their names here (`Body.weight`)."""
    return {
        f"{n.output[-1]}/{a.name}": a
        for n in graph.node
        if n.domain == "ai.onnx.ml" and n.op_type in ("LinearClassifier", "LinearRegressor")
        for a in n.attribute
        if a.name in ("coefficients", "intercepts")
    }


def _nested(
    graph: onnx.GraphProto, scope: str = ""
) -> Iterator[tuple[str, onnx.TensorProto | onnx.NodeProto, onnx.GraphProto]]:
    """The weights of subgraphs: the imported name, the initializer or constant node, its graph."""
    for node in graph.node:
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                here = scope_of(f"{scope}{first_output(node)}", a.name) + "/"
                yield from ((here + t.name, t, a.g) for t in a.g.initializer)
                yield from ((here + n.output[0], n, a.g) for n in a.g.node if _is_constant(n))
                yield from _nested(a.g, here)


def _replace_nested(array: np.ndarray, held: onnx.TensorProto | onnx.NodeProto, graph: onnx.GraphProto) -> None:
    """Replaces the contents of a subgraph's initializer or constant node."""
    if isinstance(held, onnx.TensorProto):
        fresh = onnx.TensorProto()
        fill_tensor(fresh, held.name, _checked(array, held))
        held.CopyFrom(fresh)
    else:
        fill_tensor(graph.initializer.add(), held.output[0], array)
        graph.node.remove(held)


def _is_constant(node: onnx.NodeProto) -> bool:
    return (
        node.op_type in ("Constant", "ConstantOfShape", "Identity")
        and node.domain in ("", "ai.onnx")
        and len(node.output) == 1
    )


def _checked(array: np.ndarray, t: onnx.TensorProto) -> np.ndarray:
    array = in_type_of(array, t)
    if tuple(t.dims) != array.shape or t.data_type != dtype_to_onnx(TensorType.of(array).dtype):
        raise ModelError(
            f"'{t.name}' is {TensorType.of(array)} in the program, but {list(t.dims)} in the original model"
        )
    return array
