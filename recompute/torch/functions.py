"""Gradients that a module defines by hand (`torch.autograd.Function`), kept in the exported model.

While PyTorch traces a module, each application of such a function becomes a node `CustomGradient` of the domain
"recompute": the function's values, placeholders for their gradients (`Cotangent`), and pairs of an input and its
gradient, which `backward` has computed from the placeholders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def kept_gradients() -> Iterator[None]:
    """Within: functions keep their `backward`."""
    function = torch.autograd.Function
    original = next(c.__dict__["apply"] for c in function.__mro__ if "apply" in c.__dict__)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] == "torch" or kwargs:
            return original.__get__(None, cls)(*args, **kwargs)
        return _applied(cls, args)

    with mock.patch.object(function, "apply", classmethod(apply)):
        yield


class _Context:
    """The context that `forward` and `backward` share."""

    def __init__(self, needed: tuple[bool, ...]) -> None:
        self.needs_input_grad = needed
        self.saved_tensors: tuple[Any, ...] = ()
        self.undifferentiable: set[int] = set()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.undifferentiable.update(map(id, tensors))

    def mark_dirty(self, *tensors: Any) -> None:
        raise NotImplementedError("an autograd.Function that changes its inputs in place is not supported")

    def set_materialize_grads(self, value: bool) -> None:
        pass


def _applied(cls: Any, args: tuple[Any, ...]) -> Any:
    """The values of the function, with its own gradients."""
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    ctx = _Context(tuple(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args))
    if cls.setup_context is not torch.autograd.Function.setup_context:
        result = cls.forward(*plain)
        cls.setup_context(ctx, tuple(plain), result)
    else:
        result = cls.forward(ctx, *plain)
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    places = [i for i, v in enumerate(values) if _differentiable(v, ctx)]
    if not places:
        return result
    cotangents = {i: _node("Cotangent", (values[i].detach(),), [values[i]])[0] for i in places}
    backward = cls.vjp if cls.vjp is not torch.autograd.Function.vjp else cls.backward
    gradients = backward(ctx, *(cotangents.get(i) for i in range(len(values))))
    grads = list(gradients) if isinstance(gradients, (tuple, list)) else [gradients]
    pairs = [(a, g) for a, g in zip(args, grads, strict=False) if g is not None and isinstance(a, torch.Tensor)]
    inputs = [values[i].detach() for i in places]
    flat = (*inputs, *cotangents.values(), *(t for pair in pairs for t in pair))
    results = dict(zip(places, _node("CustomGradient", flat, inputs), strict=True))
    values = [results.get(i, v.detach() if isinstance(v, torch.Tensor) else v) for i, v in enumerate(values)]
    return type(result)(values) if isinstance(result, (tuple, list)) else values[0]


def _differentiable(v: Any, ctx: _Context) -> bool:
    return isinstance(v, torch.Tensor) and v.is_floating_point() and id(v) not in ctx.undifferentiable


def _node(op_type: str, inputs: tuple[Any, ...], like: list[Any]) -> list[Any]:
    """A node of the exported model, with one output for each of `like`."""
    outputs = torch.onnx.ops.symbolic_multi_out(
        f"recompute::{op_type}",
        inputs,
        dtypes=tuple(v.dtype for v in like),
        shapes=tuple(v.shape for v in like),
        version=1,
    )
    return list(outputs)
