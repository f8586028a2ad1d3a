"""A step of eager PyTorch: its operators, and the bytes that are alive at each, checkpoints included.

The step runs on a copy of the module: the same Python code, autograd engine and checkpoints.  So what is alive is
counted, not modelled.  Temporaries of operators are those of `scratch`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module
from torch.utils import _pytree as trees

from ...devices import Device
from ...errors import UsageError
from .costs import DTYPES
from .scratch import Call, scratch

#: bytes of the state of PyTorch's random numbers on a CPU, which a checkpoint keeps
RANDOM_STATE = 5056


@dataclass
class Step:
    """Memory and time of one step.  `calls`: (operator, phase, bytes alive after it).  `seconds`: of all operators.

    Phases are "" until the first checkpointed block runs again, then the name of the block that ran again last.
    """

    held: int
    calls: list[tuple[Call, str, int]] = field(default_factory=list)
    beside: int = 0
    seconds: float = 0.0

    def peaks(self, measure: bool) -> dict[str, int]:
        """Most bytes alive at once in each phase, parameters, buffers and inputs included."""
        result: dict[str, int] = {}
        temporaries = scratch([c for c, _, _ in self.calls], measure)
        for (_, phase, alive), temporary in zip(self.calls, temporaries, strict=True):
            total = self.held + self.beside + alive + temporary
            result[phase] = max(result.get(phase, 0), total)
        return result


class Watched:
    """The mode under which a step's operators are counted; `phase` and `blocks` are set from outside."""

    def __init__(self, held: dict[int, int], machine: Device) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils.checkpoint import SAC_IGNORED_OPS

        watch = self
        self.step, self.phase, self.alive, self.ran = Step(sum(held.values())), "", 0, 0
        self._seen: dict[int, Any] = {}
        self._held, self._machine = held, machine
        self._ignored = SAC_IGNORED_OPS

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                watch.count(func, args, kwargs or {}, out)
                return out

        self.mode = Mode()

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Takes up what an operator allocated."""
        self.ran += func not in self._ignored
        call = Call(func, args, kwargs, out)
        self.step.seconds += priced(call, self._machine)
        for storage in storages_of(out):
            key = storage._cdata
            if key not in self._held and key not in self._seen:
                size = storage.nbytes()
                self.alive += size
                self._seen[key] = weakref.ref(storage, functools.partial(self._freed, key, size))
        self.step.calls.append((call.described(), self.phase, self.alive))

    def _freed(self, key: int, size: int, _: Any) -> None:
        self.alive -= size
        self._seen.pop(key, None)


def storages_of(value: Any) -> Iterator[Any]:
    """The storages of the tensors in a value."""
    for leaf in trees.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


def priced(call: Call, machine: Device) -> float:
    """Seconds of an operator by the roofline; 0 of a view."""
    from torch.utils.flop_counter import flop_registry

    there = {s._cdata for s in storages_of((call.args, call.kwargs))}
    if not any(True for _ in written(call)) and all(s._cdata in there for s in storages_of(call.result)):
        return 0.0
    leaves = trees.tree_leaves((call.args, call.kwargs, call.result))
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    kind = next((str(t.dtype) for t in tensors if t.dtype.is_floating_point), "")
    count = flop_registry.get(getattr(call.target, "overloadpacket", None))
    flops = float(count(*call.args, **call.kwargs, out_val=call.result)) if count else 0.0
    moved = sum(t.numel() * t.element_size() for t in tensors)
    return machine.roofline(flops, moved, DTYPES.get(kind, "f32")) + machine.launch


def written(call: Call) -> Iterator[Any]:
    """The storages that an operator changes in place."""
    schema = getattr(call.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from storages_of(call.args[i] if i < len(call.args) else call.kwargs.get(argument.name))


@dataclass
class Copied:
    """A copy of a module, with what it is called with; its steps leave no trace in the module.

    `mode`: the one in which tensors have no contents, or none.
    """

    mode: contextlib.AbstractContextManager
    module: Module
    args: tuple
    kwargs: dict[str, Any]
    machine: Device

    @classmethod
    def of(cls, module: Module, args: tuple, kwargs: dict[str, Any], machine: Device, fake: bool) -> Copied:
        """A copy with parameters of the same storages, or (`fake`) with tensors that have no contents."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode: Any = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()

        def made(t: Any, own: bool = False) -> Any:
            if not isinstance(t, torch.Tensor):
                return t
            tensor = mode.from_tensor(t.detach()) if fake else t.detach().clone() if own else t.detach()
            return tensor.requires_grad_(t.requires_grad)

        memo: dict[int, Any] = {id(p): torch.nn.Parameter(made(p), p.requires_grad) for p in module.parameters()}
        memo.update((id(b), made(b, True)) for b in module.buffers())
        copied = copy.deepcopy(module, memo)
        copy_own = functools.partial(made, own=True)
        return cls(mode, copied, trees.tree_map(copy_own, args), trees.tree_map(copy_own, kwargs), machine)

    def step(self, loss: Callable, before: Callable[[Watched], contextlib.AbstractContextManager]) -> Step:
        """Runs forward and backward pass once, within what `before` returns."""
        tensors = [*self.module.parameters(), *self.module.buffers(), self.args, self.kwargs]
        watched = Watched({s._cdata: s.nbytes() for s in storages_of(tensors)}, self.machine)
        devices = {p.device for p in self.module.parameters() if p.device.type == "cuda"}
        try:
            with self.mode, watched.mode, torch.random.fork_rng(devices=list(devices)), before(watched):
                value = loss(self.module(*self.args, **self.kwargs))
                value.backward()
                del value
        finally:
            for p in self.module.parameters():
                p.grad = None
        return watched.step


def loss_of(output: Any) -> Any:
    """The scalar that a module returns, or the `loss` of what it returns.  UsageError for others."""
    loss = output["loss"] if isinstance(output, dict) and "loss" in output else getattr(output, "loss", output)
    if isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError(
            "policy: the module returns no scalar loss with a gradient: give loss=..., a function of what it returns"
        )
    return loss


def repeated_blocks(module: Module) -> dict[str, Module]:
    """The outermost modules that stand with others of their class in a ModuleList or Sequential, by name."""
    blocks: dict[str, Any] = {}
    for name, part in module.named_modules():
        if not isinstance(part, (torch.nn.ModuleList, torch.nn.Sequential)) or any(
            name.startswith(f"{n}.") for n in blocks
        ):
            continue
        children = [(n, c) for n, c in part.named_children() if any(True for _ in c.parameters())]
        kinds = [type(c) for _, c in children]
        for n, c in children:
            if kinds.count(type(c)) > 1 and any(True for _ in c.children()):
                blocks[f"{name}.{n}" if name else n] = c
    return blocks


def blocks_of(module: Module, names: Sequence[str] | None) -> dict[str, Module]:
    """The blocks to checkpoint: those named, or the repeated ones.  UsageError for unknown names, or for none."""
    if names is None:
        blocks = repeated_blocks(module)
        if not blocks:
            raise UsageError(
                "policy: the module has no repeated blocks (modules of one class in a ModuleList or Sequential): "
                "name the modules to checkpoint, blocks=['encoder.0', ...]"
            )
        return blocks
    modules = dict(module.named_modules())
    for name in names:
        if name not in modules:
            raise UsageError(f"policy: the module has no part '{name}'")
        if any(other != name and name.startswith(f"{other}.") for other in names):
            raise UsageError(f"policy: block '{name}' is a part of another one")
    return {n: modules[n] for n in names}
