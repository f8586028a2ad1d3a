"""From an ONNX file to a Program.

Model functions are inlined and old opsets brought up to date by onnx itself, shapes are fixed, shape arithmetic is
folded away, and each node is handed to the operator class of its name (`Op.from_onnx`); nodes without one are
replaced by their ONNX function body, where they have one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnx

from .. import ops  # noqa: F401  registers all
from ..errors import ModelError, ModelWarning, RecomputeError, UsageError, expect
from ..language.ir import Block, Value
from ..language.op import IMPORTERS, REGISTRY
from ..language.program import Again, Program
from ..language.types import Values
from ..passes.patterns.find_stable import find_stable
from ..support.memory import Contents, give_back
from . import masks
from .control import CONTROL, on_sequences
from .convert import prepare
from .costs import check_sizes
from .dropout import with_dropout
from .ends import without_maps
from .fold import fold, is_weight, remember, static_shape_value
from .function import expand_function
from .graphs import names_read
from .initialize import initialise
from .inline import with_defaults
from .inputs import bind
from .limits import Budget, LimitError, Limits, budget_of, memory_bytes
from .mapped import held, with_arrays
from .model import at_sizes, fixed_inputs, other_dimensions, read_model, with_own_statistics
from .node import NodeContext
from .opening import Opening
from .origin import source_operator
from .past import without_past
from .rebatch import rebatched
from .reference import emit_reference
from .schema import attribute_value, check_node, describe, quantized_pairs
from .sparse import without_sparse
from .state import BUFFERS, ImportState
from .ties import repaired
from .trained import rule_of
from .whole import follow

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: nodes that cannot be imported, after which the rest is not looked at
_MANY = 200
_THROUGH = (
    "what is before does not train (quantization='ste', --quantization ste, passes QuantizeLinear and then "
    "DequantizeLinear; trainable=[names] says what trains after them)"
)
#: `mode` → whether Dropout and BatchNormalization train (None: as each node says)
MODES = {"train": True, "eval": False, "file": None}


class Further(Limits, total=False):
    """Keywords of `load` that few models need."""

    tie: Mapping[str, str] | None
    untie: bool | str | Sequence[str] | None
    dims: Mapping[str, int] | None
    set: Mapping[str, Any] | None


def load(
    model: str | PathLike[str] | onnx.ModelProto,
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
    trainable: Sequence[str] | None = None,
    mode: str = "train",
    init: str | None = None,
    seed: int = 0,
    unroll: bool | Sequence[str] = False,
    quantization: str | None = None,
    **further: Unpack[Further],
) -> Program:
    """Reads an ONNX model as a Program of forward operators.

    `input_shapes` fixes shapes; `batch` the first symbolic dimension of every input, and dimensions of that name; a
    batch that the file fixes is opened, after a check on samples.
    `trainable`: names or globs of what is trained (default: what the file says; or float initializers with at least
    one dimension, and weights of constant nodes, minus normalisation statistics and masks).  `mode="train"`: Dropout
    and BatchNormalization train, also in files exported for inference; `"eval"`: they do not; `"file"`: those do whose
    nodes say so.  `init="he"` or `"glorot"` draws weights anew (seeded by `seed`).
    `unroll=True` (or names, globs) writes RNN, GRU and LSTM step by step: states `Y/3/h` may be checkpoints.
    `quantization="ste"`: QuantizeLinear, then DequantizeLinear, pass gradients on as if they did not round.

    `further` (docs/import.md): limits `max_bytes`, `max_seconds`; `untie=True` (or names, globs) and `tie={"val_7":
    "embedding.weight"}` part and join parameters; `dims={"src_len": 16}`: sizes of open dimensions by their names in
    the file, or as `INPUT.AXIS`; `set={"rate": 16000}`: inputs are bound to values.
    ModelError for files that are broken or hold what cannot be run (all such nodes in one error), UsageError for
    options that do not fit.
    """
    dims, values = further.pop("dims", None) or {}, further.pop("set", None) or {}
    limits, budget, source, _held = _read(model, further, input_shapes)
    run, trace = functools.partial(_results, limits, values), functools.partial(_traced, limits, values)
    source = rebatched(source, None if input_shapes else batch, dims, values, run, trace)
    current, pairs = without_past(prepare(source, budget), input_shapes, dims), quantized_pairs(quantization)
    rule = rule_of(source, current.graph, trainable, straight=pairs is not None)
    options: Any = {"seed": seed, "rule": rule, "budget": budget, "unroll": unroll, "quantized": pairs}
    importer = Importer(current, training=_training(mode), **options)
    importer.declare_changed(source)
    bind(importer, values)
    importer.declare_inputs(fixed_inputs(importer.graph, importer.initializers, input_shapes or {}, batch, dims))
    importer.run()
    program = importer.program(source)
    fields = {"trainable": trainable, "mode": mode, "seed": seed, "unroll": unroll, "quantization": quantization}
    program.again = _again(source, program, {**fields, **limits, "set": values})
    give_back()
    _warn(importer, trainable)
    if init is not None:
        initialise(program, init, seed, max_bytes=limits.get("max_bytes") or memory_bytes())
    return program


def _warn(importer: Importer, trainable: Sequence[str] | None) -> None:
    """Tells once what does not train as one may think, with the remedies (ModelWarning)."""
    if trainable is None:
        importer.rule.warn(stacklevel=4)
    if importer.in_place:
        text = (
            "parameters of 16 bits train in place, so that small updates are lost "
            f"({', '.join(importer.in_place[:3])}): store them as initializers that are no outputs, whose float32 "
            "copies train, or convert the file to float32"
        )
        warnings.warn(text, ModelWarning, stacklevel=3)
    if importer.without_gradient:
        said = ", ".join(dict.fromkeys(importer.without_gradient[:3]))
        warnings.warn(f"integers pass no gradient on at {said}: {_THROUGH}", ModelWarning, stacklevel=3)


def _training(mode: str) -> bool | None:
    """Whether Dropout and BatchNormalization train (None: as the file says).  UsageError for an unknown mode."""
    if not isinstance(mode, str) or mode not in MODES:
        raise UsageError(f"mode must be {' or '.join(map(repr, MODES))}, not '{mode}'")
    return MODES[mode]


def _results(
    limits: Limits, values: Mapping[str, Any], model: onnx.ModelProto, feed: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Outputs of a model in inference mode."""
    further: Further = {**limits, "set": values}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)
        program = load(model, mode="eval", input_shapes={n: a.shape for n, a in feed.items()}, **further)
    names = [v.name for v in program.outputs]
    return dict(zip(names, program.evaluate(feed, names), strict=True))


def _traced(
    limits: Limits, values: Mapping[str, Any], model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]],
    opening: Opening | None,
) -> Importer:  # fmt: skip
    """An import of a model in inference mode, with what `opening` changes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)
        budget = budget_of(limits)
        current = prepare(model, budget)
        importer = Importer(current, training=False, seed=0, rule=rule_of(model, current.graph, None), budget=budget)
        importer.opening = opening
        importer.declare_changed(model)
        bind(importer, values)
        importer.declare_inputs(fixed_inputs(importer.graph, importer.initializers, shapes, None))
        importer.run()
    return importer


def _read(model: Any, further: Further, shapes: Any) -> tuple[Limits, Budget, onnx.ModelProto, list[Contents]]:
    """The limits, the budget of the load, and the model, repaired as asked, with the arrays that it refers to."""
    expect("input_shapes", shapes, (Mapping, type(None)), "a mapping of input names to shapes")
    tie, untie = further.pop("tie", None), further.pop("untie", None)
    limits = cast("Limits", further)
    budget = budget_of(limits)
    read, arrays = with_arrays(read_model(model, budget=budget))
    source = with_defaults(without_sparse(read, budget), budget)
    return limits, budget, repaired(with_dropout(with_own_statistics(source)), tie, untie), arrays


def _again(source: onnx.ModelProto, program: Program, options: dict[str, Any]) -> Again:
    """The function that loads a program's model at another batch or other sizes, with the program's options."""
    program.loaded = options
    shapes = {v.name: v.shape for v in program.block.inputs}

    def again(batch: int | None, sizes: Mapping[str, int]) -> Program:
        with warnings.catch_warnings():  # told at the first load
            warnings.simplefilter("ignore", ModelWarning)
            return load(source, input_shapes=at_sizes(source.graph, shapes, batch, sizes), **options)

    return Again(again, files=held(source), dims=other_dimensions(source.graph, shapes))


class Importer(ImportState):
    """Walks the graph in order and emits operators."""

    _cause: Exception | None = None
    #: changes nodes so that they run at another batch than the file's
    opening: Opening | None = None
    #: outputs that are left out, and the scores that stand for them
    left: Mapping[str, str] = {}

    # -- nodes ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Imports every node; nodes that cannot be are gathered into one ModelError."""
        nodes, self.left = without_maps(self.graph)
        self.used.update(self.left.values())
        self.run_nodes(nodes)
        if self._problems:
            self._refuse()
        self.unroll.check(self.graph)

    def _refuse(self) -> None:
        """Raises all that could not be imported as one ModelError."""
        lines = "\n  ".join(self._problems[:20])
        count = f"{len(self._problems) - 20}" if len(self._problems) < _MANY else "many"
        more = f"\n  and {count} more" if len(self._problems) > 20 else ""
        raise ModelError(f"this model cannot be trained here:\n  {lines}{more}") from self._cause

    def run_nodes(self, nodes: Sequence[onnx.NodeProto]) -> None:
        for node in nodes:
            for n in (node,) if self.opening is None else self.opening(self, node):
                self.run_node(n)
            if len(self._problems) >= _MANY:
                self._refuse()

    def run_node(self, node: onnx.NodeProto) -> None:
        """Folds, or hands the node to its operator."""
        missing = [n for n in node.input if n and not self.has(n)]
        if missing and self._problems:
            return  # depends on a node that failed: one report is enough
        if missing:
            self._problems.append(f"{describe(node)}: reads '{missing[0]}', which nothing before it writes")
            return
        again = [n for n in node.output if n and self.has(n)]
        if again:
            self._problems.append(f"{describe(node)}: duplicate definition of '{again[0]}'")
            return
        try:
            check_node(node, self.opset)
            check_sizes(node, self.known)
            if node.op_type in CONTROL and node.domain in ("", "ai.onnx"):
                CONTROL[node.op_type](self, node)
                return
            if any(n in self.sequences or n in self.nothing for n in node.input):
                on_sequences(self, node)
                return
            if masks.concerns(self, node):
                masks.run(self, node)
                return
            self.run_plain(node)
        except LimitError as e:
            raise e.at(describe(node)) from None
        except RecomputeError as e:
            text = str(e)
            self._problems.append(text if text.startswith("node ") else f"{describe(node)}: {text}")
        except MemoryError as e:
            raise ModelError(f"{describe(node)}: takes more memory than there is ({e})") from None
        except Exception as e:  # an importer or a type rule met inputs or attributes that it does not expect
            self._cause = self._cause or e
            self._problems.append(f"{describe(node)}: invalid inputs or attributes ({type(e).__name__}: {e})")

    def run_plain(self, node: onnx.NodeProto) -> None:
        """Folds, or hands the node to its operator; raises what is wrong with it."""
        if node.op_type == "Identity" and self._passes_on(node):
            return
        opset = self.opset_of(node.domain)
        kept = node.op_type == "Cast" and node.input[0] in self.rule.roles.codes  # a weight, whose integers stay
        folded = static_shape_value(node, self.type_of, self.known)
        folded = folded if kept or folded else fold(node, self.known, opset, self.budget)
        if folded is not None:
            for name in self.rule.roles.held & folded.keys():
                folded[name].origin = "initializer"  # as the others of this file
            remember(self.known, folded, self.budget)
            return
        self._emit(node)
        follow(self, node)

    def _passes_on(self, node: onnx.NodeProto) -> bool:
        """An Identity of a weight is another name for it: they train as one; or detached from it, as PyTorch says.

        PyTorch's exporter merges fresh parameters, which are equal, in this way: those whose elements are all equal
        train apart, as do statistics of normalisations.
        """
        name = node.input[0] if node.input else ""
        canonical, constant = self.canonical.get(name, name), self.known.get(name)
        if canonical not in self.rule.origin.kinds:
            if constant is None or not is_weight(constant) or node.output[0] in self.rule.roles.statistics:
                return False
            if self.rule.from_pytorch and constant.all_equal():
                return False
        if source_operator(node) == "aten.detach.default":
            self._emit(node)
        else:
            self.alias(node.output[0], name)
            self.rule.copies.setdefault(canonical, []).append(node.output[0])
        return True

    def _emit(self, node: onnx.NodeProto) -> None:
        decimal = self.rule.origin.from_torch
        attributes = {a.name: attribute_value(a, decimal=decimal) for a in node.attribute}
        context = NodeContext(self, node, attributes)
        cls = REGISTRY.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        handler = cls.from_onnx if cls is not None else IMPORTERS.get((node.domain, node.op_type))
        start = len(self.builder.operators)
        self.builder.prefix = next((o for o in node.output if o), node.op_type)
        if handler is None:
            self.expand_node(node)
            return
        results = handler(context)
        if results is None:  # not this form of it
            self.expand_node(node)
            return
        if isinstance(results, list):
            self._run_body(results)
            return
        self._name_outputs(node, results if isinstance(results, tuple) else (results,), start)

    def _run_body(self, nodes: Sequence[onnx.NodeProto]) -> None:
        self.used.update(names_read(nodes))
        self.run_nodes(nodes)

    def expand_node(self, node: onnx.NodeProto) -> None:
        """Runs the body that ONNX gives for a node; where there is none, ONNX's evaluator may do it."""
        known_types = {n: self.type_of(n) for n in node.input if n and n not in self.sequences}
        body = expand_function(node, known_types, self.opset_of(node.domain))
        if body is None:
            start = len(self.builder.operators)
            self._name_outputs(node, emit_reference(self, node, describe(node)), start)
            return
        self._run_body(body)

    def _name_outputs(self, node: onnx.NodeProto, results: Values, start: int) -> None:
        """Gives the node's outputs their ONNX names; an output that is another value gets an alias."""
        written = [v for o in self.builder.operators[start:] for v in o.writes() if not o.op.updates]
        outputs = {v.name for v in written}
        names: dict[str, str] = {}
        for wanted, v in zip(node.output, results, strict=False):
            if not wanted:
                continue
            if v is None:
                raise ModelError(f"{describe(node)}: its output '{wanted}' is not supported")
            if v.name in outputs and v.name not in names:
                names[v.name] = wanted
            else:
                self.aliases[wanted] = v.name
            self.env[wanted] = v.renamed(names.get(v.name, v.name))
        if names:
            self.builder.operators[start:] = [o.renamed(names) for o in self.builder.operators[start:]]

    def keep_buffers(self) -> None:
        """Updates the buffers that the model says its run changes."""
        for name, value in self.changed.items():
            if not self.has(value):
                raise ModelError(f"the model has damaged metadata: {BUFFERS} names '{value}', which nothing writes")
            self.builder.prefix = name
            after = self.value(value, "", 0)
            if after.type != self.buffers[name].type:
                raise ModelError(f"the model has damaged metadata: {BUFFERS} gives '{name}' a value of another type")
            if after.name != self.buffers[name].name:  # else its own operator updates it, as a batch normalisation does
                self.builder.RunningUpdate(self.buffers[name], after, momentum=0.0)

    # -- the result -----------------------------------------------------------------------------------------------

    def program(self, source: onnx.ModelProto) -> Program:
        """The imported program; outputs that are other values become copies of them."""
        self.keep_buffers()
        outputs = []
        for name in dict.fromkeys(self.left.get(o.name, o.name) for o in self.graph.output):
            masks.check_output(self, name)
            if name not in self.env and name not in self.known:
                raise ModelError(f"output '{name}' is never written")
            v = self.value(name, "", 0)
            if v.name != name or v in self.inputs or name in self.parameters:
                copy = self.builder.emit(REGISTRY["Identity"](), v)
                if v.name != name:  # the name was kept for it
                    copy = self._rename_last(copy, name)
                v = copy
            outputs.append(v.name)
        floats = [n for n, k in self.known.items() if k.type.is_float]
        self.rule.check(self.parameters, floats)
        block = Block(
            name=self.graph.name or "main",
            inputs=tuple(self.inputs),
            parameters=tuple(self.parameters.values()),
            buffers=tuple(self.buffers.values()),
            state=tuple(self.state.values()),
            constants=tuple(self.builder.constants),
            operators=(*self.casts, *self.builder.operators),
            outputs=tuple(outputs),
        )
        block = find_stable(block)
        program = Program(block, self.data, source=source)
        program.imported = block
        values = block.values()
        constants = {n: k for n, k in self.known.items() if n not in self.canonical}
        program.tensors = [*self.rule.decided.values(), *self.rule.rest(constants, self.used)]
        shared = {a: n for a, n in self.canonical.items() if n in values}
        program.aliases = {a: n for a, n in {**self.aliases, **shared}.items() if a not in values}
        return program

    def _rename_last(self, v: Value, name: str) -> Value:
        """Gives the last operator's output another name."""
        self.builder.operators[-1] = self.builder.operators[-1].renamed({v.name: name})
        return v.renamed(name)
