"""Inlining of subgraphs in place of their node, with unique names and shared weights.

A weight of a subgraph (an initializer or a Constant node) is called `OUTPUT/ATTRIBUTE/NAME`, with the first output of
the node that has the subgraph: `y/then_branch/w`.  All runs of the subgraph share the weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from ..errors import ModelError, ModelWarning
from ..language.types import Value
from .graphs import first_output, graphs_of, names_read, rename_reads
from .inputs import inputs_behind, unknown
from .schema import describe
from .state import ImportState

_OURS = ("", "ai.onnx")
#: bytes of attributes whose copy is charged like one node
_BYTES = 1 << 15


class Subgraph:
    """A graph attribute of a node, which can be inlined any number of times.

    `scope`: prefix of its weights (see the module).  `names`: outer names of its initializers and constants; `nodes`:
    its other nodes; `read`: the inner names that something reads.
    """

    def __init__(self, importer: ImportState, node: onnx.NodeProto, attribute: str) -> None:
        inner = next((a for a in node.attribute if a.name == attribute), None)
        if inner is None:
            raise ModelError(f"its attribute '{attribute}' is absent")
        self.importer, self.attribute = importer, attribute
        self.graph = inner.g
        self.scope = scope_of(importer.scopes.get(first_output(node), first_output(node)), attribute)
        self.names: dict[str, str] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.targets: dict[str, str] = {}  # outer names of results
        self._units: int | None = None
        self.read = {*names_read(self.graph.node), *(o.name for o in self.graph.output)} - {""}
        for t in self.graph.initializer:
            self._hold(t.name, t)
        for n in self.graph.node:
            if n.op_type == "Constant" and n.domain in _OURS and len(n.output) == 1:
                self._hold(n.output[0], n)
            else:
                self.nodes.append(n)

    def _hold(self, inner: str, held: onnx.TensorProto | onnx.NodeProto) -> None:
        """Declares an initializer or constant."""
        self.names[inner] = name = f"{self.scope}/{inner}"
        if name in self.importer.held:
            return  # for the subgraphs of a loop's body this is called in each iteration
        if self.importer.has(name):
            raise ModelError(f"its {self.attribute} contains '{inner}', but the name '{name}' is already used")
        self.importer.held.add(name)
        if isinstance(held, onnx.TensorProto):
            self.importer.declare_initializer(name, held)
        else:
            self.importer.run_node(_constant(held, name))

    @property
    def units(self) -> int:
        """Nodes that are charged for one run, including the copies of its contents."""
        if self._units is None:
            self._units = len(self.nodes) + sum(n.ByteSize() for n in self.nodes if n.attribute) // _BYTES
        return max(1, self._units)

    def hoist(self, inputs: Sequence[str]) -> None:
        """Runs the loop-invariant nodes once: those that do not depend on `inputs` and are not random."""
        varying = set(inputs)
        kept: list[onnx.NodeProto] = []
        for n in self.nodes:
            if depends(n, varying):
                varying.update(n.output)
                kept.append(n)
            else:
                self.run([n], self.names, self.scope)
        self.nodes, self._units = kept, None

    def run(self, nodes: Sequence[onnx.NodeProto], names: dict[str, str], prefix: str) -> None:
        """Runs nodes with unique names; adds their outputs to `names` (inner name → outer name)."""
        body = []
        for n in nodes:
            if n.op_type == "Identity" and n.domain in _OURS and len(n.input) == len(n.output) == 1 and n.input[0]:
                names[n.output[0]] = names.get(n.input[0], n.input[0])  # weights are not copied
            else:
                body.append(self.renamed(n, names, prefix))
        self.importer.used.update(names_read(body), (names[o] for n in nodes for o in n.output if o in self.read))
        self.importer.run_nodes(body)

    def inline(self, prefix: str, wanted: dict[str, str]) -> dict[str, str]:
        """Runs the subgraph once; `wanted`: outer names of its inputs.  Returns the outer names of all its values."""
        names = {**self.names, **wanted}
        self.run(self.nodes, names, prefix)
        return names

    def renamed(self, node: onnx.NodeProto, names: dict[str, str], prefix: str) -> onnx.NodeProto:
        """A copy of a node with the names that it reads replaced, and new names (put into `names`) for its outputs."""
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{prefix}/{node.name or node.op_type}"
        rename_reads(copy, names)
        if any(a.type == onnx.AttributeProto.GRAPH for a in node.attribute):
            scope = f"{self.scope}/{first_output(node)}"
        else:
            scope = ""
        for i, o in enumerate(node.output):
            if o:
                copy.output[i] = names[o] = self.targets.get(o) or self.importer.builder.names.take(f"{prefix}/{o}")
        if scope:
            self.importer.scopes[first_output(copy)] = scope
        return copy


def _constant(node: onnx.NodeProto, name: str) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = copy.output[0] = name
    return copy


def scope_of(node: str, attribute: str) -> str:
    """The prefix of a subgraph's weights; `node`: the scope of its node."""
    return f"{node}/{attribute}"


def depends(node: onnx.NodeProto, varying: set[str]) -> bool:
    """Whether a node of a loop's body depends on the iteration; `varying`: the names that do."""
    if node.op_type.startswith(("Sequence", "Optional")) or _draws([node]):
        return True
    return not varying.isdisjoint(names_read([node]))


def _draws(nodes: Any) -> bool:
    """Whether nodes draw random numbers or update statistics, so that each iteration must run them."""
    return any(
        n.op_type in _EACH_TIME or n.op_type.startswith("Random") or any(
            _draws(g.node) for a in n.attribute for g in graphs_of(a)
        )
        for n in nodes
    )  # fmt: skip


_EACH_TIME = {"Bernoulli", "Multinomial", "Dropout", "BiasDropout", "BitmaskDropout", "BatchNormalization"}


def take_branch(importer: ImportState, node: onnx.NodeProto) -> None:
    """Inlines the chosen branch of an If with a known condition; of others both, and Where chooses a result."""
    condition = importer.contents(node.input[0])
    if condition is None:
        return _take_both(importer, node)
    if condition.array.size != 1:
        raise ModelError(f"its condition has {condition.array.size} elements, it needs one")
    branch = "then_branch" if bool(condition.array.reshape(-1)[0]) else "else_branch"
    body = _branch(importer, node, branch)
    body.targets = final_names(body, node.output)
    names = body.inline(f"{first_output(node)}/{branch}", {})
    for inner, outer in zip(body.graph.output, node.output, strict=False):
        if outer:
            importer.alias(outer, names.get(inner.name, inner.name))
    return None


def _branch(importer: ImportState, node: onnx.NodeProto, branch: str) -> Subgraph:
    body = Subgraph(importer, node, branch)
    if len(body.graph.output) < len(node.output):
        raise ModelError(f"its {branch} has {len(body.graph.output)} outputs, the node {len(node.output)}")
    return body


def _take_both(importer: ImportState, node: onnx.NodeProto) -> None:
    """Runs both branches, and chooses by the condition.  ModelError where they have side effects or differ in type."""
    base, why = first_output(node), f"its condition {unknown(importer, node.input[0])}"
    if importer.type_of(node.input[0]).size != 1:
        raise ModelError(f"its condition has {importer.type_of(node.input[0]).size} elements, it needs one")
    shape, condition, otherwise = (f"{base}/condition{ending}" for ending in ("/shape", "", "/not"))
    importer.known[shape] = importer.constant(np.zeros(0, np.int64))
    make = onnx.helper.make_node
    importer.run_nodes([make("Reshape", [node.input[0], shape], [condition]), make("Not", [condition], [otherwise])])
    both: list[list[str]] = []
    problems = importer.problems()
    for branch in ("then_branch", "else_branch"):
        body = _branch(importer, node, branch)
        if _draws(body.nodes):
            raise ModelError(f"{why}; its {branch} draws random numbers or updates statistics, so that it may not run")
        start = len(importer.builder.operators)
        names = body.inline(f"{base}/{branch}", {})
        _gate(importer, start, importer.value(condition if branch == "then_branch" else otherwise, "", 0))
        both.append([names.get(o.name, o.name) for o in body.graph.output])
    if importer.problems() > problems:
        raise ModelError(f"{why}, or else both of its branches must run")
    nodes = []
    for out, a, b in zip(node.output, *both, strict=False):
        if not out:
            continue
        if any(x in importer.sequences or x in importer.nothing for x in (a, b)):
            raise ModelError(f"{why}; its output '{out}' is a sequence or an optional")
        one, other = importer.type_of(a), importer.type_of(b)
        if one != other:
            raise ModelError(f"{why}; its branches give '{out}' the types {one} and {other}")
        nodes.append(make("Where", [condition, a, b], [out]))
    importer.used.update(names_read(nodes))
    warnings.warn(
        f"{describe(node)}: its condition is computed from data, so that both of its branches are computed and one is "
        f"chosen{_bound(inputs_behind(importer, node.input[0]))}",
        ModelWarning,
        stacklevel=2,
    )
    importer.run_nodes(nodes)


def _gate(importer: ImportState, start: int, chosen: Value) -> None:
    """Stops gradients of the operators from `start` on, a branch's, at all that they read from outside, unless it is
    chosen: 0 · NaN is NaN."""
    builder = importer.builder
    body, builder.operators[start:] = builder.operators[start:], []
    written = {v.name for o in body for v in o.writes()} | {c.value.name for c in builder.constants}
    written.update(v.name for v in (*importer.inputs, *importer.buffers.values()))  # those have no gradient
    read = {v.name: v for o in body for v in o.reads() if v.type.is_float and v.name not in written}
    gated = {name: builder.Gate(v, chosen) for name, v in read.items()}
    builder.operators += [replace(o, inputs=tuple(v and gated.get(v.name, v) for v in o.inputs)) for o in body]


def _bound(behind: Sequence[str]) -> str:
    """The option that binds these inputs, for a warning."""
    shown = ", ".join(f"{n!r}: VALUE" for n in behind)
    options = " ".join(f"--set {n}=VALUE" for n in behind)
    return f"; set={{{shown}}} ({options}) computes one of them" if behind else ""


def final_names(body: Subgraph, outputs: Sequence[str], skip: int = 0) -> dict[str, str]:
    """Inner name → outer name of the results that nodes of the subgraph write, each once."""
    written: dict[str, int] = {}
    for n in body.nodes:
        for o in n.output:
            written[o] = written.get(o, 0) + 1
    names: dict[str, str] = {}
    for inner, outer in zip(body.graph.output[skip:], outputs, strict=False):
        if outer and written.get(inner.name) == 1:
            names.setdefault(inner.name, outer)
    return names
