"""From an ONNX file to a Program.

Model functions are inlined and old opsets brought up to date by onnx itself, shapes are fixed, shape arithmetic is
folded away, and each node is handed to the operator class of its name (`Op.from_onnx`); nodes without one are
replaced by their ONNX function body, where they have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike

import numpy as np
import onnx

from .builder import Builder, Names
from .errors import ModelError, RecomputeError, UsageError, nearest
from .initialize import initialise
from .ir import Block, Value
from .onnx_control import CONTROL, on_sequences
from .onnx_convert import prepare
from .onnx_costs import check_sizes
from .onnx_fold import Known, fold, remember, static_shape_value
from .onnx_limits import Budget, LimitError, memory_bytes
from .onnx_loops import Unrolled
from .onnx_model import fixed_inputs, main_opset, read_model, with_own_statistics
from .onnx_node import NodeContext
from .onnx_reference import emit_reference
from .onnx_schema import attribute_value, check_node, describe, quantized_pairs
from .onnx_subgraph import names_read
from .op import IMPORTERS, REGISTRY
from .patterns import Patterns
from .program import Program
from .types import TensorType

#: constants of at most this many elements are written into the program's text, larger ones become buffers
_INLINE = 64
#: nodes that cannot be imported, after which the rest is not looked at
_MANY = 200
#: what `mode` says about Dropout and BatchNormalization (None: what each node says)
MODES = {"train": True, "eval": False, "file": None}
#: (operator, input positions) at which a float constant given by a node, not an initializer, is a weight
_WEIGHT_POSITIONS = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (1, 2), "MatMul": (0, 1), "BatchNormalization": (1, 2),
    "LayerNormalization": (1, 2), "InstanceNormalization": (1, 2), "GroupNormalization": (1, 2),
    "RMSNormalization": (1,), "PRelu": (1,), "LSTM": (1, 2, 3, 7), "GRU": (1, 2, 3), "RNN": (1, 2, 3), "Gather": (0,),
}  # fmt: skip


def load(
    model: str | PathLike[str] | onnx.ModelProto,
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
    trainable: Sequence[str] | None = None,
    mode: str = "train",
    init: str | None = None,
    seed: int = 0,
    max_bytes: int | None = None,
    max_seconds: float | None = None,
    unroll: bool | Sequence[str] = False,
    quantization: str | None = None,
) -> Program:
    """Reads an ONNX model as a Program of forward operators.

    `input_shapes` fixes inputs' shapes; `batch` fixes the first symbolic dimension of every input (and every other
    dimension of that name).  `trainable`: names or globs of what is trained (default: float initializers with at
    least one dimension, and weights given by constant nodes, minus normalisation statistics and masks).
    `mode="train"`: Dropout and BatchNormalization train, also in files exported for inference; `"eval"`: they do
    not; `"file"`: those do whose nodes say so.  `init="he"` or `"glorot"` draws weights anew (seeded by `seed`), as
    models whose weights are all equal need it.  `max_bytes`: the most that one tensor of the file may take (default:
    the machine's memory), and all that is computed from constants at load time; `max_seconds`: the work that the file
    may ask for beside being read (default: 6), counted in operations (docs/import.md: limits).
    `unroll=True` writes RNN, GRU and LSTM step by step, so that each step's state is a value (`Y/3/h`, `Y/3/c`) that
    may be a checkpoint; names or globs (of nodes or their outputs) choose which.
    `quantization="ste"`: QuantizeLinear, then DequantizeLinear, pass gradients on as if they did not round.

    Raises ModelError for files that are broken or hold what cannot be run (all such nodes in one error), UsageError
    for options that do not fit the model.
    """
    if mode not in MODES:
        raise UsageError(f"mode must be {' or '.join(map(repr, MODES))}, not '{mode}'")
    budget = Budget(max_bytes, max_seconds)
    source = with_own_statistics(read_model(model, budget=budget))
    importer = Importer(prepare(source, budget), training=MODES[mode], seed=seed, trainable=trainable, budget=budget)
    importer.unroll = Unrolled(unroll)
    importer.quantized = quantized_pairs(quantization)
    importer.declare_inputs(fixed_inputs(importer.graph, importer.initializers, input_shapes or {}, batch))
    importer.run()
    importer.unroll.check(importer.graph)
    program = importer.program(source)
    if init is not None:
        initialise(program, init, seed, max_bytes=max_bytes or memory_bytes())
    return program


class Importer:
    """Walks the graph in order and emits operators."""

    def __init__(
        self,
        model: onnx.ModelProto,
        *,
        training: bool | None,
        seed: int,
        trainable: Sequence[str] | None,
        budget: Budget | None = None,
    ) -> None:
        self.graph = model.graph
        self.opset = main_opset(model)
        self.budget = budget or Budget()
        self._opsets = {o.domain: o.version for o in model.opset_import}
        self.training = training
        self.trainable = None if trainable is None else Patterns(trainable)
        self.initializers = {t.name: t for t in self.graph.initializer}
        self.known: dict[str, Known] = {name: Known.of_initializer(t) for name, t in self.initializers.items()}
        self.sequences: dict[str, list[str]] = {}
        self.nothing: set[str] = set()  # optionals that hold nothing
        self.canonical: dict[str, str] = {}  # a known constant's further name → its own
        self.scopes: dict[str, str] = {}  # see onnx_subgraph
        self.held: set[str] = set()
        self.unroll = Unrolled(False)
        self.quantized = quantized_pairs(None)
        self.used = set(names_read(self.graph.node)) | {o.name for o in self.graph.output}
        written = {o for node in self.graph.node for o in node.output}
        names = Names(written.union(self.known, (i.name for i in self.graph.input)))
        self.builder = Builder(names)
        self.env: dict[str, Value] = {}
        self.inputs: list[Value] = []
        self.parameters: dict[str, Value] = {}
        self.buffers: dict[str, Value] = {}
        self.state: dict[str, Value] = {}
        self.data: dict[str, np.ndarray] = {}
        self.aliases: dict[str, str] = {}
        self._seed, self._random = seed, 0
        self._problems: list[str] = []
        self._cause: Exception | None = None

    # -- declarations ---------------------------------------------------------------------------------------------

    def declare_inputs(self, types: Mapping[str, TensorType]) -> None:
        """Declares the graph's inputs with their fixed types."""
        for name, t in types.items():
            self.env[name] = Value(name, t)
            self.inputs.append(self.env[name])

    def step(self) -> Value:
        """Declares the step counter at its first use."""
        if not self.state:
            name = self.builder.names.take("step")
            self.state[name] = Value(name, TensorType("i64", ()))
            self.data[name] = np.zeros((), np.int64)
        return next(iter(self.state.values()))

    def random_seed(self) -> int:
        """A key of 63 bits from the seed and the operator's number (SplitMix64's finaliser)."""
        self._random += 1
        z = (self._seed * 0x9E3779B97F4A7C15 + self._random * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        return (z ^ (z >> 31)) >> 1

    # -- values ---------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether a name is a value, a known constant or a sequence by now."""
        return name in self.env or name in self.known or name in self.sequences or name in self.nothing

    def constant(self, array: np.ndarray) -> Known:
        """A constant that the importer makes itself."""
        self.budget.take(array.nbytes)
        return Known(array, "folded")

    def declare_initializer(self, name: str, t: onnx.TensorProto) -> None:
        """An initializer of a subgraph, under a name of its own."""
        self.known[name] = Known.of_initializer(t)

    def alias(self, name: str, other: str) -> None:
        """A further name for a value, a known constant or a sequence; for what a failed node lacks, nothing."""
        if name == other:
            return
        if other in self.env:
            self.env[name] = self.env[other]
            self.aliases[name] = self.env[other].name
        elif other in self.known:
            self.known[name] = self.known[other]
            self.canonical[name] = self.canonical.get(other, other)
        elif other in self.sequences:
            self.sequences[name] = self.sequences[other]
        elif other in self.nothing:
            self.nothing.add(name)

    def problems(self) -> int:
        """How many nodes could not be imported so far."""
        return len(self._problems)

    def opset_of(self, domain: str) -> int:
        """The version of a domain's operators that this onnx has and the model asks for."""
        ours = domain in ("", "ai.onnx")
        return min(self.opset, onnx.defs.onnx_opset_version()) if ours else self._opsets.get(domain, 1)

    def contents(self, name: str) -> Known | None:
        """What is known of a value's contents: an operator asks for what must be settled at compile time."""
        return self.known.get(name)

    def type_of(self, name: str) -> TensorType:
        """The type of a value or known constant."""
        return self.env[name].type if name in self.env else self.known[name].type

    def value(self, name: str, op_type: str, position: int) -> Value:
        """The value called `name`; a known constant is declared in the way that its use asks for."""
        name = self.canonical.get(name, name)
        if name in self.env:
            return self.env[name]
        known = self.known.get(name)
        if known is None:
            raise ModelError(f"'{name}' is read but never written")
        t = known.type
        if t.dtype == "string":
            raise ModelError(f"'{name}' holds strings: what is made of them must be known at compile time")
        if self._is_trained(name, known, op_type, position):
            self.env[name] = self.parameters[name] = Value(name, t)
            self.data[name] = _read_only(known.array)
        elif t.size <= _INLINE and known.origin != "initializer":
            return self.builder.constant(known.array, t)  # not remembered: a later use may be as a weight
        elif t.size <= 1 and t.ndim == 0:
            self.env[name] = self.builder.constant(known.array, t)
        else:
            return self.buffer(name)
        return self.env[name]

    def buffer(self, name: str) -> Value:
        """The value called `name`; a known constant becomes a buffer, which an operator may update."""
        name = self.canonical.get(name, name)
        if name not in self.env:
            known = self.known[name]
            self.env[name] = self.buffers[name] = Value(name, known.type)
            self.data[name] = _read_only(known.array)
        return self.env[name]

    def _is_trained(self, name: str, known: Known, op_type: str, position: int) -> bool:
        if not known.type.is_float or not op_type:
            return False
        if self.trainable is not None:
            return self.trainable.fit(name)
        if known.type.ndim == 0:
            return False
        at_weight = position in _WEIGHT_POSITIONS.get(op_type, ())
        if known.origin == "initializer":
            return at_weight or not known.is_mask()
        return at_weight and known.origin in ("constant", "fill")

    # -- nodes ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Imports every node; nodes that cannot be are gathered into one ModelError."""
        self.run_nodes(self.graph.node)
        if self._problems:
            self._refuse()

    def _refuse(self) -> None:
        """Raises all that could not be imported as one ModelError."""
        lines = "\n  ".join(self._problems[:20])
        count = f"{len(self._problems) - 20}" if len(self._problems) < _MANY else "many"
        more = f"\n  and {count} more" if len(self._problems) > 20 else ""
        raise ModelError(f"this model cannot be trained here:\n  {lines}{more}") from self._cause

    def run_nodes(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Imports nodes in order."""
        for node in nodes:
            self.run_node(node)
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
            self._problems.append(f"{describe(node)}: writes '{again[0]}', which is there already")
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
            opset = self.opset_of(node.domain)
            folded = static_shape_value(node, self.type_of, self.known) or fold(node, self.known, opset, self.budget)
            if folded is not None:
                remember(self.known, folded, self.budget)
                return
            self._emit(node)
        except LimitError as e:
            raise e.at(describe(node)) from None
        except RecomputeError as e:
            text = str(e)
            self._problems.append(text if text.startswith("node ") else f"{describe(node)}: {text}")
        except MemoryError as e:
            raise ModelError(f"{describe(node)}: takes more memory than there is ({e})") from None
        except Exception as e:  # an importer or a type rule met inputs or attributes that it does not expect
            self._cause = self._cause or e
            self._problems.append(f"{describe(node)}: its inputs or attributes do not fit ({type(e).__name__}: {e})")

    def _emit(self, node: onnx.NodeProto) -> None:
        from . import ops  # noqa: F401  registers all

        attributes = {a.name: attribute_value(a) for a in node.attribute}
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
        from .onnx_function import expand_function

        known_types = {n: self.type_of(n) for n in node.input if n and n not in self.sequences}
        body = expand_function(node, known_types, self.opset_of(node.domain))
        if body is None:
            start = len(self.builder.operators)
            self._name_outputs(node, emit_reference(self, node, describe(node)), start)
            return
        self._run_body(body)

    def _name_outputs(self, node: onnx.NodeProto, results: Sequence[Value | None], start: int) -> None:
        """Gives the node's outputs their ONNX names; an output that is another value gets an alias."""
        written = [v for o in self.builder.operators[start:] for v in o.writes() if not o.op.updates]
        made = {v.name for v in written}
        names: dict[str, str] = {}
        for wanted, v in zip(node.output, results, strict=False):
            if not wanted:
                continue
            if v is None:
                raise ModelError(f"{describe(node)}: its output '{wanted}' is not supported")
            if v.name in made and v.name not in names:
                names[v.name] = wanted
            else:
                self.aliases[wanted] = v.name
            self.env[wanted] = v.renamed(names.get(v.name, v.name))
        if names:
            self.builder.operators[start:] = [o.renamed(names) for o in self.builder.operators[start:]]

    # -- the result -----------------------------------------------------------------------------------------------

    def program(self, source: onnx.ModelProto) -> Program:
        """The imported program; outputs that are other values become copies of them."""
        outputs = []
        for o in self.graph.output:
            if o.name not in self.env and o.name not in self.known:
                raise ModelError(f"output '{o.name}' is never written")
            v = self.value(o.name, "", 0)
            if v.name != o.name or v in self.inputs or o.name in self.parameters:
                copy = self.builder.emit(REGISTRY["Identity"](), v)
                if v.name != o.name:  # the name was kept for it
                    copy = self._rename_last(copy, o.name)
                v = copy
            outputs.append(v.name)
        self._check_trainable()
        block = Block(
            name=self.graph.name or "main",
            inputs=tuple(self.inputs),
            parameters=tuple(self.parameters.values()),
            buffers=tuple(self.buffers.values()),
            state=tuple(self.state.values()),
            constants=tuple(self.builder.constants),
            operators=tuple(self.builder.operators),
            outputs=tuple(outputs),
        )
        program = Program(block, self.data, source=source)
        values = block.values()
        program.aliases = {a: n for a, n in self.aliases.items() if a not in values}
        return program

    def _rename_last(self, v: Value, name: str) -> Value:
        """Gives the last operator's output another name."""
        self.builder.operators[-1] = self.builder.operators[-1].renamed({v.name: name})
        return v.renamed(name)

    def _check_trainable(self) -> None:
        pattern = None if self.trainable is None else self.trainable.useless(self.parameters)
        if pattern is not None:
            floats = [n for n, k in self.known.items() if k.type.is_float]
            raise UsageError(f"trainable: no float initializer is called '{pattern}'{nearest(pattern, floats)}")


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written: copies of one tensor share it until a program that trains them is run."""
    view = array.view()
    view.flags.writeable = False
    return view
