"""The joint graph in the order of a plan, with clones where it recomputes."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .joint import Joint, Operation, storages, trains_norm
from .random import DRAWN


class Rewriter:
    """Writes a joint graph in another order: each value as it was computed last, views where they are read.

    `saved`, `symbols`: what the backward pass reads of the forward pass: values (and inputs), and sizes.
    """

    def __init__(self, joint: Joint, graph: Graph) -> None:
        self.joint, self.graph = joint, graph
        self.latest: dict[Node, Node] = {}
        self.views: dict[int, list[Node]] = {}
        self.early: set[Node] = set()
        self.saved: dict[Node, None] = {}
        self.symbols: dict[Node, None] = {}
        self.in_forward = True
        self.ran: set[int] = set()

    def written(self, order: Sequence[int]) -> Graph:
        """The graph of an order of execution; -1 stands for the start of the backward pass."""
        joint = self.joint
        for node, kind in joint.kinds.items():
            if kind in ("input", "tangent", "constant"):
                self._put(node)
        for i in order:
            if i < 0:
                self._end_forward()
            else:
                self._run(joint.operations[i], i in self.ran)
                self.ran.add(i)
        gradients = [None if n is None else self._get(n) for n in joint.ends[1]]
        (end,) = joint.module.graph.find_nodes(op="output")
        output = self.graph.output((*self.forward, *gradients))
        output.meta = dict(end.meta)
        return self.graph

    def _end_forward(self) -> None:
        """Ends the forward pass: first come its outputs, and sizes that the backward pass may ask for."""
        for node, kind in self.joint.kinds.items():
            if kind == "symbol" and all(self._is_there(n) for n in node.all_input_nodes):
                self._get(node)
        self.forward = [None if n is None else self._get(n) for n in self.joint.ends[0]]
        self.in_forward = False

    def _is_there(self, node: Node) -> bool:
        """Whether a node can be had now, without what has not run."""
        if node in self.latest:
            return True
        views = self.joint.kinds[node] in ("view", "symbol")
        return views and all(self._is_there(n) for n in node.all_input_nodes)

    def _put(self, node: Node) -> Node:
        """A copy of a node that reads what is latest."""
        new = self.graph.node_copy(node, self._get)
        new.meta = dict(node.meta)
        if self.in_forward and self.joint.kinds[node] not in ("constant", "tangent"):
            self.early.add(new)
        self.latest[node] = new
        return new

    def _get(self, node: Node) -> Node:
        """The new node of a node; views and sizes are created where they are first used."""
        new = self.latest.get(node)
        kind = self.joint.kinds[node]
        if new is None or (kind == "view" and not self.in_forward and new in self.early):
            new = self._put(node)
            if kind == "view":
                for v in self.joint.values(node):
                    self.views.setdefault(v, []).append(node)
        if not self.in_forward and new in self.early:
            (self.saved if any(True for _ in storages(new)) else self.symbols)[new] = None
        return new

    def _run(self, o: Operation, again: bool) -> None:
        for v in o.writes if again else ():
            for view in self.views.pop(v, ()):
                self.latest.pop(view, None)
        if again and trains_norm(o.node):
            self._normalise_again(o)
        elif not again and DRAWN in o.node.meta:
            drawn = self.latest[o.node.meta[DRAWN]]
            self.latest[o.node] = item = self.graph.call_function(operator.getitem, (drawn, 0))
            item.meta = dict(o.node.meta)
            self.early.add(item)
            self._mark(item)
        else:
            for node in o.members:
                self._mark(self._put(node))

    def _mark(self, new: Node) -> None:
        """In which pass a node runs: PyTorch's extraction then moves nothing."""
        new.meta["partitioner_tag"] = "must_be_in_forward" if self.in_forward else "must_be_in_backward"
        new.meta.pop("recompute", None)

    def _normalise_again(self, o: Operation) -> None:
        """Batch normalisation without running statistics: they are updated already."""
        x, scale, bias, _, _, train, momentum, epsilon = o.node.args
        args = [None if n is None else self._get(n) for n in (x, scale, bias)]
        again = self.graph.call_function(
            torch.ops.aten._native_batch_norm_legit.no_stats, (*args, train, momentum, epsilon)
        )
        again.meta = {**o.node.meta, "val": o.node.meta["val"][:3]}
        self._mark(again)
        for node in o.members[1:]:
            if node.args[1] < 3:
                item = self.graph.call_function(operator.getitem, (again, node.args[1]))
                item.meta = dict(node.meta)
                self._mark(item)
                self.latest[node] = item


def rewritten(joint: Joint, order: Sequence[int]) -> tuple[GraphModule, list[Node], list[Node]]:
    """The joint graph in an order of its operations (-1: the backward pass begins), what is saved, and sizes saved."""
    writer = Rewriter(joint, torch.fx.Graph())
    graph = writer.written(order)
    return torch.fx.GraphModule(joint.module, graph), list(writer.saved), list(writer.symbols)


def cut(joint: Joint, order: Sequence[int]) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward graph of an order of execution, as AOTAutograd wants them."""
    from torch._functorch import partitioners

    module, saved, symbols = rewritten(joint, order)
    extract = partitioners._extract_fwd_bwd_modules
    options: dict[str, Any] = {"saved_sym_nodes": symbols, "num_fwd_outputs": joint.forward_outputs}
    if "saved_opaque_nodes" in inspect.signature(extract).parameters:
        options["saved_opaque_nodes"] = []
    return extract(module, saved, **options)
