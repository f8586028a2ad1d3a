"""Seconds of a node of a joint graph: the roofline, by PyTorch's own counts of operations and the tensors' bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as trees

from ...devices import Device, device, this_cpu
from ...errors import UsageError

#: element types of PyTorch that have a rate of their own
DTYPES = {"torch.float16": "f16", "torch.bfloat16": "bf16", "torch.float64": "f64"}


def machine_of(cost: str | Device | None, on: str) -> Device:
    """The device by whose rates a graph is priced: the one that is named, else where its tensors lie."""
    if isinstance(cost, Device):
        return cost
    if cost is not None:
        return device(cost)
    if on == "cuda":
        from ...cost import costs_of

        return costs_of("gpu:0")
    return this_cpu()


def seconds(node: Node, machine: Device) -> float:
    """Time of one node: the longer of its operations (torch.utils.flop_counter) and its traffic, and its start."""
    tensors = _tensors([n.meta.get("val") for n in node.all_input_nodes])
    results = _tensors([node.meta.get("val")])
    moved = sum(_bytes(t, node) for t in (*tensors, *results))
    kind = next((str(t.dtype) for t in (*tensors, *results) if t.dtype.is_floating_point), "")
    flops = _flops(node, *trees.tree_map(_example, (node.args, node.kwargs)))
    return machine.roofline(flops, moved, DTYPES.get(kind, "f32")) + machine.launch


def _flops(node: Node, args: Any, kwargs: Any) -> float:
    """Operations that PyTorch counts for a node; 0 where it counts none."""
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0.0
    from .joint import scalar

    return float(scalar(count(*args, **kwargs, out_val=node.meta["val"]), node))


def _example(argument: Any) -> Any:
    return argument.meta.get("val") if hasattr(argument, "meta") and hasattr(argument, "all_input_nodes") else argument


def _tensors(values: list[Any]) -> list[Tensor]:
    return [t for t in trees.tree_leaves(values) if isinstance(t, torch.Tensor)]


def _bytes(tensor: Tensor, node: Node) -> int:
    from .joint import scalar

    return scalar(tensor.numel(), node) * tensor.element_size()


def device_kind(nodes: list[Node]) -> str:
    """The kind of device of a graph's tensors: `cpu`, `cuda`, ...  UsageError for a graph on several kinds."""
    kinds = {t.device.type for n in nodes for t in _tensors([n.meta.get("val")]) if t.dim() > 0} - {"meta"}
    if len(kinds) > 1:
        raise UsageError(f"torch.compile: the graph's tensors lie on {', '.join(sorted(kinds))}: one memory is planned")
    return kinds.pop() if kinds else "cpu"
