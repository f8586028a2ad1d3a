"""Bytes that PyTorch's operators allocate while they run, beside their results: measured, on a CPU, by one run of each.

No table would hold: an operator's temporaries depend on the library behind it, on strides and on the number of threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as trees

from ...errors import ModelWarning

_MARK = "recompute::operator::"
#: signature of a call → bytes; an operator is measured once in a process (and number of threads)
_KNOWN: dict[str, int] = {}


@dataclass(frozen=True)
class Call:
    """One call of an operator: its arguments and results are (fake) tensors."""

    target: Any
    args: Any
    kwargs: Any
    result: Any

    @classmethod
    def of(cls, node: Node) -> Call:
        """The call that a node of a graph stands for."""
        args, kwargs = trees.tree_map(
            lambda a: a.meta.get("val") if isinstance(a, torch.fx.Node) else a, (tuple(node.args), dict(node.kwargs))
        )
        return cls(node.target, args, kwargs, node.meta.get("val"))

    def described(self) -> Call:
        """This call with shapes in place of tensors: it holds no storage."""

        def shape_of(a: Any) -> Any:
            if not isinstance(a, torch.Tensor):
                return _int(a)
            return Shape(tuple(map(_int, a.shape)), tuple(map(_int, a.stride())), a.dtype, a.device, _bytes(a))

        return Call(self.target, *trees.tree_map(shape_of, (self.args, self.kwargs, self.result)))

    @property
    def signature(self) -> str:
        """A key of the bytes of temporaries: operator, arguments, threads; "" if it cannot be run."""
        target = self.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or target.namespace != "aten":
            return ""
        return f"{torch.get_num_threads()} {target} {self.args} {self.kwargs}"


@dataclass(frozen=True)
class Shape:
    """A tensor without its storage; `bytes` are the storage's."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    device: Any
    bytes: int

    def __repr__(self) -> str:
        return f"{self.shape}{self.strides}{self.dtype}"

    def zeros(self) -> Any:
        """A tensor of this form."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        count = 0 if 0 in self.shape else 1 + last
        return torch.zeros(count, dtype=self.dtype, device=self.device).as_strided(self.shape, self.strides)


def _bytes(tensor: Any) -> int:
    return int(_int(tensor.untyped_storage().nbytes())) if tensor.layout is torch.strided else 0


def scratch(calls: Sequence[Call], measure: bool) -> list[int]:
    """Bytes beside the results, of each call; 0 of what is not measured.

    `measure` runs what is not known yet once, on tensors of zeros, without a trace in PyTorch's random state.
    """
    calls = [c.described() for c in calls]
    if measure:
        _measure({c.signature: c for c in calls if c.signature not in _KNOWN and c.signature})
    return [_KNOWN.get(c.signature, 0) for c in calls]


def _int(value: Any) -> Any:
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _measure(calls: dict[str, Call]) -> None:
    """Runs each once under PyTorch's profiler, and takes the most bytes at once less those of its results."""
    from torch.profiler import ProfilerActivity, profile, record_function
    from torch.utils._python_dispatch import _disable_current_modes

    if not calls:
        return
    if torch.autograd._profiler_enabled():
        text = "torch.compile: PyTorch's profiler is on: operators' temporaries cannot be measured, and do not count"
        warnings.warn(text, ModelWarning, stacklevel=2)
        return
    keys, unknown = list(calls), set()

    def real(a: Any) -> Any:
        return a.zeros() if isinstance(a, Shape) else a

    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]), watched:
        for i, key in enumerate(keys):
            call = calls[key]
            try:
                args, kwargs = trees.tree_map(real, (call.args, call.kwargs))
                with record_function(f"{_MARK}{i}"):
                    call.target(*args, **kwargs)
            except (RuntimeError, IndexError, TypeError, ValueError):  # zeros are no input for it
                _KNOWN[key] = 0
                unknown.add(str(call.target))
    if unknown:
        text = f"torch.compile: {', '.join(sorted(unknown))} cannot run on zeros: temporaries of these do not count"
        warnings.warn(text, ModelWarning, stacklevel=2)
    for i, most in _tops(watched).items():
        written = sum(r.bytes for r in trees.tree_leaves(calls[keys[i]].result) if isinstance(r, Shape))
        _KNOWN.setdefault(keys[i], max(0, most - written))


def _tops(profiled: Any) -> dict[int, int]:
    """Most bytes alive at once within each marked part, beyond what was there when it began."""
    tops: dict[int, int] = {}
    stack = list(profiled.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        if event.name.startswith(_MARK):
            live = most = 0
            for _, size in sorted(_allocations(event)):
                live += size
                most = max(most, live)
            tops[int(event.name.removeprefix(_MARK))] = most
        else:
            stack += event.children
    return tops


def _allocations(event: Any) -> list[tuple[int, int]]:
    """(time, bytes allocated or, negative, freed) within an event of PyTorch's profiler."""
    allocations, stack = [], [event]
    while stack:
        e = stack.pop()
        if e.tag.name == "Allocation":
            allocations.append((e.start_time_ns, e.extra_fields.alloc_size))
        stack += e.children
    return allocations
