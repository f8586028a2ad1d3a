"""Models that are edited: a file, a ModelProto or a program goes in, and the same kind comes out.

Edits are made in the ONNX model, so that an edited model can be saved, loaded at any batch, planned and exported like
every other.  A program is edited through the model that it was loaded from, and loaded again.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Concatenate, ParamSpec, Protocol, overload

import numpy as np
import onnx
from onnx import helper

from ..errors import ModelWarning, UsageError, expect, nearest
from ..exporter.compiled import take_in
from ..exporter.function_builder import fill_tensor, set_metadata, tensor_of
from ..importer.convert import prepare
from ..importer.graphs import names_read, without_fields
from ..importer.load import load
from ..importer.model import main_opset, read_model
from ..importer.tensors import in_type_of, tensor_array
from ..importer.trained import FROZEN, TRAINABLE, said_to_train
from ..language.program import Program
from ..language.types import DTYPES, dtype_from_onnx
from ..training.programs import must_be_untrained
from .shapes import inferred

File = str | PathLike[str] | onnx.ModelProto
#: types of models that can be edited
Model = File | Program
P = ParamSpec("P")
#: initializers up to this size may define shapes
_SMALL_BYTES = 1024
#: the first opset in which edits write their nodes; older models are converted
_OLDEST = 9


class Editing(Protocol[P]):
    """An edit of a program or a model: it returns another, of the same kind."""

    @overload
    def __call__(self, model: Program, /, *args: P.args, **kwargs: P.kwargs) -> Program: ...
    @overload
    def __call__(self, model: File, /, *args: P.args, **kwargs: P.kwargs) -> onnx.ModelProto: ...


def edits(function: Callable[Concatenate[Graph, P], None], oldest: int = _OLDEST) -> Editing[P]:
    """Makes a function that changes a Graph one that takes a path, a ModelProto or a Program, which it leaves as it is,
    and returns a ModelProto, or a new Program for a Program.  Models of opsets before `oldest` are converted."""

    @functools.wraps(function)
    def edit(model: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        graph = Graph(model_of(model, oldest))
        function(graph, *args, **kwargs)
        edited = graph.finish()
        return loaded_again(model, edited) if isinstance(model, Program) else edited

    return edit


#: nodes that are inserted, by the identity of another node
Added = Mapping[int, Sequence[onnx.NodeProto]]


class Reading:
    """Which nodes read and write values; called with a name: the nodes that read it.  UsageError if a subgraph does."""

    def __init__(self, nodes: Sequence[onnx.NodeProto]) -> None:
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        self._makers = {o: n for n in nodes for o in n.output if o}
        self._inside: set[str] = set()
        for n in nodes:
            names = dict.fromkeys(n.input)
            for name in names:
                self._readers.setdefault(name, []).append(n)
            if n.attribute:
                self._inside.update(name for name in names_read([n]) if name not in names)

    def __call__(self, name: str) -> list[onnx.NodeProto]:
        if name in self._inside:
            raise UsageError(f"'{name}' is read inside an If, Loop or Scan, where it cannot be edited")
        return self._readers.get(name, [])

    def maker(self, name: str) -> onnx.NodeProto | None:
        """The node that writes a value."""
        return self._makers.get(name)


class Graph:
    """The graph of a model while it is edited; `nodes` are its own."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.refresh()
        self._there = self._values()

    def refresh(self) -> None:
        """Reads the model's graph again, after it was changed itself."""
        model = self.model
        self.nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in model.graph.node]
        self.tensors = {t.name: t for t in model.graph.initializer}
        self._taken = {*self.tensors, *(i.name for i in model.graph.input), *names_read(self.nodes)}
        self._taken.update(o for n in self.nodes for o in n.output)

    def finish(self) -> onnx.ModelProto:
        """The edited model."""
        del self.model.graph.node[:]
        self.model.graph.node.extend(self.nodes)
        wanted = said_to_train(self.model)
        if wanted is not None:  # names that are gone would be an error when it is loaded
            gone = self._there - self._values()
            self.set_trained([n for n in wanted if n not in gone])
        return self.model

    def _values(self) -> set[str]:
        return {*self.tensors, *(o for n in self.nodes for o in n.output)}

    # -- values -----------------------------------------------------------------------------------------------

    def makers(self) -> dict[str, onnx.NodeProto]:
        """Value → the node that writes it."""
        return {o: n for n in self.nodes for o in n.output if o}

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """Nodes that read a value themselves.  UsageError if a subgraph does."""
        return self.reading()(name)

    def reading(self) -> Reading:
        """`readers` of the graph as it is now, for many values."""
        return Reading(self.nodes)

    def fresh(self, wish: str) -> str:
        """`wish`, or `wish_1`, `wish_2`, ... where the graph has a value of that name; it is then taken."""
        name, i = expect("name", wish, str, "the name of a value"), 0
        while name in self._taken:
            i += 1
            name = f"{wish}_{i}"
        self._taken.add(name)
        return name

    def known(self, name: str) -> None:
        """UsageError unless the graph has a value of this name."""
        if expect("a value", name, str, "a name") not in self._taken:
            raise UsageError(f"the model has no value '{name}'{nearest(name, self._taken)}")

    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return [o.name for o in self.model.graph.output]

    def constant(self, name: str) -> np.ndarray | None:
        """The contents of an initializer or a Constant node; None for anything else."""
        if name in self.tensors:
            return tensor_array(self.tensors[name])
        node = self.makers().get(name)
        if node is not None and node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            return tensor_array(node.attribute[0].t)
        return None

    def constant_matrix(self, name: str) -> np.ndarray:
        """The contents of a weight: of an initializer, a Constant or a fill, or dequantised.  UsageError for others."""
        matrix = self.constant(name)
        node = self.makers().get(name) if matrix is None else None
        if node is not None and node.op_type == "ConstantOfShape":
            shape = self.constant(node.input[0])
            value = onnx.numpy_helper.to_array(node.attribute[0].t) if node.attribute else np.zeros(1, np.float32)
            matrix = None if shape is None else np.full(tuple(shape.tolist()), value[0], value.dtype)
        elif node is not None and node.op_type == "DequantizeLinear":
            codes, scale = self.constant(node.input[0]), self.constant(node.input[1])
            if codes is not None and scale is not None and len(node.input) == 2:
                axis = next((a.i for a in node.attribute if a.name == "axis"), 1) % codes.ndim
                each = [-1 if i == axis else 1 for i in range(codes.ndim)]
                matrix = codes.astype(scale.dtype) * (scale.reshape(each) if scale.ndim else scale)
        elif node is not None and node.op_type in ("Cast", "Sub", "Mul"):
            matrix = self._cast(node)
        if matrix is None:
            raise UsageError(f"the contents of '{name}' are not in the model")
        return matrix

    def _cast(self, node: onnx.NodeProto) -> np.ndarray | None:
        """A node's result from integers, a zero point and a scale; None if it reads anything else."""
        ins = []
        for name in node.input:
            maker = self.makers().get(name)
            array = self.constant(name)
            if array is None and maker is not None and maker.op_type in ("Cast", "Sub"):
                array = self._cast(maker)
            if array is None:
                return None
            ins.append(array)
        if node.op_type == "Cast":
            return ins[0].astype(DTYPES[dtype_from_onnx(node.attribute[0].i) or "f32"])
        return ins[0] - ins[1] if node.op_type == "Sub" else ins[0] * ins[1]

    def places(self) -> dict[int, int]:
        """The positions of nodes, by their identity."""
        return {id(n): i for i, n in enumerate(self.nodes)}

    def insert(self, before: Added, after: Added | None = None) -> None:
        """Inserts nodes before and behind others, which are named by their identity."""
        after = after or {}
        self.nodes = [m for n in self.nodes for m in (*before.get(id(n), ()), n, *after.get(id(n), ()))]

    def place_of(self, value: str) -> int:
        """The position of the node that writes a value; -1 for inputs and initializers."""
        return next((i for i, n in enumerate(self.nodes) if value in n.output), -1)

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators."""
        return main_opset(self.model)

    def add_tensor(self, name: str, array: np.ndarray) -> None:
        """Adds an initializer of a fresh name."""
        fill_tensor(self.model.graph.initializer.add(), name, array)
        self.tensors[name] = self.model.graph.initializer[-1]

    def remove_tensors(self, names: Collection[str]) -> None:
        """Removes initializers, and their declarations as inputs in old models."""
        for field in (self.model.graph.initializer, self.model.graph.input, self.model.graph.value_info):
            for i in [i for i, t in enumerate(field) if t.name in names][::-1]:
                del field[i]
        self.tensors = {t.name: t for t in self.model.graph.initializer}

    def drop_unread(self, names: Iterable[str]) -> None:
        """Removes those of the named initializers and constant nodes that nothing reads any more."""
        read = set(names_read(self.nodes)) | set(self.outputs())
        gone = {n for n in names if n not in read}
        self.nodes = [n for n in self.nodes if not (len(n.output) == 1 and n.output[0] in gone and not n.input)]
        initializers = self.model.graph.initializer
        for i in [i for i, t in enumerate(initializers) if t.name in gone][::-1]:
            del initializers[i]
        self.tensors = {t.name: t for t in initializers}

    def drop(self, names: Iterable[str]) -> None:
        """Removes those of the named values that nothing reads any more, and what makes them; the names are free again.

        For constants, and what is computed of them.
        """
        makers, left = self.makers(), list(names)
        while left:
            name = left.pop()
            if name in names_read(self.nodes) or name in self.outputs():
                continue
            self.remove_tensors([name])  # and the declaration of what a Constant node makes
            if name in makers:
                self.nodes = [n for n in self.nodes if n is not makers[name]]
                left += makers[name].input
            self._taken.discard(name)

    def type_of(self, name: str) -> tuple[str | None, list[int | None]] | None:
        """The element type and the dimensions (None: dynamic) of a value, by ONNX's type inference; None if unknown."""
        info = self.info(name)
        if info is None or not info.type.tensor_type.HasField("shape"):
            return None
        t = info.type.tensor_type
        return dtype_from_onnx(t.elem_type), [d.dim_value if d.HasField("dim_value") else None for d in t.shape.dim]

    def info(self, name: str) -> onnx.ValueInfoProto | None:
        """The declaration of a value, inferred where the file has none."""
        light = onnx.ModelProto(ir_version=max(self.model.ir_version, 4))
        light.opset_import.extend(self.model.opset_import)
        graph = light.graph
        graph.name = "types"
        declared = {i.name for i in self.model.graph.input}
        graph.input.extend(self.model.graph.input)
        graph.output.extend(self.model.graph.output)
        graph.value_info.extend(v for v in self.model.graph.value_info if v.HasField("type"))
        graph.node.extend(self.nodes)
        for t in self.model.graph.initializer:
            if len(t.raw_data) + 8 * len(t.int64_data) <= _SMALL_BYTES and not t.external_data:
                graph.initializer.append(t)
            elif t.name not in declared:
                graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)))
        return inferred(light, name)

    # -- metadata ---------------------------------------------------------------------------------------------

    def said(self, key: str) -> Any:
        """An entry of the model's metadata, parsed as JSON; None where there is none."""
        text = next((p.value for p in self.model.metadata_props if p.key == key), None)
        return None if text is None else json.loads(text)

    def say(self, key: str, value: Any) -> None:
        """Sets an entry of the model's metadata; None removes it."""
        if value is not None:
            set_metadata(self.model, {key: json.dumps(value)})
            return
        kept = [p for p in self.model.metadata_props if p.key != key]
        del self.model.metadata_props[:]
        self.model.metadata_props.extend(kept)

    def set_trained(self, names: Iterable[str] | None) -> None:
        """Says in the file what trains (None: what would without this)."""
        self.say(TRAINABLE, None if names is None else list(dict.fromkeys(names)))

    def freeze(self, names: Sequence[str]) -> None:
        """Says in the file that tensors are not trained unless they are named."""
        self.say(FROZEN, [*(self.said(FROZEN) or ()), *names])
        before = said_to_train(self.model)
        if before is not None:
            self.set_trained([n for n in before if n not in names])

    def unfreeze(self, names: Iterable[str]) -> None:
        """Takes tensors from those that the file says are not trained."""
        gone = {*names, *(self._there - self._values())}
        frozen = self.said(FROZEN)
        if frozen is not None:
            self.say(FROZEN, [n for n in frozen if n not in gone] or None)

    def also_trained(self, names: Iterable[str]) -> None:
        """Adds to what the file says that trains, if it says so."""
        before = said_to_train(self.model)
        if before is not None:
            self.set_trained([*before, *names])


# -- what goes in, and what comes out -------------------------------------------------------------------------------


def model_of(model: Model, oldest: int = _OLDEST) -> onnx.ModelProto:
    """An own copy of a model, without functions and in opset `oldest` or later; of a program its model with its
    contents.

    Of a file all tensors are in it, those of other files too.
    """
    source = source_of(model) if isinstance(model, Program) else read_model(model)
    prepared = prepare(source, oldest=oldest)
    copy = onnx.ModelProto()
    copy.CopyFrom(prepared)
    copy.ir_version = max(copy.ir_version, 4)  # up to 3 every tensor is an input, too
    if prepared is not source:
        for field in ("metadata_props", "doc_string", "producer_name"):
            copy.MergeFrom(_only(source, field))
        copy.graph.metadata_props.extend(source.graph.metadata_props)
        there = {v.name for v in copy.graph.value_info}
        copy.graph.value_info.extend(v for v in source.graph.value_info if v.name not in there and v.metadata_props)
    if not isinstance(model, Program):
        take_in(copy.graph)
    else:
        set_metadata(copy, {TRAINABLE: json.dumps([v.name for v in model.block.parameters])})
    return copy


def _only(message: onnx.ModelProto, field: str) -> onnx.ModelProto:
    others = [f.name for f, _ in message.ListFields() if f.name != field]
    return without_fields(message, *others)


def source_of(program: Program) -> onnx.ModelProto:
    """The model that a program was loaded from, with the arrays that the program has changed since."""
    if program.source is None or program.imported is None:
        raise UsageError(
            f"program '{program.block.name}' was not loaded from an ONNX model, so that there is no model to edit"
        )
    must_be_untrained(program)
    if program.block.operators != program.imported.operators:
        raise UsageError(
            f"operators were appended to program '{program.block.name}', or changed: edit it right after it is loaded, "
            "before losses and freeze(eval=True)"
        )
    changed = _changed(program)
    tensors = [t for t in program.source.graph.initializer if t.name in changed]
    if not tensors:
        return program.source
    model = without_fields(program.source, "graph")
    model.graph.CopyFrom(without_fields(program.source.graph, "initializer"))
    for t in program.source.graph.initializer:
        same = t.name not in changed or tuple(t.dims) != changed[t.name].shape
        model.graph.initializer.append(t if same else tensor_of(t.name, in_type_of(changed[t.name], t)))
    return model


def _changed(program: Program) -> dict[str, np.ndarray]:
    """Arrays of parameters and buffers that may differ from the model's: those loaded are read-only."""
    names = [v.name for v in (*program.block.parameters, *program.block.buffers)]
    return {n: program.data[n] for n in names if n in program.data and program.data[n].flags.writeable}


def loaded_again(program: Program, edited: onnx.ModelProto, arrays: Mapping[str, np.ndarray] | None = None) -> Program:
    """The program of an edited model, loaded by the same options and at the same shapes, with the same contents."""
    there = {i.name for i in edited.graph.input}
    shapes: dict[str, Sequence[int]] = {v.name: v.shape for v in program.block.inputs if v.name in there}
    with warnings.catch_warnings():  # told at the first load
        warnings.simplefilter("ignore", ModelWarning)
        other = load(edited, input_shapes=shapes, **{**program.loaded, "trainable": None})
    for name, array in {**_changed(program), **(arrays or {})}.items():
        value = dict.get(other.data, name)
        if value is not None and (value.shape, value.dtype) == (array.shape, array.dtype):
            other.data[name] = array.copy()
    other.fuse_attention, other.fuse_head = program.fuse_attention, program.fuse_head
    other.aliases = {**{a: n for a, n in program.aliases.items() if n in other.data}, **other.aliases}
    other.source_path = program.source_path
    return other
