"""Trains small networks of torchvision and transformers beside PyTorch, as `rc.from_torch` imports them.

    python benchmarks/pytorch/zoo.py [--only NAME] [--json FILE]

For each network: 4 steps of SGD and of Adam in float64, dropout off, all else in train mode; the largest relative
difference of a loss, and the largest difference of a parameter or buffer after `rc.write_back`.  Exit code 1 where one
exceeds 1e-5, or a network cannot be trained that PyTorch can export.  A network whose loss or gradients PyTorch makes
not finite does not count.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
from masked import ARCHITECTURES
from table import rows

import recompute as rc

_RATE, _STEPS, _LIMIT = 2.0**-7, 4, 1e-5
_LINE = "{name:34} {how:12} {parameters:>4} {SGD:>9} {Adam:>9} {weights:>9} {seconds:6.1f} s  {why}"


def main() -> int:
    """The table, and the exit code."""
    found = rows(ARCHITECTURES, __doc__, _LINE, row)
    compared = [r for r in found if r["right"] is not None]
    wrong = [r["name"] for r in compared if not r["right"]]
    print(
        f"{len(compared) - len(wrong)} of {len(compared)} train as in PyTorch"
        + (f"; not: {', '.join(wrong)}" if wrong else "")
    )
    return bool(wrong)


def row(name: str, make: Any) -> dict[str, Any]:
    """One network's figures; `why` it has none."""
    start = time.perf_counter()
    found: dict[str, Any] = {"name": name, "how": "", "parameters": 0, "SGD": "", "Adam": "", "weights": "", "why": ""}
    found["right"] = False
    try:
        torch.manual_seed(0)
        module, inputs, loss = make()
        module = without_dropout(module.double().train())
        inputs = {k: _double(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(map(_double, inputs))
        _backward(copy.deepcopy(module), inputs, loss)
        worst = weights = 0.0
        for kind in ("SGD", "Adam"):
            different, apart, program, how = compare(module, inputs, loss, kind)
            found[kind], worst, weights = f"{different:.1e}", _larger(worst, different), _larger(weights, apart)
            found["parameters"], found["how"] = len(program.parameters), how
        found["weights"] = f"{weights:.1e}"
        found["right"] = worst < _LIMIT and weights < _LIMIT
    except _NotFinite as e:
        found["right"], found["why"] = None, str(e)
    except Exception as e:
        found["why"] = f"{type(e).__name__}: {str(e).strip()}".replace("\n", " ")[:240]
    found["seconds"] = time.perf_counter() - start
    return found


def compare(module: Any, inputs: Any, loss: Any, kind: str) -> tuple[float, float, Any, str]:
    """The largest relative difference of a loss, of weights and buffers, the program, and how it was exported."""
    theirs, ours = copy.deepcopy(module), copy.deepcopy(module)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        program = rc.from_torch(ours, inputs, loss=loss)
    how = "torchscript" if any("TorchScript" in str(w.message) for w in told) else "dynamo"
    target = program["loss"] if "loss" in program else program.outputs[0]
    getattr(rc, kind)(_RATE).minimize(target)
    executor = rc.Executor()
    optimizer = getattr(torch.optim, kind)([p for p in theirs.parameters() if p.requires_grad], lr=_RATE)
    feed = _feed(program, inputs)
    worst = 0.0
    for _ in range(_STEPS):
        optimizer.zero_grad()
        value = _backward(theirs, inputs, loss)
        optimizer.step()
        (got,) = executor.run(program, feed, [target])
        worst = _larger(worst, abs(float(got) - float(value)) / max(abs(float(value)), 1e-3))
    rc.write_back(program, ours)
    pairs = zip([*ours.parameters(), *ours.buffers()], [*theirs.parameters(), *theirs.buffers()], strict=True)
    apart = 0.0
    for a, b in pairs:
        if a.is_floating_point() and a.numel():
            apart = _larger(apart, float((a - b).abs().max()))
    return worst, apart, program, how


def _larger(a: float, b: float) -> float:
    """The larger one; NaN is the largest."""
    return b if a < b or b != b else a


class _NotFinite(ValueError):
    """PyTorch's own step is not finite: there is nothing to compare with."""


def _backward(module: Any, inputs: Any, loss: Any) -> Any:
    """PyTorch's loss, differentiated."""
    output = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    value = loss(output) if loss is not None else output["loss"]
    value.backward()
    gradients = {f"gradient of {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
    for what, t in {"loss": value, **gradients}.items():
        if not torch.isfinite(t).all():
            raise _NotFinite(f"in float64 PyTorch's own {what} is not finite: there is nothing to compare with")
    return value


def _feed(program: Any, inputs: Any) -> dict[str, np.ndarray]:
    values = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    names = [v.name for v in program.inputs]
    if isinstance(inputs, dict) and set(names) <= set(inputs):
        return {n: inputs[n].numpy() for n in names}
    return {n: v.numpy() for n, v in zip(names, values, strict=False)}


def _double(v: Any) -> Any:
    return v.double() if v.is_floating_point() else v


def without_dropout(module: Any) -> Any:
    """Dropout's random numbers are not ours: off, wherever a module or its configuration has it."""
    for m in module.modules():
        if "Dropout" in type(m).__name__ or "DropPath" in type(m).__name__ or "StochasticDepth" in type(m).__name__:
            m.p = 0.0
            m.eval()
        for key, value in vars(m).items():
            if isinstance(value, float) and ("drop" in key):
                setattr(m, key, 0.0)
    return module


if __name__ == "__main__":
    sys.exit(main())
