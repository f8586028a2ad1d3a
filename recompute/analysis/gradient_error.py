"""How far approximate gradients are from the exact ones, measured on a few steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiling.compiler import CompiledStep
from ..language.ir import Block, Role
from ..language.program import Program
from ..ops.approximation.sketch import Sketch
from ..ops.approximation.variance import batch_variance, sketch_variance

#: steps whose gradients are compared
STEPS = 3
#: a gradient with a smaller share of the norm of all is rounding
_NOISE = 1e-5


def gradient_errors(plain: CompiledStep, step: CompiledStep, loss: str, feed: Any, place: Any = None) -> dict[str, Any]:
    """Runs a few steps with exact and with other gradients, each from the exact step's parameters and state.

    `same_loss`: whether the loss, which nothing approximates, has the same bits; `loss_error`: its largest relative
    difference; `relative_error`: ‖ĝ - g‖ / ‖g‖ over
    all parameters together, the mean of the steps; `parameters`: the own error of each whose gradient is more than
    rounding (that of a key's bias in attention is 0); `worst`: the largest of them;
    `sketches`: for each sketched weight the variance that the sketch adds, beside that which the choice of the batch
    gives anyway (Bershatsky et al. 2022, arXiv 2201.13195).  `place`: where they run (None: the CPU).
    """
    from ..runtime import Executor

    exact, near = plain.program.clone(), step.program.clone()
    gradients = gradients_of(exact.logical)
    executors = Executor(place), Executor(place)
    errors: list[dict[str, tuple[float, float]]] = []
    same, off = True, 0.0
    for _ in range(STEPS):
        for name, array in exact.data.items():
            near.data[name][...] = array
        entries = [
            dict(zip([loss, *gradients.values()], e.run(p, feed, [loss, *gradients.values()]), strict=True))
            for e, p in zip(executors, (exact, near), strict=True)
        ]
        same = same and np.array_equal(entries[0][loss], entries[1][loss])
        of = [float(np.asarray(f[loss], np.float64).reshape(())) for f in entries]
        off = max(off, abs(of[1] - of[0]) / max(abs(of[0]), 1e-30))
        errors.append({p: _squares(entries[0][g], entries[1][g]) for p, g in gradients.items()})
    mean = {p: (sum(e[p][0] for e in errors), sum(e[p][1] for e in errors)) for p in gradients}
    least = _NOISE**2 * sum(b for _, b in mean.values())
    deviations = {p: (a / b) ** 0.5 for p, (a, b) in mean.items() if b > least}
    worst = max(deviations, key=lambda p: deviations[p], default="")
    total = [sum(a for a, _ in e.values()) / (sum(b for _, b in e.values()) or 1.0) for e in errors]
    return {
        "same_loss": bool(same), "loss_error": off, "steps": STEPS, "relative_error": float(np.mean(np.sqrt(total))),
        "worst": {"parameter": worst, "relative_error": deviations.get(worst, 0.0)},
        "parameters": deviations, "sketches": sketch_variances(near, feed, executors[1]),
    }  # fmt: skip


def gradients_of(block: Block) -> dict[str, str]:
    """Parameter → the gradient that its update reads."""
    parameters = {v.name for v in block.parameters}
    gradients: dict[str, str] = {}
    for o in block.operators:
        target = o.outputs[0] if o.role is Role.OPTIMIZE and o.op.updates and len(o.inputs) > 1 else None
        gradient = o.inputs[1] if target is not None else None
        if target is not None and gradient is not None and target.name in parameters and gradient.type == target.type:
            gradients.setdefault(target.name, gradient.name)
    return gradients


def _squares(exact: Any, near: Any) -> tuple[float, float]:
    """‖ĝ - g‖² and ‖g‖²."""
    a, b = (np.asarray(g, np.float64).reshape(-1) for g in (exact, near))
    return float((b - a) @ (b - a)), float(a @ a)


def sketch_variances(program: Program, feed: Any, executor: Any) -> list[dict[str, Any]]:
    """Runs one step; for each weight whose gradient is a product of two sketches, the variance that the sketch adds
    (`variance`), that which the choice of the batch gives (`batch_variance`), and their quotient (`ratio`)."""
    block = program.logical
    makers = {o.outputs[0].name: o for o in block.operators if isinstance(o.op, Sketch) and o.outputs[0] is not None}
    sketches = []
    for o in block.operators:
        sources = [makers.get(v.name) for v in o.reads()]
        if len(sources) == 2 and sources[0] is not None and sources[1] is not None:
            (x, y), op = [s.inputs[0] for s in sources if s is not None], sources[0].op
            assert x is not None and y is not None and isinstance(op, Sketch)
            sketches.append((next(o.writes()).name, op, x.name, y.name))
    names = list(dict.fromkeys(n for _, _, *pair in sketches for n in pair))
    arrays = dict(zip(names, executor.run(program, feed, names), strict=True)) if names else {}
    result = []
    for gradient, op, *pair in sketches:
        a, b = (arrays[n] for n in pair)
        variance, noise = sketch_variance(op.kind, op.rows, a, b), batch_variance(a, b)
        result.append({
            "gradient": gradient, "kind": op.kind, "rows": op.rows, "of": a.size // a.shape[-1],
            "variance": variance, "batch_variance": noise, "ratio": variance / noise if noise else None,
        })  # fmt: skip
    return result
