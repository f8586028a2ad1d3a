"""Training steps of one model at any batch: compiled without the model's weights, and not run."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from .. import models
from ..cost import CostModel
from ..errors import UsageError, nearest
from ..importer import load as onnx_import
from ..importer.convert import prepare
from ..importer.model import open_dimensions, read_model
from ..language.ir import Block, Role
from ..language.program import Compiled, Program, Variable
from ..language.verify import trusted
from ..models.common import parameters
from ..passes import RecomputePlan, Target
from ..passes.planners.fit.problem import Fitting
from ..planning.step import lower, target_of
from ..training import losses
from ..training.optimizers import Adam, RecomputeOptimizer
from ..training.protocol import AnyOptimizer
from .compiler import CompiledStep, StepFigures, compile_step, figures, plain_fitting, resolve_checkpoints

#: the default batch of a model with a dynamic batch dimension
DEFAULT_BATCH = 32
#: initializers larger than this are replaced by fills
_SMALL_BYTES = 1024

#: what a step keeps: checkpoints, or the values that a plan does not recompute; None: everything
Kept = Sequence[str] | RecomputePlan | None
Loss = str | Variable | Callable[[Program], Variable] | None
Model = str | os.PathLike[str] | onnx.ModelProto | Program


class Steps:
    """The training steps of a model, by batch and checkpoints.

    `model`: a path, a ModelProto, a name of the zoo, or a Program (one with updates is already a training step).
    `loss`: the name of a scalar value, one of `losses.NAMES`, a function from Program to Variable, or None to choose by
    the model's output.  `checkpoints`: names or globs of values to keep.  `input_shapes` fixes dimensions besides the
    batch.  `target`: what the steps are compiled for (None: this CPU); `offload`: checkpoints are offloaded.
    UsageError if a dimension other than the batch is dynamic.
    """

    def __init__(
        self,
        model: Model,
        *,
        loss: Loss = None,
        optimizer: AnyOptimizer | None = None,
        checkpoints: Sequence[Any] | None = None,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
        options: Mapping[str, Any] | None = None,
        trainable: Sequence[str] | None = None,
        target: Target | None = None,
        offload: bool = False,
    ) -> None:
        if isinstance(optimizer, RecomputeOptimizer):
            checkpoints = checkpoints or optimizer._checkpoints
            offload = offload or optimizer.enable_offload
            optimizer = optimizer.only_slices()
        self.asked = None if checkpoints is None else _names(checkpoints)
        self._optimizer = optimizer if optimizer is not None else Adam()
        self._loss = loss.name if isinstance(loss, Variable) else loss
        self.target, self._offload = target_of(target), offload
        assert self.target.cost is not None
        self.cost: CostModel = self.target.cost
        self._source = _source(model, input_shapes or {}, options or {}, trainable)
        if self.target.precision is not None and self.is_step:
            raise UsageError("the program is already a training step, and minimize() fixed its precision: leave it out")
        self._programs: dict[int, tuple[Program, str]] = {}
        self._numbered: dict[RecomputePlan, int] = {}
        self._figures: dict[tuple[int, tuple[str, ...] | RecomputePlan | None], tuple[StepFigures, float]] = {}

    @property
    def name(self) -> str:
        """The name of the model in messages."""
        return self._source.name

    @property
    def open_batch(self) -> bool:
        """Whether the batch can be chosen."""
        return self._source.fixed is None

    @property
    def default_batch(self) -> int:
        """The default batch: of all ranks, if there are several."""
        return self._source.default * (self.micro_batches if self.open_batch else 1)

    @property
    def parallel(self) -> Any:
        """The options of data parallelism of the optimizer, if it has some."""
        return getattr(self._optimizer, "_parallel", None)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of all ranks, of which a batch is a multiple; 1 without data parallelism."""
        optimizer = self._optimizer
        if not isinstance(optimizer, RecomputeOptimizer) or optimizer._parallel is None:
            return 1
        return int(optimizer._parallel.pieces(optimizer._merge))

    def for_ranks(self, parallel: Any) -> Steps:
        """The same steps with other options of data parallelism."""
        found, optimizer = copy.copy(self), copy.copy(self._optimizer)
        assert isinstance(optimizer, RecomputeOptimizer)
        optimizer._parallel = parallel
        found._optimizer = optimizer
        found._figures, found._numbered = {}, {}
        return found

    def batch(self, wanted: int | None) -> int:
        """The batch to compile for.  UsageError for less than 1, or if the model fixes another."""
        if wanted is None:
            return self.default_batch
        if isinstance(wanted, bool) or not isinstance(wanted, (int, np.integer)) or wanted < 1:
            raise UsageError(f"batch must be a whole number of at least 1, not {wanted!r}")
        if self._source.fixed not in (None, wanted):
            raise UsageError(
                f"{self.name} fixes its batch at {self._source.fixed}: it cannot be compiled for {wanted}. "
                "Give a model whose first dimension is dynamic"
            )
        if wanted % self.micro_batches:
            raise UsageError(
                f"a batch of {wanted} cannot be cut into {self.micro_batches} equal micro-batches, shared by "
                f"{self.parallel.ranks} ranks: the batch is that of all ranks; give a multiple of {self.micro_batches}"
            )
        return int(wanted)

    def program(self, batch: int) -> tuple[Program, str]:
        """The forward pass with its loss at a batch, and the loss's name."""
        if batch not in self._programs:
            self._programs.clear()  # only the last program is kept: of other batches, figures suffice
            program = self._source.at(self.batch(batch), self._loss)
            self._programs[batch] = program, attach_loss(program, self._loss)[0]
        return self._programs[batch]

    @property
    def is_step(self) -> bool:
        """Whether the model is a Program that has its updates already."""
        return self._source.is_step

    def resolved(self, checkpoints: Sequence[str] | None, batch: int | None = None) -> tuple[str, ...] | None:
        """Value names that names and globs match, in order of production."""
        if checkpoints is None or self.is_step:
            return None
        return tuple(resolve_checkpoints(self.program(batch or self.default_batch)[0], checkpoints))

    def compile(self, batch: int, checkpoints: Sequence[str] | None = None) -> CompiledStep:
        """The compiled step; nothing is allocated."""
        if self.is_step:
            if checkpoints is not None:
                raise UsageError("the program is already a training step: give the checkpoints to its optimizer")
            whole = self._source.at(self.batch(batch), None)
            if not whole.block.addresses:
                lower(whole, self.target)
            step = CompiledStep(whole, whole.plan, figures(whole.block, self.cost, whole.logical), self.cost)
        else:
            program, loss, optimizer = self._made(batch)
            names = self.resolved(checkpoints, batch)
            offload = bool(names) and self._offload
            step = compile_step(program, loss, optimizer, checkpoints=names, offload=offload, target=self.target)
        self._remember(batch, None if checkpoints is None else tuple(checkpoints), step.program.logical, step.figures)
        return step

    def compiled(self, batch: int, kept: Kept = None) -> CompiledStep:
        """The compiled step with checkpoints or with a plan (of `fitting`)."""
        if not isinstance(kept, RecomputePlan):
            return self.compile(batch, kept)
        step = self.compile(batch)
        made = self._sliced(batch, kept).carry_out(kept, False)
        step.program.lower_to(Compiled(made.compiled, made.block, self.target))
        return dataclasses.replace(step, plan=made.plan, figures=figures(made.compiled, self.cost, made.block))

    def fitting(self, batch: int) -> Fitting:
        """The step without recomputation, as input of planners.  UsageError if the model is already a training step."""
        if self.is_step:
            raise UsageError("the program is already a training step: it cannot be planned")
        program, loss, optimizer = self._made(batch)
        return plain_fitting(program, loss, optimizer, self.target)

    def _made(self, batch: int) -> tuple[Program, str, AnyOptimizer]:
        """The forward pass at a batch, or at that of all micro-batches; its loss; the optimizer."""
        optimizer = copy.copy(self._optimizer)
        if isinstance(optimizer, RecomputeOptimizer):
            optimizer, pieces = optimizer.without_growing(batch)
            batch *= pieces
        return *self.program(batch), optimizer

    def _sliced(self, batch: int, plan: RecomputePlan) -> Fitting:
        """The step, in the plan's slices.  UsageError where its operators are not those of the plan.

        A network may have other operators at batch 1, which the plan's numbers would miss.
        """
        fitting = self.fitting(batch).of(plan.slices)
        if not plan.reruns:
            return fitting
        found = hash(tuple(o.op.name for o in fitting.block.operators))
        if self._numbered.setdefault(plan, found) != found:
            raise UsageError(f"at batch {batch}, {self.name} has other operators than the plan")
        return fitting

    def _remember(
        self, batch: int, kept: tuple[str, ...] | RecomputePlan | None, block: Block, found: StepFigures
    ) -> None:
        repeated = [op for op in block.operators if op.role is Role.RECOMPUTE]
        self._figures[batch, kept] = found, sum(self.cost.seconds(op) for op in repeated)

    def _known(self, batch: int, kept: Kept) -> tuple[StepFigures, float]:
        key = kept if kept is None or isinstance(kept, RecomputePlan) else tuple(kept)
        if (batch, key) not in self._figures:
            again = any(known == key for _, known in self._figures)
            with trusted() if again else contextlib.nullcontext():
                if isinstance(key, RecomputePlan):
                    made = self._sliced(batch, key).carry_out(key, False)
                    self._remember(batch, key, made.block, figures(made.compiled, self.cost, made.block))
                else:
                    self.compile(batch, key)
        return self._figures[batch, key]

    def figures(self, batch: int, kept: Kept = None) -> StepFigures:
        """The figures of a step with checkpoints or a plan (of `fitting`); it is compiled once.

        The verifier runs only at the first batch for the same checkpoints or plan.
        """
        return self._known(batch, kept)[0]

    def repeat_seconds(self, batch: int, kept: Kept = None) -> float:
        """Estimated seconds of the recomputed operators of a step: its extra time over the plain step."""
        return self._known(batch, kept)[1]

    def peak(self, batch: int, kept: Kept = None) -> int:
        """The predicted peak: all bytes that the executor would allocate."""
        return self.figures(batch, kept).peak_bytes


def attach_loss(program: Program, wanted: Loss) -> tuple[str, str]:
    """(name of the loss, why it was chosen); the loss is appended to the program if the model has none."""
    if isinstance(wanted, Variable):
        wanted = wanted.name
    if callable(wanted):
        return wanted(program).name, "as asked"
    if wanted is not None and wanted in program and program[wanted].value.size == 1:
        return program[wanted].name, "as asked"
    if wanted is not None:
        if wanted not in losses.NAMES:
            known = ", ".join(losses.NAMES)
            raise UsageError(f"unknown loss '{wanted}'{nearest(wanted, losses.NAMES)}; known: {known}")
        return getattr(losses, wanted)(program, **_loss_names(program)).name, f"{wanted}, as asked"
    kind, reason = losses.natural_loss(program)
    if kind in program and program[kind].value.size == 1:
        return program[kind].name, reason
    return getattr(losses, kind)(program, **_loss_names(program)).name, reason


def _loss_names(program: Program) -> dict[str, str]:
    """Names of the loss and the label: `loss` and `label`, numbered if the model has values of these names."""

    def free(wish: str) -> str:
        return next(n for n in itertools.chain([wish], (f"{wish}_{i}" for i in itertools.count(1))) if n not in program)

    return {"name": free("loss"), "label_name": free("label")}


# -- where models come from -------------------------------------------------------------------------------------------


class _Source:
    """A model that gives its forward pass at a batch.  `fixed`: its only batch, None if the batch is dynamic."""

    name = "the model"
    fixed: int | None = None
    default = DEFAULT_BATCH
    is_step = False

    def at(self, batch: int, loss: Any) -> Program:
        """A new program at a batch."""
        raise NotImplementedError


def _source(
    model: Model, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any], trainable: Sequence[str] | None
) -> _Source:
    if isinstance(model, Program):
        return _Given(model, shapes)
    if isinstance(model, str) and not Path(model).is_file() and model in models.names():
        return _Zoo(model, options, trainable)
    if options:
        raise UsageError("options apply only to networks of the zoo")
    if isinstance(model, str) and not Path(model).exists():
        raise UsageError(f"'{model}' is neither a file nor a network of the zoo{nearest(model, models.names())}")
    return _File(model, shapes, trainable)


class _Zoo(_Source):
    """Source of a zoo network, built without weights."""

    def __init__(self, name: str, options: Mapping[str, Any], trainable: Sequence[str] | None) -> None:
        self.name, self._options, self._trainable = name, dict(options), trainable
        try:
            self.default = models.info(name, **self._options).default_batch
        except ValueError as e:
            raise UsageError(str(e)) from None

    def at(self, batch: int, loss: Any) -> Program:
        model = weightless(self.name, batch, self._options)
        return onnx_import.load(model, trainable=self._trainable or list(parameters(model)))


def weightless(name: str, batch: int, options: Mapping[str, Any]) -> onnx.ModelProto:
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


class _File(_Source):
    """Source of a path or ModelProto.  It is read once; trained contents are not kept after that."""

    def __init__(
        self, model: Any, shapes: Mapping[str, Sequence[int]], trainable: Sequence[str] | None, **load: Any
    ) -> None:
        self.name = "the model" if isinstance(model, onnx.ModelProto) else str(model)
        proto = prepare(read_model(model))
        self._axes = _batch_axes(proto.graph, shapes)
        self._shapes = {n: tuple(s) for n, s in shapes.items()}
        sizes = {s[0] for n, s in self._shapes.items() if n in self._axes and s}
        if not self._axes:
            first = _first_shape(proto.graph, self._shapes)
            self.fixed = self.default = first[0] if first else 1
        elif len(sizes) == 1:
            self.default = sizes.pop()
        self._load = {"trainable": trainable, **load}
        self._proto = proto
        program = self.at(self.default, None)
        self._load["trainable"] = [v.name for v in program.block.parameters] or None
        self._proto = without_contents(proto, {v.name for v in program.block.parameters})

    def at(self, batch: int, loss: Any) -> Program:
        shapes = {n: (batch, *s[1:]) if n in self._axes and s else s for n, s in self._shapes.items()}
        return onnx_import.load(self._proto, batch=batch if self._axes else None, input_shapes=shapes, **self._load)


def _batch_axes(graph: onnx.GraphProto, shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Inputs whose first dimension is the dynamic batch.  UsageError if other dimensions are dynamic."""
    dims = {i.name: i.type.tensor_type.shape.dim for i in graph.input}
    is_open = open_dimensions(graph)
    batch = {name for name, axis in is_open if axis == 0}
    symbols = {dims[name][0].dim_param for name in batch} - {""}
    known = {d.dim_param for n in shapes if n in dims for d in dims[n]} - {""}
    for name, axis in is_open:
        symbol = dims[name][axis].dim_param
        if axis == 0 or name in shapes or (symbol and (symbol in symbols or symbol in known)):
            continue
        example = ",".join("1" if d.dim_param or not d.HasField("dim_value") else str(d.dim_value) for d in dims[name])
        raise UsageError(
            f"input '{name}' has a dynamic dimension {axis}{f' ({symbol})' * bool(symbol)} besides the batch, but only "
            f"the batch may be dynamic. Fix it: input_shapes={{'{name}': [{example}]}} "
            f"(--input-shapes {name}:[{example}]) with your own sizes; the batch in it may vary"
        )
    return batch


def _first_shape(graph: onnx.GraphProto, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    weights = {t.name for t in graph.initializer}
    for i in graph.input:
        if i.name not in weights:
            return shapes.get(i.name) or tuple(d.dim_value for d in i.type.tensor_type.shape.dim)
    return ()


def without_contents(model: onnx.ModelProto, names: set[str]) -> onnx.ModelProto:
    """The model (opset ≥ 9) with fills in place of the large initializers in `names`: same program, no weights."""
    light = onnx.ModelProto(ir_version=model.ir_version)
    light.opset_import.extend(model.opset_import)
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


class _Given(_Source):
    """Source of a Program; for another batch it is loaded again from its model."""

    def __init__(self, program: Program, shapes: Mapping[str, Sequence[int]]) -> None:
        self.name = f"program '{program.block.name}'"
        self._program = program
        self.is_step = any(op.role is Role.OPTIMIZE for op in program.operators)
        self.default = 1 if program.block.batch is None else program.block.batch
        self._file: _File | None = None
        if not self.is_step and program.source is not None and open_dimensions(program.source.graph):
            own = {v.name: v.shape for v in program.block.inputs if _has_input(program.source, v.name)}
            names = [v.name for v in program.block.parameters]
            self._file = _File(program.source, {**own, **shapes}, names)
            self._file.name = self.name
        if self._file is None or self._file.fixed is not None:
            self.fixed = self.default

    def at(self, batch: int, loss: Any) -> Program:
        if batch == self.default:
            p = self._program
            again = Program(p.block, dict(p.data), source=p.source)
            again.aliases, again.plan = dict(p.aliases), p.plan
            return again
        assert self._file is not None
        program = self._file.at(batch, loss)
        appended = [op for op in self._program.operators if op.role is Role.LOSS]
        if appended and (loss is None or (isinstance(loss, str) and loss not in losses.NAMES and loss not in program)):
            name = next(appended[-1].writes()).name
            raise UsageError(
                f"the loss '{name}' was appended to {self.name} at batch {self.default}; other batches need a loss "
                f"to append: loss='{losses.NAMES[0]}' (or another of rc.losses, or a function of the program)"
            )
        return program


def _has_input(model: onnx.ModelProto, name: str) -> bool:
    return any(i.name == name for i in model.graph.input)


def _names(checkpoints: Sequence[Any] | str | Variable) -> tuple[str, ...]:
    items = [checkpoints] if isinstance(checkpoints, (str, Variable)) else list(checkpoints)
    if not items:
        raise UsageError("checkpoints is empty: give names or globs, or None to keep everything")
    return tuple(c.name if isinstance(c, Variable) else c for c in items)
