"""Trains modules beside PyTorch, as `rc.from_torch` imports them: losses, weights and buffers of three steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import recompute as rc
from recompute.errors import RecomputeError

_RATE, _STEPS = 0.125, 3
#: element type → how far a number may be from PyTorch's in float64, relative to the largest of its tensor
_NEAR = {torch.float32: 2e-4, torch.float64: 1e-6}
Optimizers = tuple[Callable[[Any], torch.optim.Optimizer], Callable[[], Any]]
SGD: Optimizers = (lambda weights: torch.optim.SGD(weights, lr=_RATE), lambda: rc.SGD(_RATE))


class Net(nn.Module):
    """A module of a function of itself and the inputs, with the parameters, buffers and modules that it is given."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        """The function's value, the loss."""
        return self.function(self, *inputs)


@dataclass(frozen=True)
class Case:
    """A module, its inputs and the optimizers of both sides; `source` and `said`: the report."""

    name: str
    source: str
    said: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    optimizers: Optimizers = SGD


Parts = Callable[[], Any]
CASES: list[Case] = []
_HOSTS = {
    "torch": "https://github.com/pytorch/pytorch/issues/",
    "ort": "https://github.com/microsoft/onnxruntime/issues/",
    "script": "https://github.com/microsoft/onnxscript/issues/",
    "tf": "https://github.com/tensorflow/tensorflow/issues/",
    "jax": "https://github.com/jax-ml/jax/issues/",
    "peft": "https://github.com/huggingface/peft/issues/",
}


def add(
    name: str, source: str, said: str, loss: Any, inputs: Any = (), optimizers: Optimizers = SGD, **parts: Parts
) -> None:
    """A case: `loss(parts, *inputs)`; inputs are shapes of random numbers, or tensors."""
    host, _, number = source.partition("#")
    CASES.append(
        Case(
            name,
            _HOSTS[host] + number if number else source,
            said,
            lambda: Net(loss, **{k: part() for k, part in parts.items()}),
            lambda: tuple(torch.randn(*x) if isinstance(x, tuple) else x for x in inputs) or (torch.ones(1),),
            optimizers,
        )
    )


def W(values: Any) -> Parts:
    """A parameter of these values, or of this shape."""
    return lambda: nn.Parameter(torch.randn(*values) if isinstance(values, tuple) else torch.tensor(values))


def each(name: str, source: str, said: str, f: Any, **values: Any) -> None:
    """A function of parameters, each element of which counts otherwise."""
    parts = {k: W(v) for k, v in values.items()}
    add(name, source, said, lambda s, one: _spread(f(*(getattr(s, k) for k in values))) * one.sum(), **parts)


def over(name: str, source: str, said: str, f: Any, shape: tuple[int, ...] = (2, 3, 5, 6), **parts: Parts) -> None:
    """A function of an image that is scaled by parameters."""
    scale = (shape[1], *[1] * (len(shape) - 2))
    add(name, source, said, lambda s, x: _spread(f(s, s.scale * x)), (shape,), scale=W(scale), **parts)


def layer(name: str, source: str, said: str, f: Any, inputs: Any, **parts: Parts) -> None:
    """A function of its inputs and parts."""
    add(name, source, said, lambda s, *x: _spread(f(s, *x)), inputs, **parts)


def _spread(y: torch.Tensor) -> torch.Tensor:
    factors = torch.sin(torch.arange(1, y.numel() + 1, dtype=y.dtype)).reshape(y.shape)
    return (y * factors).sum() / 4 + y.pow(2).mean() / 16


def run(case: Case) -> tuple[str, str]:
    """The verdict in float32 and float64, and what is different or why it is refused."""
    notes = []
    for dtype in (torch.float32, torch.float64):
        try:
            found = _differences(case, dtype)
        except RecomputeError as e:
            return "refused", f"{dtype}: {e}"
        except Exception as e:
            return "wrong", f"{dtype}: traceback of {type(e).__name__}: {e}"
        if found:
            notes.append(f"{dtype}: {'; '.join(found[:3])}")
    return ("wrong", " | ".join(notes)) if notes else ("right", "")


def _differences(case: Case, dtype: torch.dtype) -> list[str]:
    """What the program's three steps have otherwise than PyTorch's in float64."""
    torch.manual_seed(0)
    module, inputs = case.make().train(), case.inputs()
    reference, exact = copy.deepcopy(module).double(), tuple(map(_double, inputs))
    theirs, ours = case.optimizers
    optimizer, losses = theirs([p for p in reference.parameters() if p.requires_grad]), []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = reference(*(x.clone() for x in exact))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    module, inputs = module.to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = rc.from_torch(module, inputs)
        ours().minimize(program.outputs[0])
        executor = rc.Executor()
        feed = {v.name: x.numpy() for v, x in zip(program.inputs, inputs, strict=True)}
        got = [float(executor.run(program, feed, [program.outputs[0]])[0]) for _ in range(_STEPS)]
        rc.write_back(program, module)
    found = [] if _near(got, losses, dtype) else [f"losses {got} should be {losses}"]
    for (name, a), b in zip(module.state_dict().items(), reference.state_dict().values(), strict=True):
        if a.is_floating_point() and not _near(a.numpy(), b.numpy(), dtype):
            found.append(f"{name} {a.flatten()[:4].tolist()} should be {b.flatten()[:4].tolist()}")
    return found


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def _near(a: Any, b: Any, dtype: torch.dtype) -> bool:
    """Whether all of a is b, NaN where it is NaN, within what the element type allows."""
    b = np.asarray(b, np.float64)
    largest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return np.allclose(a, b, rtol=0, atol=_NEAR[dtype] * max(1.0, largest), equal_nan=True)
