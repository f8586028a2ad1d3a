"""`rc.look` and `--look`: what a model file holds and what training it takes, before anything is asked of it."""

from __future__ import annotations

import os
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from ..compiling.steps import attach_loss
from ..errors import ModelWarning, RecomputeError, UsageError, expect
from ..importer.graphs import first_output, graphs_of
from ..importer.load import load
from ..importer.model import open_names, read_model, symbol
from ..importer.rebatch import fixed_batch
from ..importer.tensors import tensor_array
from ..language.program import Program, Variable
from ..language.scores import MOVES, Step, before_moves, main_outputs, scores_of, steps_of
from ..language.types import DTYPES, PACKED, dtype_from_onnx, show_onnx_dtype
from ..passes.gradient.autodiff import differentiate
from ..report.look import Condition, HeadFact, Look, Port

#: the batch of the command, and the sizes that are tried for other open dimensions, the first that works being taken
_BATCH, _SIZES = 8, (16, 64, 224)
#: operators whose results depend on the shapes of what they read alone
_OF_SHAPES = frozenset(["Shape", "Size"])
_COMPARISONS = frozenset(["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"])
#: layers that may be heads
_LAYERS = frozenset(["MatMul", "Gemm", "Conv", "ConvTranspose"])
_QUANTISED = re.compile(r"(?i:quantize)|Integer$|^Q[A-Z]|NBits")
#: operators between a weight and its layer: DequantizeLinear is (codes - zero point) · scale
_UNPACKS = MOVES | {"Sub", "Mul"}


@dataclass(frozen=True)
class _Options:
    """Arguments of `load`: the batch (None: the file has none that is open), sizes by name, bound inputs."""

    batch: int | None
    dims: Mapping[str, int]
    set: Mapping[str, Any]

    def command(self, model: str) -> str:
        """The command line that compiles the model so."""
        options = [] if self.batch is None else [f"--batch {self.batch}"]
        options += [f"--dim {shlex.quote(n)}={size}" for n, size in self.dims.items()]
        options += [f"--set {shlex.quote(n)}={_shown(value)}" for n, value in self.set.items()]
        return " ".join(["recompute-compile", shlex.quote(model), *options])


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shlex.quote(str(value))


def look(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    set: Mapping[str, Any] | None = None,  # as the option of `load`
) -> Look:
    """What a model file holds, and what training it takes: inputs and open dimensions, head, loss, what trains and why
    not, how it is quantised, conditions on inputs, operators without gradient, and a command that compiles it.

    `model`: a path or a ModelProto.  `batch`, `dims`, `set`: as for `load`; sizes of open dimensions that are not given
    are tried (batch 8, then 1, others 16, 64, 224), and the command has those that work.  Nothing is run.
    ModelError for a file that is broken; what cannot be trained is a fact (`problem`), and no error.
    """
    expect("dims", {} if dims is None else dims, Mapping, "a mapping of names to sizes")
    expect("set", {} if set is None else set, Mapping, "a mapping of inputs to values")
    proto = read_model(model)
    name = "MODEL.onnx" if isinstance(model, onnx.ModelProto) else str(Path(model))
    asked = _Options(batch, dict(dims or {}), dict(set or {}))
    graph = proto.graph
    makers = {o: n for n in graph.node for o in n.output}
    facts = _facts(name, proto, tuple(_conditions(graph, makers)))
    options, program, why, notes = _tried(proto, facts, asked)
    facts = replace(facts, command=options.command(name), problem=why)
    return facts if program is None else _of_program(replace(facts, notes=tuple(notes)), program)


# -- of the file -----------------------------------------------------------------------------------------------------


def _facts(name: str, proto: onnx.ModelProto, conditions: tuple[Condition, ...]) -> Look:
    graph = proto.graph
    weights = {t.name for t in graph.initializer}
    inputs = [i for i in graph.input if i.name not in weights]
    nodes = Counter(n.op_type if n.domain in ("", "ai.onnx") else f"{n.domain}.{n.op_type}" for n in _nodes(graph))
    operators = dict(nodes.most_common())
    stored: Counter[str] = Counter()
    size = 0
    for t in _tensors(graph):
        kind, count = show_onnx_dtype(t.data_type), _numbers(t)
        stored[kind] += count
        size += count * PACKED.get(kind, 8 * DTYPES[kind].itemsize if kind in DTYPES else 8) // 8
    return Look(
        model=name,
        producer=" ".join(t for t in (proto.producer_name, proto.producer_version) if t),
        opsets={"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import},
        operators=operators,
        tensor_bytes=size,
        inputs=tuple(map(_port, inputs)),
        outputs=tuple(map(_port, graph.output)),
        open=tuple(open_names(inputs)),
        fixed_batch=fixed_batch(graph),
        command="",
        stored=dict(stored.most_common()),
        quantised={n: c for n, c in operators.items() if _QUANTISED.search(n.rpartition(".")[2])},
        conditions=conditions,
    )


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and its subgraphs."""
    for node in graph.node:
        yield node
        for a in node.attribute:
            for inner in graphs_of(a):
                yield from _nodes(inner)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Initializers, also those of subgraphs, and tensors of Constant nodes."""
    yield from graph.initializer
    for node in graph.node:
        for a in node.attribute:
            if node.op_type == "Constant" and a.name == "value":
                yield a.t
            for inner in graphs_of(a):
                yield from _tensors(inner)


def _numbers(t: onnx.TensorProto) -> int:
    count = 1
    for d in t.dims:
        count *= max(d, 0)
    return count


def _port(v: onnx.ValueInfoProto) -> Port:
    t = v.type.tensor_type
    if not v.type.HasField("tensor_type"):
        return Port(v.name, v.type.WhichOneof("value") or "?", None)
    dims = [
        int(d.dim_value) if d.HasField("dim_value") and d.dim_value >= 0 else symbol(d) or f"{v.name}.{i}"
        for i, d in enumerate(t.shape.dim)
    ]
    return Port(v.name, show_onnx_dtype(t.elem_type), tuple(dims) if t.HasField("shape") else None)


def _conditions(graph: onnx.GraphProto, makers: Mapping[str, onnx.NodeProto]) -> Iterator[Condition]:
    """The Ifs and Loops of a graph that depend on the contents of its inputs."""
    weights = {t.name: t for t in graph.initializer}
    inputs = {i.name for i in graph.input} - weights.keys()
    for node in graph.node:
        if node.op_type not in ("If", "Loop") or not node.input:
            continue
        behind: dict[str, None] = {}
        compared: dict[float, None] = {}
        stack, seen = [n for n in node.input[: 1 if node.op_type == "If" else 2] if n], set[str]()
        while stack:
            name = stack.pop()
            maker = makers.get(name)
            if name in inputs:
                behind[name] = None
            if name in seen or maker is None or maker.op_type in _OF_SHAPES:
                continue
            seen.add(name)
            stack += [i for i in maker.input if i]
            if maker.op_type in _COMPARISONS:
                compared.update(dict.fromkeys(_scalars(maker, weights, makers)))
        if behind:
            yield Condition(first_output(node), node.op_type, tuple(behind), tuple(compared))


def _scalars(
    node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto], makers: Mapping[str, onnx.NodeProto]
) -> Iterator[float]:
    """Numbers of the file that a node reads."""
    for name in node.input:
        t, maker = weights.get(name), makers.get(name)
        if maker is not None and maker.op_type == "Constant":
            t = next((a.t for a in maker.attribute if a.name == "value"), None)
        if t is not None and _numbers(t) == 1 and dtype_from_onnx(t.data_type) is not None:
            yield float(tensor_array(t).reshape(-1)[0])


# -- of the program --------------------------------------------------------------------------------------------------


def _tried(proto: onnx.ModelProto, facts: Look, asked: _Options) -> tuple[_Options, Program | None, str, list[str]]:
    """The first options with which the model loads, its program, and the warnings; or those of the first try, and why
    it failed."""
    first: tuple[_Options, str] | None = None
    for options in _options(proto.graph, facts, asked):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", ModelWarning)
            try:
                program = load(proto, batch=options.batch, dims=options.dims, set=options.set)
                _check_sizes(program)
            except RecomputeError as e:
                first = first or (options, str(e))
                continue
        notes = [str(w.message) for w in told if issubclass(w.category, ModelWarning)]
        return options, program, "", list(dict.fromkeys(notes))
    assert first is not None
    return first[0], None, first[1], []


def _check_sizes(program: Program) -> None:
    """UsageError where a value has no elements: an image that is too small for the network's poolings."""
    empty = next((v for o in program.operators for v in o.writes() if not v.size), None)
    if empty is not None and all(v.value.size for v in program.inputs):
        raise UsageError(f"'{empty.name}' is {empty.type}, without elements: sizes of the inputs are too small")


def _options(graph: onnx.GraphProto, facts: Look, asked: _Options) -> Iterator[_Options]:
    """The options to try: the sizes asked for, with others for open dimensions; conditions bound where needed.

    States of recurrent networks, [layers, batch, size], have the batch along axis 1.
    """
    weights = {t.name for t in graph.initializer}
    places = open_names([i for i in graph.input if i.name not in weights and i.name not in asked.set])
    is_batch = {n: any(axis == 0 for _, axis in at) for n, at in places.items()}
    batch = asked.batch
    if batch is None and any(first and n not in asked.dims for n, first in is_batch.items()):
        batch = _BATCH
    others = [n for n, first in is_batch.items() if not first and n not in asked.dims]
    fixed = {i.name for i in graph.input if i.type.tensor_type.shape.dim and not _is_open(i, 0)}
    states = {n for n in others if batch is not None and all(axis == 1 and i in fixed for i, axis in places[n])}
    settings = {c.inputs[0]: c.example for c in facts.conditions if c.example is not None}
    for size in _SIZES if len(others) > len(states) else _SIZES[:1]:
        dims = {**asked.dims, **{n: batch if n in states and batch is not None else size for n in others}}
        yield _Options(batch, dims, asked.set)
        if settings.keys() - asked.set.keys():
            yield _Options(batch, dims, {**settings, **asked.set})
    if asked.batch is None and batch is not None:  # states whose batch is fixed
        yield from _options(graph, facts, replace(asked, batch=1))


def _is_open(v: onnx.ValueInfoProto, axis: int) -> bool:
    return not v.type.tensor_type.shape.dim[axis].HasField("dim_value")


def _of_program(facts: Look, program: Program) -> Look:
    """Adds the facts of the program that was loaded."""
    outputs = main_outputs(program)
    heads = tuple(_head(program, v) for v in outputs[:4])
    rest = Counter(t.why for t in program.tensors if not t.trains)
    trained = tuple(v.name for v in program.parameters)
    numbers = sum(v.value.size for v in program.parameters)
    facts = replace(facts, heads=heads, frozen=dict(rest.most_common()), trained=trained, parameters=numbers)
    try:
        name, reason = attach_loss(program, None)
        kind = reason.partition(",")[0]
        facts = replace(facts, loss=name if kind.startswith("'") else kind, loss_reason=reason)
    except RecomputeError as e:
        facts = replace(facts, loss_reason=str(e))
        if not outputs:
            return facts
        wanted = f"mse:{outputs[0].name}"
        facts = replace(facts, command=f"{facts.command} --loss {shlex.quote(wanted)}")
        name, _ = attach_loss(program, wanted)
    if not trained:
        return facts
    reached, error = set[str](), None
    try:
        reached = {v.name for v, _ in differentiate(program.block, name)[1]}
    except RecomputeError as e:
        error = str(e)
    missing = tuple(n for n in trained if n not in reached)
    if missing and "QuantizeLinear" in facts.quantised:
        facts = replace(facts, command=f"{facts.command} --quantization ste")
    return replace(facts, gradient_error=error or "", no_gradient=() if error else missing)


def _head(program: Program, output: Variable) -> HeadFact:
    """The layer behind an output."""
    step_of = steps_of(program.block)
    parameters = {v.name: v.value.shape for v in program.parameters}
    parameters.update((v.name, v.shape) for v in program.block.buffers)
    head = scores_of(output.name, step_of)
    scores = before_moves(head.source, step_of)[1]
    weight = _weight(scores, step_of, parameters)
    return HeadFact(output.name, scores, head.kind, weight, parameters.get(weight, ()))


def _weight(name: str, step_of: Callable[[str], Step | None], held: Mapping[str, tuple[int, ...]]) -> str:
    """The weight of the layer that makes a value, its bias being added perhaps; "" where none is found."""
    step = step_of(name)
    while step is not None and step.kind == "Add":
        rest = [n for n in step.reads if before_moves(n, step_of)[1] not in held]
        step = step_of(before_moves(rest[0], step_of)[1]) if len(rest) == 1 else None
    if step is None or step.kind not in _LAYERS:
        return ""
    for name in step.reads[1::-1]:
        while name not in held and (before := step_of(name)) is not None and before.kind in _UNPACKS:
            name = before.reads[0]
        if name in held:
            return name
    return ""
