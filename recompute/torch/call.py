"""A module with example arguments, as exporters take it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..language.types import DTYPES

if TYPE_CHECKING:
    from torch.nn import Module

#: under what a module lies that is exported together with its loss, or with its buffers
INNER = "model"


def tensors_of(module: Module) -> dict[str, Any]:
    """Parameters and buffers by name; tied ones under each of their names."""
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def elements(tensor: Any) -> np.ndarray | None:
    """The array that a tensor is, where it lies; None if it is on a device, sparse or not in row-major order."""
    import torch

    tensor = tensor.detach()
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
        return None
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(DTYPES["bf16"])
    return tensor.numpy()


def arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs by position, and by name."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)), {}


def input_names(
    module: Module, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any]
) -> list[str] | None:
    """Names of the program's inputs: those of `forward`'s arguments, then "target"; None where one is no tensor."""
    if not all(hasattr(v, "shape") for v in (*args, *kwargs.values(), *targets)):
        return None
    parameters = list(inspect.signature(module.forward).parameters.values())
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        named += ["input"] if len(args) == 1 else [f"input_{i}" for i in range(len(args))]
    if len(args) > len(named):
        return None
    last = ["target"] if len(targets) == 1 else [f"target_{i}" for i in range(len(targets))]
    ordered = [*named[: len(args)], *kwargs, *last]
    return ordered if len(set(ordered)) == len(ordered) else None


def with_loss(module: Module, loss: Callable[..., Any], count: int, names: list[str]) -> Any:
    """The module with its loss as first output; arguments: the module's, by position and by name, then the targets."""
    import torch

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(INNER, module)
            self.training = module.training

        def forward(self, *values: Any) -> Any:
            inputs, targets = values[: count + len(names)], values[count + len(names) :]
            output = getattr(self, INNER)(*inputs[:count], **dict(zip(names, inputs[count:], strict=True)))
            return {"loss": loss(output, *targets), "output": output}

    return WithLoss()


def with_buffers(module: Module, buffers: Sequence[str]) -> Any:
    """The module, with what is in its buffers afterwards as last output, a dict by their names."""
    import torch

    class WithBuffers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(INNER, module)
            self.training = module.training

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = getattr(self, INNER)(*args, **kwargs)
            now = dict(self.named_buffers(remove_duplicate=False))
            return output, {name: now[f"{INNER}.{name}"].clone() for name in buffers}

    return WithBuffers()


@dataclass(frozen=True)
class Call:
    """A module with example arguments; names of the inputs, and of the first outputs, where they are known.

    `share`: exported models refer to the module's own tensors.
    """

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[str] | None
    outputs: list[str] | None
    dynamic: bool
    share: bool = False

    def tensors(self) -> list[Any]:
        """All example tensors, in order."""
        import torch
        from torch.utils import _pytree as trees

        return [x for x in trees.tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]

    def batch(self) -> int | None:
        """The first dimension of the examples."""
        return next((int(x.shape[0]) for x in self.tensors() if x.ndim), None)
