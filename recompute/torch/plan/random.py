"""Random operators of a joint graph, rewritten so that a mask of one byte an element is all that has to be kept.

They are never run again: a second draw would give other numbers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

#: the mark of a result of dropout: the node that drew its mask
DRAWN = "recompute_drawn"


def open_masks(module: GraphModule) -> None:
    """Rewrites dropout in place: the same numbers, from a mask of bool that is a node of its own."""
    aten = torch.ops.aten
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.bernoulli.p and node.meta["val"].dtype.is_floating_point:
            _through_bool(module, node)
        elif node.target is aten.native_dropout.default and 0 < node.args[1] < 1 and node.args[2]:
            _dropout(module, node)
        elif node.target is aten.native_batch_norm_backward.default and node.args[7] is True:
            # running statistics are read in evaluation only, but would be kept
            node.args = (*node.args[:3], None, None, *node.args[5:])


def _call(module: GraphModule, target: Any, args: tuple, like: Node, **kwargs: object) -> Node:
    node = module.graph.call_function(target, args, kwargs)
    with like.meta["val"].fake_mode:
        values = [a.meta["val"] if hasattr(a, "meta") else a for a in args]
        node.meta = {k: v for k, v in like.meta.items() if k != "tensor_meta"}
        node.meta["val"] = target(*values, **kwargs)
    return node


def _take_place(new: Node, old: Node) -> None:
    """Views that were made of the old node's storage are of the new one's."""
    new.meta["val"], old.meta["val"] = old.meta["val"], new.meta["val"]


def _through_bool(module: GraphModule, node: Node) -> None:
    """Zeros and ones that were drawn as numbers become bool, and numbers again where they are read."""
    copy = torch.ops.aten._to_copy.default
    readers = list(node.users)
    with module.graph.inserting_after(node):
        mask = _call(module, copy, (node,), node, dtype=torch.bool)
    with module.graph.inserting_after(mask):
        numbers = _call(module, copy, (mask,), node, dtype=node.meta["val"].dtype)
    for reader in readers:
        reader.replace_input_with(node, numbers)
    _take_place(numbers, node)


def _dropout(module: GraphModule, node: Node) -> None:
    """The result of dropout as a node of its own, x * mask / (1 - p), which is what its gradient computes of dy.

    Its first run costs nothing: the operator that draws the mask has the result already (`DRAWN` names it).
    """
    results = {n.args[1]: n for n in node.users if n.target is operator.getitem}
    if 0 not in results:
        return
    x, old = node.args[0], results[0]
    if 1 not in results:
        with module.graph.inserting_after(node):
            results[1] = module.graph.call_function(operator.getitem, (node, 1))
            results[1].meta = {**old.meta, "val": node.meta["val"][1]}
    scale = 1 / (1 - node.args[1])
    with module.graph.inserting_after(max(results.values(), key=list(module.graph.nodes).index)):
        scaled = _call(module, torch.ops.aten.native_dropout_backward.default, (x, results[1], scale), old)
    old.replace_all_uses_with(scaled)
    _take_place(scaled, old)
    node.meta["val"] = (old.meta["val"], *node.meta["val"][1:])
    scaled.meta[DRAWN] = node
    module.graph.erase_node(old)
