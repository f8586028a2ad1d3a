"""Our side of cpu.py: a worker (see cpu_worker.py) that takes training steps of a network of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cpu_worker import serve

import recompute as rc
from recompute import models
from recompute.compiling.compiler import compile_step, resolve_checkpoints
from recompute.cost import kept_values
from recompute.language.ir import Role
from recompute.runtime.lowering import OWN, providers
from recompute.training import losses

#: variant → what it is; `select` says how it is asked for
VARIANTS = {
    "ours": "as it comes: all providers of this machine",
    "no-onednn": "without oneDNN",
    "recompute": "about a third of the activations kept",
    "planned": "the peak of 'recompute' as a budget: what is kept is planned",
    "numpy": "NumPy only: the operators' own numerics",
}

#: those that recompute
RECOMPUTING = ("recompute", "planned")


def select(variant: str) -> tuple[str, ...]:
    """The providers of a variant, in order of preference."""
    if variant == "numpy":
        return (OWN,)
    left = tuple(p for p in providers() if not (variant == "no-onednn" and p == "onednn"))
    return left or (OWN,)


def optimizer_of(spec: dict[str, Any]) -> Any:
    """SGD with momentum, or Adam, as PyTorch's."""
    if spec["optimizer"] == "momentum":
        return rc.Momentum(learning_rate=spec["learning_rate"], momentum=0.9)
    return rc.Adam(learning_rate=spec["learning_rate"])


def kept(step: Any) -> int:
    """Bytes of activations that wait for the backward pass, without the loss's own and what weights alone make."""
    operators = step.program.block.operators
    left_out = {v.name for op in operators if op.role is Role.LOSS for v in (*op.reads(), *op.writes())}
    of_weights = {v.name for v in step.program.block.persistent()}
    for op in operators:
        if op.role is Role.FORWARD and all(v.name in of_weights for v in op.reads()):
            of_weights.update(v.name for v in op.writes())
    values = kept_values(step.program.block)
    return sum(n for name, n in values.items() if name not in left_out and name not in of_weights)


def start(spec: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], float], Callable[[], dict[str, Any]]]:
    """For `serve`."""
    program = rc.load(models.build(spec["network"], batch=spec["batch"], seed=spec["seed"], **spec["options"]))
    kind, _ = losses.natural_loss(program)
    loss = getattr(losses, kind)(program).name
    given = {"providers": select(spec["variant"]), "precision": spec.get("precision")}
    share = 1.0
    step = compile_step(program, loss, optimizer_of(spec), **given)
    if spec["variant"] in RECOMPUTING:
        plain, names = kept(step), resolve_checkpoints(program, spec["kept"])
        step = compile_step(program, loss, optimizer_of(spec), checkpoints=names, **given)
        if spec["variant"] == "planned":
            step = compile_step(program, loss, optimizer_of(spec), budget=step.figures.peak_bytes, **given)
        share = kept(step) / plain
    executor = rc.Executor(providers=select(spec["variant"]))
    arrays = np.load(spec["data"])
    feed = {n: arrays[f"feed/{n}"] for n in spec["feed"]}

    def run() -> float:
        return float(executor.run(step.program, feed, [loss])[0].reshape(()))

    def after() -> dict[str, Any]:
        measured = executor.session(step.program, [loss]).measured_peak_bytes
        return {"peak_bytes": step.figures.peak_bytes, "measured_peak_bytes": measured}

    facts = {
        "version": rc.__version__,
        "parameters": sum(v.size for v in step.program.block.parameters),
        "providers": list(select(spec["variant"])),
        "kernels": sorted({op.kernel or OWN for op in step.program.block.operators}),
        "kept_share": share,
    }
    return facts, run, after


if __name__ == "__main__":
    serve(start)
