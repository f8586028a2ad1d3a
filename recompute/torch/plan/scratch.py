"""Bytes that PyTorch's operators allocate while they run, beside their results: measured, on a CPU, by one run of each.

No table would hold: an operator's temporaries depend on the library behind it, on strides and on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import Node

_MARK = "recompute::operator::"
#: signature of a node → bytes; an operator is measured once in a process (and number of threads)
_KNOWN: dict[str, int] = {}


def scratch(nodes: Sequence[Node], measure: bool) -> list[int]:
    """Bytes beside the results, of each node; 0 of what is not measured.

    `measure` runs what is not known yet once, on tensors of zeros, without a trace in PyTorch's random state.
    """
    keys = [signature(n) for n in nodes]
    if measure:
        new = {k: n for k, n in zip(keys, nodes, strict=True) if k not in _KNOWN}
        _measure({k: n for k, n in new.items() if k})
    return [_KNOWN.get(k, 0) for k in keys]


def signature(node: Node) -> str:
    """What a node's temporaries depend on: operator, shapes, strides, types, options, threads; "" if it cannot run."""
    import torch
    from torch.utils import _pytree as trees

    from .joint import is_mutable

    def described(a: Any) -> str:
        value = a.meta.get("val") if isinstance(a, torch.fx.Node) else a
        if isinstance(value, torch.Tensor):
            return f"{[_int(s) for s in value.shape]}{[_int(s) for s in value.stride()]}{value.dtype}"
        return repr(_int(value) if isinstance(value, torch.SymInt) else value)

    if not isinstance(node.target, torch._ops.OpOverload) or is_mutable(node) or node.target.namespace != "aten":
        return ""
    return f"{torch.get_num_threads()} {node.target} {trees.tree_map(described, (node.args, node.kwargs))}"


def _int(value: Any) -> Any:
    import torch

    return value.node.hint if isinstance(value, torch.SymInt) else value


def _measure(nodes: dict[str, Node]) -> None:
    """Runs each node once under PyTorch's profiler, and takes the most bytes at once less those of its results."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function
    from torch.utils._python_dispatch import _disable_current_modes

    if not nodes or torch.autograd._profiler_enabled():
        return
    by_number = dict(enumerate(nodes))
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            for i, key in by_number.items():
                args, kwargs = _arguments(nodes[key])
                try:
                    with record_function(f"{_MARK}{i}"):
                        nodes[key].target(*args, **kwargs)
                except (RuntimeError, IndexError):  # zeros are no input for it
                    _KNOWN[key] = 0
    results = {i: _written(nodes[key]) for i, key in by_number.items()}
    for i, most in _tops(profiled).items():
        _KNOWN.setdefault(by_number[i], max(0, most - results[i]))


def _arguments(node: Node) -> Any:
    import torch
    from torch.utils import _pytree as trees

    def real(a: Any) -> Any:
        value = a.meta.get("val") if isinstance(a, torch.fx.Node) else a
        if not isinstance(value, torch.Tensor):
            return _int(value)
        shape, strides = [_int(s) for s in value.shape], [_int(s) for s in value.stride()]
        count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        return torch.zeros(count, dtype=value.dtype, device=value.device).as_strided(shape, strides)

    return trees.tree_map(real, (node.args, node.kwargs))


def _written(node: Node) -> int:
    from .joint import scalar, storages

    return sum(scalar(storage.nbytes(), node) for storage in dict(storages(node)).values())


def _tops(profiled: Any) -> dict[int, int]:
    """Most bytes alive at once within each marked part, beyond what was there when it began."""
    found: dict[int, int] = {}
    stack = list(profiled.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        if event.name.startswith(_MARK):
            live = most = 0
            for _, size in sorted(_allocations(event)):
                live += size
                most = max(most, live)
            found[int(event.name.removeprefix(_MARK))] = most
        else:
            stack += event.children
    return found


def _allocations(event: Any) -> list[tuple[int, int]]:
    """(time, bytes allocated or, negative, freed) within an event of PyTorch's profiler."""
    found, stack = [], [event]
    while stack:
        e = stack.pop()
        if e.tag.name == "Allocation":
            found.append((e.start_time_ns, e.extra_fields.alloc_size))
        stack += e.children
    return found
