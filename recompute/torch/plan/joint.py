"""AOTAutograd's joint graph of forward and backward pass as planners see it: values with bytes, operators, views.

A value is a storage: all nodes whose fake tensors share one are one value, and those that only look at it in another
way (views) take no memory and no time, so that they may be made again anywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...errors import UsageError

#: names of AOTAutograd's operators whose second run needs another form: it must not see statistics that are updated
_NORMS = ("_native_batch_norm_legit_functional",)


@dataclass
class Operation:
    """A node that computes: it `writes` values by their numbers, `reads` others, and may run a second time or not.

    `members`: the node itself, and the `getitem`s of its results.  `forward`: whether it runs in the forward pass.
    `why`: the reason why it may run only once ("" where it may run again).
    """

    node: Node
    members: list[Node]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    forward: bool = False
    why: str = ""


@dataclass
class Joint:
    """The joint graph, taken apart.

    `sizes`: bytes of each value, by its number; `names`: names of the nodes that write them.  `held`: bytes of
    parameters, buffers, inputs and constants, which whoever calls holds all the time.  `tangents`: values that come
    with the backward pass, and `outputs`: those that leave the graph; both live to the end.  `operations`: in order,
    those of the forward pass first.  `symbolic`: whether sizes are those of the first example only.
    """

    module: GraphModule
    forward_outputs: int
    operations: list[Operation] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    tangents: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    held: int = 0
    symbolic: bool = False
    number: dict[int, int] = field(default_factory=dict)
    kinds: dict[Node, str] = field(default_factory=dict)

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the graph, in order."""
        return list(self.module.graph.nodes)

    @cached_property
    def ends(self) -> tuple[list[Node | None], list[Node | None]]:
        """The outputs of the forward and of the backward pass."""
        from torch.utils._pytree import arg_tree_leaves

        (end,) = self.module.graph.find_nodes(op="output")
        leaves = arg_tree_leaves(*end.args)
        return leaves[: self.forward_outputs], leaves[self.forward_outputs :]

    def values(self, node: Node) -> tuple[int, ...]:
        """Numbers of the values (-1: what is always held) that a node's result lies in."""
        return tuple(dict.fromkeys(self.number[key] for key, _ in storages(node) if key in self.number))


def read_joint(module: GraphModule, forward_outputs: int) -> Joint:
    """The joint graph taken apart; `forward_outputs`: how many of its outputs are the forward pass's.

    UsageError for what cannot be planned: opaque objects, sizes that depend on data.
    """
    joint = Joint(module, forward_outputs)
    changed = _changed(module)
    owner: dict[Node, Operation] = {}
    for node in module.graph.nodes:
        joint.kinds[node] = kind = _kind(joint, node, owner)
        if kind in ("input", "constant"):
            joint.held += _declare(joint, node, held=True)
        elif kind == "tangent":
            _declare(joint, node)
        elif kind == "operation":
            owner[node] = _operation(joint, node, changed)
            joint.operations.append(owner[node])
        elif kind == "member":
            owner[node] = owner[node.args[0]]
            owner[node].members.append(node)
    tangents = [n for n, kind in joint.kinds.items() if kind == "tangent"]
    joint.tangents = tuple(dict.fromkeys(v for n in tangents for v in joint.values(n) if v >= 0))
    leaving = [n for n in (*joint.ends[0], *joint.ends[1]) if n is not None]
    joint.outputs = tuple(dict.fromkeys(v for n in leaving for v in joint.values(n) if v >= 0))
    _place(joint, owner)
    return joint


def storages(node: Node) -> Iterator[tuple[int, Any]]:
    """(identity, storage) of the tensors that a node results in."""
    value = node.meta.get("val")
    for leaf in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            yield storage._cdata, storage


def scalar(value: Any, node: Node) -> int:
    """A size as a number: of a symbol, what it is in the example.  UsageError where only data tell."""
    if isinstance(value, int):
        return value
    hint = getattr(value.node, "hint", None)
    if hint is None:
        raise UsageError(
            f"torch.compile: the size of '{node.name}' ({node.target}) depends on data: no peak can be said"
        )
    return int(hint)


def _kind(joint: Joint, node: Node, owner: dict[Node, Operation]) -> str:
    """The kind of a node: input, tangent, constant, output, symbol, operation, member (of one's results) or view."""
    if node.op == "placeholder":
        return "tangent" if "tangents" in str(node.target) else "input"
    if node.op in ("get_attr", "output"):
        return {"get_attr": "constant", "output": "output"}[node.op]
    if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
        return "symbol"
    if node.target is operator.getitem and node.args[0] in owner:
        return "member"
    keys = [key for key, _ in storages(node)]
    if not keys or is_mutable(node) or any(key not in joint.number for key in keys):
        return "operation"
    return "view"


def _declare(joint: Joint, node: Node, held: bool = False) -> int:
    """Numbers the values that come to be at a node; bytes of these."""
    total = 0
    for key, storage in storages(node):
        if key in joint.number:
            continue
        count = storage.nbytes()
        joint.symbolic |= not isinstance(count, int)
        count = scalar(count, node)
        total += count
        joint.number[key] = -1 if held else len(joint.sizes)
        if not held:
            joint.sizes.append(count)
            joint.names.append(node.name)
    return total


def _operation(joint: Joint, node: Node, changed: set[int]) -> Operation:
    reads = tuple(dict.fromkeys(v for n in node.all_input_nodes for v in joint.values(n) if v >= 0))
    before = len(joint.sizes)
    _declare(joint, node)
    return Operation(node, [node], reads, tuple(range(before, len(joint.sizes))), why=_once(node, changed))


def is_mutable(node: Node) -> bool:
    """Whether a node changes one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _changed(module: GraphModule) -> set[int]:
    """Storages that the graph changes in place: running statistics."""
    nodes: set[int] = set()
    for node in module.graph.nodes:
        if node.op == "call_function" and is_mutable(node):
            named = zip(node.target._schema.arguments, node.args, strict=False)
            nodes.update(
                key
                for argument, value in named
                if argument.alias_info is not None and argument.alias_info.is_write and hasattr(value, "meta")
                for key, _ in storages(value)
            )
    return nodes


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers: by PyTorch's tag, unless it is attention without dropout."""
    target = node.target
    if "inductor_random" in str(target) or "inductor_seed" in str(target) or "rng" in str(target):
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [a.name for a in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    ratio = node.args[at] if len(node.args) > at else node.kwargs.get("dropout_p", 0.0)
    return ratio != 0.0


def trains_norm(node: Node) -> bool:
    """Whether this is batch normalisation by the statistics of the batch, which reads running ones only to update."""
    return getattr(node.target, "_opname", "") in _NORMS and len(node.args) > 5 and node.args[5] is True


def _once(node: Node, changed: set[int]) -> str:
    """Why a node may not run again; "" if it may."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return "is not one of PyTorch's operators"
    if node.target.namespace not in ("aten", "prims"):
        return "is an operator of a library: its results may change"
    if is_mutable(node) or not any(True for _ in storages(node)):
        return "has an effect"
    if is_random(node):
        return "draws random numbers"
    if not trains_norm(node) and any(key in changed for n in node.all_input_nodes for key, _ in storages(n)):
        return "reads what the forward pass updates"
    return ""


def _place(joint: Joint, owner: dict[Node, Operation]) -> None:
    """Which operations run in the forward pass; those of the backward pass that could run at any time wait.

    The forward pass runs what its outputs and updates need, random operators, and what makes something smaller for the
    backward pass (a mask of a float tensor): either can be kept then.
    """
    late: set[Node] = set()
    for node in joint.nodes:
        in_backward = is_mutable(node) and "backward" in str(node.meta.get("partitioner_tag", ""))
        if joint.kinds[node] == "tangent" or in_backward or any(n in late for n in node.all_input_nodes):
            late.add(node)
    needed = _ancestors(joint.ends[0])
    effects = [
        o.node for o in joint.operations if o.node not in late and o.why in ("has an effect", "draws random numbers")
    ]
    needed.update(_ancestors(effects))
    for o in joint.operations:
        written = sum(joint.sizes[v] for v in o.writes)
        smaller = bool(o.reads) and 2 * written <= max(joint.sizes[v] for v in o.reads)
        o.forward = o.node not in late and (any(m in needed for m in o.members) or (smaller and not o.why))
    for n in _ancestors([o.node for o in joint.operations if o.forward]):  # what such a mask needs
        if n in owner:
            owner[n].forward = True
    first = [o for o in joint.operations if o.forward]
    joint.operations = first + _as_late_as_possible([o for o in joint.operations if not o.forward], late)


def _ancestors(ends: Iterable[Node | None]) -> set[Node]:
    nodes: set[Node] = set()
    stack = [n for n in ends if n is not None]
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack += node.all_input_nodes
    return nodes


def _as_late_as_possible(operations: list[Operation], late: set[Node]) -> list[Operation]:
    """The backward pass, in which what waits for no gradient runs right before what reads it first."""
    writer = {v: o for o in operations if o.node not in late for v in o.writes}
    done: set[int] = set()
    order: list[Operation] = []

    def run(o: Operation) -> None:
        if id(o) in done:
            return
        done.add(id(o))
        for v in o.reads:
            if v in writer:
                run(writer[v])
        order.append(o)

    for o in operations:
        if o.node in late or o.why:
            run(o)
    for o in operations:  # an output of the backward pass that no gradient reaches
        run(o)
    return order
