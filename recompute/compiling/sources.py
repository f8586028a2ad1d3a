"""Where models come from: files, networks of the zoo, programs; each gives its forward pass at any batch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx

from .. import models
from ..errors import UsageError, expect, nearest
from ..importer import load as onnx_import
from ..importer.convert import prepare
from ..importer.model import open_dimensions, read_model, symbol
from ..language.ir import Role
from ..language.program import Program
from ..models.common import parameters

#: the default batch of a model with a dynamic batch dimension
DEFAULT_BATCH = 32
#: initializers larger than this are replaced by fills
_SMALL_BYTES = 1024

Model = str | os.PathLike[str] | onnx.ModelProto | Program


@dataclass(frozen=True)
class Loading:
    """How a model is loaded, its batch and shapes aside: the same for an estimate and for the step that runs.

    The options of `load`, and `freeze`: names or globs of parameters that do not train (`Program.freeze`, with `eval`);
    `weights`: with their contents (figures need none); `again`: a network of the zoo whose batch stays open, so that
    its program can be made at others (`Program.again`).  `edit`: what a loaded program becomes.
    """

    trainable: str | Sequence[str] | None = None
    freeze: str | Sequence[str] | None = None
    unroll: bool | Sequence[str] = False
    seed: int = 0
    max_seconds: float | None = None
    max_bytes: int | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    set: Mapping[str, Any] = field(default_factory=dict)
    weights: bool = False
    init: str | None = None
    quantization: str | None = None
    again: bool = False
    edit: Callable[[Program], Program] | None = None

    def read(self, model: Any, trainable: Sequence[str] | None = None, **more: Any) -> Program:
        """The program, with nothing frozen.  `trainable`: in place of this one's; `more`: of `load`."""
        wanted = [self.trainable] if isinstance(self.trainable, str) else self.trainable
        more |= {"unroll": self.unroll, "seed": self.seed}
        more |= {"max_seconds": self.max_seconds, "max_bytes": self.max_bytes}
        more |= {"dims": self.dims, "set": self.set, "init": self.init}
        more |= {"quantization": self.quantization}
        program = onnx_import.load(model, trainable=trainable or wanted, **more)
        return program if self.edit is None else self.edit(program)

    def frozen(self, program: Program) -> Program:
        """The program without what does not train."""
        return program if self.freeze is None else program.freeze(self.freeze, eval=True)


def with_dims(fields: dict[str, Any]) -> Loading:
    """How a model is loaded with the sizes of open dimensions that a function's `fields` have, which lose them."""
    dims = fields.pop("dims", None)
    return Loading(dims=expect("dims", {} if dims is None else dims, Mapping, "a mapping of names to sizes"))


class Source:
    """A model that gives its forward pass at a batch.

    `fixed`: its only batch, None if the batch is dynamic; `default`: the one that is taken where nobody says it.
    `specs`: what its inputs mean, where that is known (`models.common.Spec`); `what`: a line about it.
    """

    name = what = "the model"
    fixed: int | None = None
    default = DEFAULT_BATCH
    is_step = False
    specs: Mapping[str, Any] = MappingProxyType({})
    loading = Loading()

    def whole(self, batch: int) -> Program:
        """A new program at a batch, with nothing frozen."""
        raise NotImplementedError

    def open(self, batch: int) -> None:
        """Makes a batch that the model fixes one that can be chosen.  UsageError where the model's batch is fixed."""
        raise UsageError(
            f"{self.name} fixes its batch at {self.fixed}: it cannot be compiled for {batch}. Give a model whose first "
            f"dimension is dynamic, such as what rc.export_trained(rc.load(..., batch={batch}), 'open.onnx') writes"
        )

    def at(self, batch: int) -> Program:
        """A new program at a batch."""
        return self.loading.frozen(self.whole(batch))


def source_of(
    model: Model, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any], loading: Loading
) -> Source:
    """The source of a model.  UsageError for options that do not apply to it."""
    wanted = "a path, the name of a network, an ONNX model or a Program"
    expect("model", model, (str, os.PathLike, onnx.ModelProto, Program), wanted)
    if isinstance(model, Program):
        if shapes or options or loading != Loading():
            raise UsageError("a Program is loaded already: give shapes, options and what trains to rc.load")
        return _Given(model)
    if isinstance(model, str) and not Path(model).is_file() and model in models.names():
        if shapes:
            raise UsageError(f"input shapes belong to a file: '{model}' is a network of the zoo, which has options")
        return _Zoo(model, options, loading)
    if options:
        raise UsageError("options (--option) apply only to networks of the zoo")
    if isinstance(model, str) and not Path(model).exists():
        raise UsageError(f"'{model}' is neither a file nor a network of the zoo{nearest(model, models.names())}")
    return _File(model, shapes, loading)


class _Zoo(Source):
    """Source of a zoo network."""

    def __init__(self, name: str, options: Mapping[str, Any], loading: Loading) -> None:
        self.name, self._options, self.loading = name, dict(options), loading
        try:
            entry = models.info(name, **self._options)
        except ValueError as e:
            raise UsageError(str(e)) from None
        self.default, self.what = entry.default_batch, f"building {name}: {entry.description}"
        self.specs = {s.name: s for s in (*entry.inputs, *((entry.label,) if entry.label else ()))}

    def whole(self, batch: int) -> Program:
        again, trains = self.loading.again, None
        fixed = None if again else batch
        try:
            if self.loading.weights:
                model = models.build(self.name, batch=fixed, seed=self.loading.seed, **self._options)
            else:
                model = weightless(self.name, fixed, self._options)
                trains = list(parameters(model)) if self.loading.trainable is None else None
        except ValueError as e:
            raise UsageError(str(e)) from None
        return self.loading.read(model, trains, batch=batch if again else None)


def weightless(name: str, batch: int | None, options: Mapping[str, Any]) -> onnx.ModelProto:
    """A zoo network whose large parameters are fills.  Small ones stay initializers, because the importer treats a
    small fill as a constant."""
    model = models.build(name, batch=batch, weights=False, **options)
    shapes = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        size = math.prod(shapes[node.input[0]].tolist()) if node.op_type == "ConstantOfShape" else _SMALL_BYTES
        if size * 4 <= _SMALL_BYTES:
            zeros = np.zeros(shapes[node.input[0]].tolist(), np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(zeros, node.output[0]))
        else:
            model.graph.node.append(node)
    return model


class _File(Source):
    """Source of a path or ModelProto.  Without contents it is read once, and trained ones are not kept after that."""

    def __init__(self, model: Any, shapes: Mapping[str, Sequence[int]], loading: Loading) -> None:
        self.name = "the model" if isinstance(model, onnx.ModelProto) else str(model)
        proto = read_model(model, max_bytes=loading.max_bytes)
        self._axes = _batch_axes(proto.graph, shapes, loading)
        self._shapes = {n: tuple(s) for n, s in shapes.items()}
        sizes = {s[0] for n, s in self._shapes.items() if n in self._axes and s}
        if not self._axes or len(sizes) > 1:
            first = _first_shape(proto.graph, self._shapes, loading.dims)
            self.fixed = self.default = first[0] if first else 1
        elif len(sizes) == 1:
            self.default = sizes.pop()
        self.loading, self._model, self._given = loading, model, model
        self._trains: list[str] | None = None
        if not loading.weights:
            self._take(proto)

    def _take(self, proto: onnx.ModelProto) -> None:
        """Reads a model without the contents of what trains."""
        self._model = prepare(proto)
        if self.loading.edit is None:
            program = self.whole(self.default)
            self._trains = [v.name for v in program.block.parameters] or None
            self._model = without_contents(self._model, {v.name for v in program.block.parameters})

    def open(self, batch: int) -> None:
        """The file as `load` opens it for a batch, after a check on samples, which needs the weights."""
        if self._shapes:
            super().open(batch)
        plain = Loading(max_seconds=self.loading.max_seconds, max_bytes=self.loading.max_bytes, dims=self.loading.dims,
                        set=self.loading.set)  # fmt: skip
        opened = plain.read(self._given, batch=batch).source
        assert opened is not None
        self._axes, self.fixed = _batch_axes(opened.graph, {}, self.loading), None
        self._model = opened
        if not self.loading.weights:
            self._take(opened)

    def whole(self, batch: int) -> Program:
        is_open = self._axes if self.fixed is None else ()
        shapes = {n: (batch, *s[1:]) if n in is_open and s else s for n, s in self._shapes.items()}
        wanted = None if batch == self.fixed else batch
        return self.loading.read(self._model, self._trains, batch=wanted, input_shapes=shapes)


def _batch_axes(graph: onnx.GraphProto, shapes: Mapping[str, Sequence[int]], loading: Loading) -> set[str]:
    """Inputs whose first dimension is the dynamic batch."""
    dims = {i.name: i.type.tensor_type.shape.dim for i in graph.input}
    axes = {n for n, axis in open_dimensions(graph) if axis == 0 and n not in loading.set}
    return {n for n in axes if not {symbol(dims[n][0]), f"{n}.0"} & set(loading.dims)}


def _first_shape(
    graph: onnx.GraphProto, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    weights = {t.name for t in graph.initializer}
    for i in graph.input:
        if i.name not in weights:
            dims = enumerate(i.type.tensor_type.shape.dim)
            known = (sizes.get(symbol(d), sizes.get(f"{i.name}.{axis}", d.dim_value)) for axis, d in dims)
            return shapes.get(i.name) or tuple(known)
    return ()


def without_contents(model: onnx.ModelProto, names: set[str]) -> onnx.ModelProto:
    """The model (opset ≥ 9) with fills in place of the large initializers in `names`: same program, no weights."""
    light = onnx.ModelProto(ir_version=model.ir_version)
    light.opset_import.extend(model.opset_import)
    light.metadata_props.extend(model.metadata_props)
    graph = light.graph
    graph.name = model.graph.name
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    taken = {t.name for t in model.graph.initializer}
    for t in model.graph.initializer:
        if t.name not in names or (t.ByteSize() <= _SMALL_BYTES and t.data_location != onnx.TensorProto.EXTERNAL):
            graph.initializer.append(t)
            continue
        shape = f"{t.name}.shape"
        while shape in taken:
            shape += "_"
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(t.dims, np.int64), shape))
        fill = onnx.helper.make_tensor("value", t.data_type, [1], [0])
        graph.node.append(onnx.helper.make_node("ConstantOfShape", [shape], [t.name], name=t.name, value=fill))
    left = {t.name for t in graph.initializer}
    declared = [i for i in graph.input if i.name in taken and i.name not in left]
    for i in declared:  # old models declare their initializers as inputs too
        graph.input.remove(i)
    graph.node.extend(model.graph.node)
    return light


class _Given(Source):
    """Source of a Program; for another batch it is made again (`Program.again`)."""

    def __init__(self, program: Program) -> None:
        self.name = f"program '{program.block.name}'"
        self._program = program
        self.is_step = any(op.role is Role.OPTIMIZE for op in program.operators)
        self.default = 1 if program.block.batch is None else program.block.batch
        if self.is_step or program.again is None or not _has_open_batch(program):
            self.fixed = self.default

    def whole(self, batch: int) -> Program:
        if batch != self.default:
            assert self._program.again is not None
            return with_contents(self._program.again(batch), self._program)
        p = self._program
        same = Program(p.block, dict(p.data), source=p.source)
        same.take_origin(p)
        same.plan, same.compiled = p.plan, p.compiled
        return same


def with_contents(other: Program, program: Program) -> Program:
    """A program made again, with what the parameters and buffers of its model hold by now; tables depend on sizes."""
    model = {t.name for t in program.source.graph.initializer} if program.source is not None else set()
    for name in model.union(v.name for v in program.block.parameters) & other.data.keys() & program.data.keys():
        array, there = other.data[name], program.data[name]
        if (array.shape, array.dtype) == (there.shape, there.dtype):
            other.data[name] = there
    return other


def _has_open_batch(program: Program) -> bool:
    """Whether the first dimension of an input is dynamic in the program's model."""
    names = {v.name for v in program.block.inputs}
    return program.source is not None and any(n in names and not i for n, i in open_dimensions(program.source.graph))
