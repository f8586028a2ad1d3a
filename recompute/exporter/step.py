"""Export of a training step as an ONNX model, with forward, recomputed, backward and update operators as nodes.

Operators that ONNX has become nodes; the others become calls of model-local functions in the domain `onnx_recompute`,
whose bodies are standard ONNX.  State that is updated in place becomes an additional output: the step reads `w` and
writes `w.next`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ..boundary import as_path, as_program, as_texts
from ..errors import UsageError, expect
from ..importer.beside import STATE_FILE, in_state_file
from ..language.builder import Names
from ..language.ir import Block, Free, Operator, Value
from ..language.op import Op
from ..language.program import Program, Variable
from ..language.text import show
from ..language.types import Types
from ..support.files import is_special, together
from ..support.tensor_file import write_arrays
from ..training.state import contents
from ..version import __version__
from .compiled import save_model
from .function_builder import DOMAIN, OPSET, FunctionBuilder, fill_tensor, set_metadata, tensor_of, value_info

__all__ = ["DOMAIN", "OPSET", "FunctionBuilder", "export_step", "save_step", "state_file"]

#: the first IR version with node metadata; functions came with 8
IR_VERSION = 10
#: models with more operators have no value_info
_MAX_TYPED = 20_000


def export_step(
    program: Program, *, fetch: Sequence[str | Variable] = (), plan_metadata: Any = None, state: str = "defaults"
) -> onnx.ModelProto:
    """The program as an ONNX model of one training step.

    Inputs: those of the program, and its parameters, buffers and state, whose current contents are the defaults; with
    `state="inputs"` they have none, so that they must be fed (`save_step` writes them to a file beside the model).
    Outputs: those of the program, `fetch`, and for each updated `w` its new contents `w.next`; a training loop feeds
    these back (the metadata entry `recompute.updates` maps the names).  The metadata also contain the program's text,
    from which `load_compiled` restores it; `plan_metadata` (JSON text, a value that JSON can represent, or a dataclass;
    default: the program's plan) is stored as `recompute.plan`.

    UsageError for an unknown fetch or a parameter without contents, ModelError for an operator without an ONNX form.
    """
    as_program(program)
    if state not in ("defaults", "inputs"):
        raise UsageError(f"state must be 'defaults' or 'inputs', not {state!r}")
    step = _Step(program, inside=state == "defaults")
    for op in step.block.operators:
        step.add(op)
    names = [program[f].name for f in as_texts(fetch, "fetch", program)]
    return step.model(names, plan_metadata)


def save_step(
    program: Program,
    path: str | PathLike[str],
    *,
    fetch: Sequence[str | Variable] = (),
    plan_metadata: Any = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Writes the training step for a loop in any ONNX runtime: weights in, weights out.  Returns the state's path.

    The model at `path` is that of `export_step` with `state="inputs"`; the contents of parameters, buffers and state
    are in `NAME.state.safetensors` beside it, whose metadata have the entry `updates` (JSON: input → output with its
    new contents).  `rc.load`, `rc.load_compiled` and the command line read both from `path`.  `metadata`: further
    entries of the model's.  A pipe or device gets one model with defaults.  Errors as for `export_step`, `save_model`.
    """
    path = as_path(path)
    expect("metadata", {} if metadata is None else metadata, Mapping, "texts by name")
    if is_special(path):
        model = export_step(program, fetch=fetch, plan_metadata=plan_metadata)
        set_metadata(model, metadata or {})
        save_model(model, path)
        return path
    path = path.resolve() if path.is_symlink() else path
    beside = state_file(path)
    model = export_step(program, fetch=fetch, plan_metadata=plan_metadata, state="inputs")
    set_metadata(model, {**(metadata or {}), STATE_FILE: beside.name})
    entries = {p.key: p.value for p in model.metadata_props}
    fed = {i.name for i in model.graph.input}
    arrays = {v.name: contents(program, v) for v in _stored(_block_of(program)) if v.name in fed}
    with together():
        write_arrays(arrays, beside, {"format": "np", "updates": entries["recompute.updates"]})
        save_model(model, path)
    return beside


def state_file(path: Path) -> Path:
    """The file with the state of the step that `save_step` writes to `path`."""
    return path.with_name(f"{path.stem}.state.safetensors")


def _block_of(program: Program) -> Block:
    """The block to export: the one before lowering, which is only for kernels."""
    return program.logical if any(op.kernel for op in program.block.operators) else program.block


def _stored(block: Block) -> tuple[Value, ...]:
    return (*block.parameters, *block.buffers, *block.state)


class _Graph(FunctionBuilder):
    """Nodes of the main graph: constants become initializers, nodes carry their operator's role."""

    def __init__(self, names: Names) -> None:
        super().__init__(names, {})
        self.initializers: list[onnx.TensorProto] = []
        self.role = ""

    def store(self, name: str, array: np.ndarray) -> None:
        """Declares a constant as an initializer."""
        self.initializers.append(tensor_of(name, array))

    def append(self, node: onnx.NodeProto) -> None:
        """Adds a node, marked with the role."""
        if self.role:
            set_metadata(node, {"recompute.role": self.role})
        super().append(node)


class _Step:
    """Converts a block's operators into nodes and functions, in order.

    `inside`: what is stored has its contents as defaults; else only what safetensors lacks is inside, as constants.
    """

    def __init__(self, program: Program, *, inside: bool) -> None:
        self.program, self.inside = program, inside
        self.block = _block_of(program)
        self.values = self.block.values()
        self.graph = _Graph(Names(self.values))
        #: name in the block → current ONNX name, which updates change
        self.current = {name: name for name in self.values}
        self.writes: dict[str, int] = {}
        kept = {v.name for v in self.block.persistent()}
        for op in self.block.operators:
            for v in op.writes():
                if v.name in kept:  # not an update of what is fetched from host memory, which a Store writes
                    self.writes[v.name] = self.writes.get(v.name, 0) + 1
        self.left = dict(self.writes)
        self.functions: dict[tuple, onnx.FunctionProto] = {}
        self.function_names = Names()
        for name, v in self.values.items():
            self.graph.types[name] = v.type
        for c in self.block.constants:
            self.graph.initializers.append(tensor_of(c.value.name, c.numpy()))

    def add(self, op: Operator) -> None:
        """Adds one operator of the block."""
        if isinstance(op.op, Free):
            return
        ins = ["" if v is None else self.current[v.name] for v in op.inputs]
        outs = [self._written(op, v) for v in op.outputs]
        self.graph.prefix = next((o for o in outs if o), op.op.name)
        self.graph.role = op.role.value
        # random operators compute a cipher of the step counter: one function for forward and backward
        if onnx.defs.has(op.op.name, OPSET) and not op.op.random:
            self.graph.apply(op.op, ins, outs)
        else:
            self._call(op, ins, outs)

    def _written(self, op: Operator, v: Value | None) -> str:
        """An output's ONNX name; an update's last write is NAME.next, those before it NAME.next.1, ..."""
        if v is None or v.name not in self.writes:
            return "" if v is None else v.name
        self.left[v.name] -= 1
        name = f"{v.name}.next"
        if self.left[v.name]:
            name += f".{self.writes[v.name] - self.left[v.name]}"
        name = self.graph.names.take(name)
        self.graph.types[name] = v.type
        self.current[v.name] = name
        return name

    def _call(self, op: Operator, ins: list[str], outs: list[str]) -> None:
        """A call of the function of the operator, without absent values."""
        types = tuple(None if v is None else v.type for v in op.inputs)
        present = tuple(bool(o) for o in outs)
        key = (repr(op.op), types, present)
        if key not in self.functions:
            name = self.function_names.take(op.op.name)
            self.functions[key] = function_of(op.op, types, present, name)
        name = self.functions[key].name
        node = helper.make_node(
            name, [n for n in ins if n], [n for n in outs if n], name=self.graph.prefix, domain=DOMAIN
        )
        self.graph.append(node)

    # -- the result ----------------------------------------------------------------------------------------

    def model(self, fetch: Sequence[str], plan: Any) -> onnx.ModelProto:
        """The finished model."""
        opsets = [helper.make_opsetid("", OPSET)]
        if self.functions:
            opsets.append(helper.make_opsetid(DOMAIN, 1))
        model = helper.make_model(
            self._graph_proto(fetch),
            functions=list(self.functions.values()),
            opset_imports=opsets,
            ir_version=IR_VERSION,
            producer_name="onnx-recompute",
            producer_version=__version__,
        )
        set_metadata(model, self._metadata(plan, __version__))
        for v in _stored(self.block):
            if self.inside or not in_state_file(v.dtype):
                fill_tensor(model.graph.initializer.add(), v.name, contents(self.program, v))
        return model

    def _graph_proto(self, fetch: Sequence[str]) -> onnx.GraphProto:
        stored = [v for v in _stored(self.block) if self.inside or in_state_file(v.dtype)]
        inputs = [value_info(v.name, v.type) for v in (*self.block.inputs, *stored)]
        outputs = dict.fromkeys([*(self.current[n] for n in (*self.block.outputs, *fetch)), *self._updated().values()])
        graph = helper.make_graph(
            self.graph.nodes, self.block.name, inputs, [value_info(n, self.graph.types[n]) for n in outputs]
        )
        used = {i for n in self.graph.nodes for i in n.input}.union(outputs)
        graph.initializer.extend(t for t in self.graph.initializers if t.name in used)
        if len(self.block.operators) <= _MAX_TYPED:
            declared = {v.name for v in self.block.declared()}.union(outputs)
            written = [v for op in self.block.operators for v in op.writes()]
            graph.value_info.extend(value_info(v.name, v.type) for v in written if v.name not in declared)
        return graph

    def _updated(self) -> dict[str, str]:
        return {name: self.current[name] for name in self.writes}

    def _metadata(self, plan: Any, version: str) -> dict[str, str]:
        plan = self.program.plan if plan is None else plan
        program = self.program
        return {
            "recompute.version": version,
            "recompute.program": show(self.block),
            "recompute.updates": json.dumps(self._updated()),
            **({"recompute.plan": _json(plan)} if plan is not None else {}),
            **({"recompute.gradients": json.dumps(program.gradients)} if program.gradients else {}),
            **({"recompute.aliases": json.dumps(program.aliases)} if program.aliases else {}),
        }


def _json(plan: Any) -> str:
    if isinstance(plan, str):
        return plan

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        if isinstance(value, np.generic):
            return value.item()
        raise UsageError(f"plan_metadata contains a {type(value).__name__}, which JSON cannot represent")

    return json.dumps(plan, default=plain)


def function_of(op: Op, types: Types, present: Sequence[bool], name: str) -> onnx.FunctionProto:
    """The ONNX function of an operator for the given input types, with the outputs that are `present`."""
    formals = _formal_names(op, len(types))
    results = [f"y{i}" if len(present) > 1 else "y" for i in range(len(present))]
    ins = [n if t is not None else "" for n, t in zip(formals, types, strict=True)]
    outs = [r if there else "" for r, there in zip(results, present, strict=True)]
    g = FunctionBuilder(Names([*formals, *results]), {n: t for n, t in zip(formals, types, strict=True) if t})
    g.apply(op, ins, outs)
    attributes = ", ".join(f"{k}={v}" for k, v in op.attributes().items())
    return helper.make_function(
        DOMAIN,
        name,
        [n for n in ins if n],
        [n for n in outs if n],
        g.nodes,
        [helper.make_opsetid("", OPSET)],
        doc_string=f"{inspect.getdoc(type(op)) or op.name}" + (f"\n\nWith {attributes}." if attributes else ""),
    )


def _formal_names(op: Op, count: int) -> list[str]:
    """The parameter names of the type rule if it has single parameters; else x0, x1, ..."""
    parameters = list(inspect.signature(op.infer).parameters.values())
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(names) < count or any(n.startswith("y") for n in names):
        return [f"x{i}" for i in range(count)]
    return names[:count]
