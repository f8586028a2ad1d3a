"""Rewrites of the graph that PyTorch traced, before it becomes ONNX: what exporters would lose is written plainly."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


def detach_no_grad(graph_module: Any) -> None:
    """Detaches what comes out of regions under `torch.no_grad()`, which exporters inline without a trace."""
    import torch

    graph = graph_module.graph
    for node in list(graph.nodes):
        if "set_grad_enabled" not in str(node.target) or not node.args or node.args[0] is not False:
            continue
        for user in list(node.users):
            if user.target is operator.getitem:
                with graph.inserting_after(user):
                    cut = graph.call_function(torch.ops.aten.detach.default, (user,))
                cut.meta = dict(user.meta)
                user.replace_all_uses_with(cut, delete_user_cb=lambda n, cut=cut: n is not cut)
    graph_module.recompile()


def as_dropout(graph_module: Any) -> None:
    """Writes dropout in place or of channels, and masks drawn by hand (stochastic depth), as plain dropout, which
    exporters keep.

    A mask of ones with probability p is p times the dropout of ones: in inference p itself, as the mean is.
    """
    import torch

    aten = torch.ops.aten
    graph = graph_module.graph

    def dropped_ones(like: Any, p: float, node: Any) -> Any:
        ones = _described(graph.call_function(aten.ones_like.default, (like,)), node)
        return _described(graph.call_function(aten.dropout.default, (ones, p, True)), node)

    for node in list(graph.nodes):
        if node.target is aten.dropout_.default:
            _in_place_of(node, lambda node: graph.call_function(aten.dropout.default, node.args))
        elif node.target in (aten.feature_dropout.default, aten.feature_dropout_.default) and node.args[2]:

            def by_channel(node: Any) -> Any:
                x, p = node.args[:2]
                axes = list(range(2, x.meta["val"].ndim))
                one = _described(graph.call_function(aten.sum.dim_IntList, (x, axes, True)), node)
                return graph.call_function(aten.mul.Tensor, (x, dropped_ones(one, p, node)))

            _in_place_of(node, by_channel)
        elif (p := _kept_share(node)) is not None:

            def mask(node: Any, p: float = p) -> Any:
                return graph.call_function(aten.mul.Tensor, (dropped_ones(node.args[0], 1 - p, node), p))

            _in_place_of(node, mask)
    graph_module.recompile()


def _kept_share(node: Any) -> float | None:
    """The probability p of a mask of ones and zeros: bernoulli(p), or floor(p + uniform)."""
    import torch

    aten = torch.ops.aten
    p: Any = None
    if node.target in (aten.bernoulli_.float, aten.bernoulli.p) and len(node.args) > 1:
        p = node.args[1]
    elif node.target in (aten.floor.default, aten.floor_.default) and node.args[0].target is aten.add.Tensor:
        drawn, p = node.args[0].args[:2]
        if getattr(drawn, "target", None) not in (aten.rand.default, aten.rand_like.default):
            return None
    return p if isinstance(p, float) and 0 < p < 1 else None


def _described(new: Any, node: Any) -> Any:
    new.meta = dict(node.meta)
    return new


def _in_place_of(node: Any, make: Callable[[Any], Any]) -> None:
    """Replaces a node, and what it changed in place for readers after it."""
    graph = node.graph
    with graph.inserting_before(node):
        new = _described(make(node), node)
    node.replace_all_uses_with(new)
    if str(node.target).split(".")[-2].endswith("_"):
        order = {n: i for i, n in enumerate(graph.nodes)}
        node.args[0].replace_all_uses_with(new, delete_user_cb=lambda user: order[user] > order[node])
    graph.erase_node(node)
