"""The backend `recompute` of torch.compile: a plan within a budget, then PyTorch's own compiler."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from ...errors import ModelWarning, UsageError, nearest
from .inductor import FusedPartitioner, inductor
from .partition import Partitioner, budget_of, only, unread_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

#: plans by options: a graph of a known structure, of other sizes, takes the plan of the first
_PLANS: dict[str, dict[str, list[list[int]]]] = {}
_OPTIONS = ("budget", "inner", "cost", "effort")
_INNER = ("aot_eager", "inductor")


def recompute(module: GraphModule, inputs: list[Any], *, options: dict[str, Any] | None = None, **_: Any) -> Callable:
    """Compiles a graph of TorchDynamo: `torch.compile(model, backend="recompute", options={"budget": "60%"})`.

    `options`: `budget` (bytes, or a share of the step without recomputation), `inner` (`aot_eager` or `inductor`),
    `cost` (a device that prices operators, as `h200`), `effort` (of planning, 1 by default).  UsageError for others.
    """
    settings = dict(options or {})
    for name in settings:
        if name not in _OPTIONS:
            raise UsageError(f"backend 'recompute' has no option '{name}'{nearest(name, _OPTIONS)}")
    if "budget" not in settings:
        raise UsageError("backend 'recompute' needs a budget: options={'budget': '60%'} or {'budget': '8GiB'}")
    inner = settings.get("inner", "aot_eager")
    if inner not in _INNER:
        raise UsageError(f"backend 'recompute': inner must be {' or '.join(map(repr, _INNER))}, not {inner!r}")
    reason: Any = getattr(module, "compile_subgraph_reason", None)
    if getattr(reason, "graph_break", False):
        warnings.warn(
            f"torch.compile: the module is cut into several graphs ({str(reason.reason)[:200]}): the budget holds for "
            "each by itself, not for all together. fullgraph=True refuses such modules",
            ModelWarning,
            stacklevel=2,
        )
    budget = budget_of(settings["budget"])
    plans = _PLANS.setdefault(f"{budget} {settings}", {})
    asked = budget, settings.get("cost"), settings.get("effort", 1.0)
    if inner == "inductor":
        return inductor(module, inputs, FusedPartitioner(*asked, plans=plans))
    return eager(module, inputs, Partitioner(*asked, plans=plans))


def eager(module: GraphModule, inputs: list[Any], partition: Partitioner) -> Callable:
    """Both graphs as they are: one call of PyTorch's operators after the other."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    compiled = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
    partition.unread = unread_bytes(inputs)
    with only(partition):
        call = compiled(module, inputs)
    return _within_planned(call, inputs) if any(f.joint.symbolic for f in partition.figures) else call


def _within_planned(call: Callable, inputs: list[Any]) -> Callable:
    """The call with a check: a ModelWarning, once, for inputs that are larger than the planned sizes."""
    planned = [_size(i) for i in inputs]
    warned = False

    @functools.wraps(call)
    def checked(*arguments: Any) -> Any:
        nonlocal warned
        if not warned and any(_size(g) > size for g, size in zip(arguments, planned, strict=False)):
            warned = True
            text = (
                "torch.compile: an input is larger than the one whose sizes were planned: the peak that was said does "
                "not hold for it. Call with the largest sizes first, or with dynamic=False, which plans for each"
            )
            warnings.warn(text, ModelWarning, stacklevel=2)
        return call(*arguments)

    return checked


def _size(value: Any) -> int:
    """Elements of a tensor, those of the example for symbolic sizes; 0 of all else."""
    if not isinstance(value, torch.Tensor):
        return 0
    count: Any = value.numel()
    return int(count if isinstance(count, int) else count.node.hint)
