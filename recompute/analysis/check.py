"""`--check`: compares the forward pass with ONNX Runtime, the recomputed step with the plain one, and approximate
gradients with exact ones."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..compiling.compiler import CompiledStep
from ..errors import ModelWarning, one_line
from ..importer.inputs import fitted
from ..importer.model import read_model
from ..importer.rebatch import fixed_batch
from ..language.ir import Role
from ..language.program import Program
from ..language.scores import scores_of, steps_of
from ..passes import RecomputePlan
from ..places import as_place
from ..support.files import apart
from .gradient_error import gradient_errors

#: tolerance of float32 forward outputs, relative to their largest element
FORWARD_TOLERANCE = 1e-3
#: batches of a file that fixes its own, which are compared, at most
_ROWS = 8


def check_step(job: Any, program: Program, plain: CompiledStep, step: CompiledStep, loss: str) -> dict[str, Any]:
    """Runs both comparisons, prints the largest differences, and returns them."""
    result: dict[str, Any] = {"passed": True}
    feed, place = next(job.batches(program)), as_place(job.args.place)
    forward = forward_difference(job, program, feed)
    result["forward"] = forward
    if forward.get("largest_relative_difference", 0.0) > FORWARD_TOLERANCE:
        result["passed"] = False
    job.say(f"check: forward pass against {forward['against']}: {forward['said']}")
    if step is plain:
        return result
    plan = step.plan
    if plan is not None and (plan.approximations or plan.before):
        result["gradients"] = errors = gradient_errors(plain, step, loss, feed, place)
        close = plan.slices and errors["loss_error"] <= slices_tolerance(plain.program)
        result["passed"] = result["passed"] and bool(errors["same_loss"] or close)
        for line in _gradient_lines(errors):
            job.say(line)
        return result
    if plan is not None and plan.slices:
        result["slices"] = errors = slices_difference(plain, step, loss, feed, place)
        result["passed"] = result["passed"] and errors["passed"]
        job.say(
            f"check: in slices against plain, {errors['steps']} steps: relative error of gradients "
            f"{errors['relative_error']:.3g}, of losses {errors['loss_error']:.3g}; "
            f"sums in another order may differ by "
            f"{errors['tolerance']:.3g}"
        )
        if not plan.reruns:
            return result
        plain = job.compile(program, loss, plan=RecomputePlan(slices=plan.slices), plain=plain)
    result["steps"] = steps = step_difference(plain, step, loss, feed, place)
    result["passed"] = result["passed"] and steps["same_bits"]
    said = "the same bits" if steps["same_bits"] else f"largest difference {steps['largest_difference']:.3g}"
    job.say(f"check: recomputed against plain, 2 steps: {said}")
    return result


def slices_difference(
    plain: CompiledStep, step: CompiledStep, loss: str, feed: Any, place: Any = None
) -> dict[str, Any]:
    """Compares the gradients and losses of a step in slices with those of the plain step, from the same parameters.

    Slices add gradients up in another order (docs/transformers.md): they are close, and not the same bits; what an
    optimizer makes of their last bits (Adam divides by their size) is not compared.
    """
    comparison = gradient_errors(plain, step, loss, feed, place)
    tolerance = slices_tolerance(plain.program)
    errors = {"relative_error": comparison["relative_error"], "loss_error": comparison["loss_error"]}
    passed = all(e <= tolerance for e in errors.values())  # NaN is no difference that passes
    return {"passed": passed, "steps": comparison["steps"], "tolerance": tolerance, **errors}


def slices_tolerance(program: Program) -> float:
    """The rounding of a sum of 1,024 terms in float32; in halves, in which each slice's part is rounded, four of it."""
    kinds = {v.dtype for op in program.logical.operators for v in op.writes()}
    units = {"f32": 1024 * 2.0**-24, "f16": 4 * 2.0**-11, "bf16": 4 * 2.0**-8}
    return max(units[k] for k in kinds | {"f32"} if k in units)


def _gradient_lines(errors: dict[str, Any]) -> list[str]:
    """The printed lines of `gradient_errors`' result."""
    worst = errors["worst"]
    loss = "the same bits" if errors["same_loss"] else "other bits"
    lines = [
        f"check: approximate against exact gradients, {errors['steps']} steps: relative error "
        f"{errors['relative_error']:.3g}, largest {worst['relative_error']:.3g} ({one_line(worst['parameter'])}); "
        f"losses: {loss}"
    ]
    ratios = sorted((s for s in errors["sketches"] if s["ratio"] is not None), key=lambda s: -s["ratio"])
    if ratios:
        most = ratios[0]
        lines.append(
            f"check: a sketch adds {np.median([s['ratio'] for s in ratios]):.2g} times the variance that the choice of "
            f"the batch gives a weight's gradient (median of {len(ratios)}), at most {most['ratio']:.2g} times "
            f"({one_line(most['gradient'])})"
        )
    return lines


def step_difference(plain: CompiledStep, step: CompiledStep, loss: str, feed: Any, place: Any = None) -> dict[str, Any]:
    """Runs two steps of each variant on `feed` from the same state; compares losses, parameters and state bit by bit.

    `place`: where they run (None: the CPU).
    """
    from ..runtime import Executor

    variants = [plain.program.clone(), step.program.clone()]
    losses = []
    for p in variants:
        executor = Executor(place)
        losses.append([executor.run(p, feed, [loss])[0] for _ in range(2)])
    pairs = list(zip(losses[0], losses[1], strict=True))
    pairs += [(variants[0].data[n], variants[1].data[n]) for n in variants[0].data]
    same = all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)
    largest = max((_difference(a, b) for a, b in pairs), default=0.0)
    return {"same_bits": bool(same), "largest_difference": largest, "losses": [float(x) for x in losses[0]]}


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    if not a.size or a.dtype.kind not in "f":
        return 0.0
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())


def forward_difference(job: Any, program: Program, feed: Any) -> dict[str, Any]:
    """Compares the model's outputs in inference mode with those of ONNX Runtime."""
    try:
        import onnxruntime as ort
    except ImportError:
        return {"against": "ONNX Runtime", "said": "skipped, it is not installed (pip install 'onnx-recompute[cpu]')"}
    from ..exporter.trained import export_trained
    from ..runtime import Executor

    shapes = {v.name: v.shape for v in program.block.inputs if not _only_read_by_loss(program, v.name)}
    evaluated = _evaluated(program, shapes)
    feed = {n: a for n, a in feed.items() if n in shapes}
    options = ort.SessionOptions()
    options.log_severity_level = 3
    with apart(), tempfile.TemporaryDirectory(prefix="recompute-") as folder:  # models above 2 GiB must be files
        path = os.path.join(folder, "model.onnx")
        export_trained(program, path)
        session = ort.InferenceSession(path, options, providers=_providers(ort))
    feed_all = {**feed, **_bound(program, {i.name for i in session.get_inputs()})}
    if missing := sorted({i.name for i in session.get_inputs()} - feed_all.keys()):
        return {
            "against": f"ONNX Runtime {ort.__version__}",
            "said": f"skipped, the file needs inputs that the program has not ({', '.join(missing[:3])}, ...)",
        }
    names = [o.name for o in session.get_outputs() if o.name in evaluated]  # without maps and strings
    theirs = session.run(names, feed_all)
    ours = Executor().run(evaluated, feed, names)
    makers = steps_of(evaluated.block)
    sizes = [
        1.0 if scores_of(n, makers).kind in ("Softmax", "Sigmoid") else 1e-30 for n in names
    ]  # of probabilities: 1
    largest = max((_relative(a, b, s) for a, b, s in zip(ours, theirs, sizes, strict=True)), default=0.0)
    said = f"largest relative difference {largest:.3g}"
    against = f"ONNX Runtime {ort.__version__} ({session.get_providers()[0]})"
    if job.args.init is None and _opened(job.args.model, program):
        file = ort.InferenceSession(job.args.model, options, providers=_providers(ort))
        rows = _rows_of_file(file, feed_all, dict(zip(names, ours, strict=True)))
        if rows:
            each = max(_relative(a, b, s) for (a, b), s in zip(rows, sizes, strict=True))
            largest, said = max(largest, each), f"{said}; of rows and the file, one batch at a time, {each:.3g}"
    return {"against": against, "said": said, "largest_relative_difference": largest}


def _evaluated(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> Program:
    """The program's model in inference mode, with its arrays."""
    from ..importer import load as onnx_import

    assert program.source is not None
    with warnings.catch_warnings():  # told when the program was loaded
        warnings.simplefilter("ignore", ModelWarning)
        loading = {**program.loaded, "mode": "eval", "trainable": None}
        forward = onnx_import.load(program.source, input_shapes=shapes, **loading)
    forward.data.update({n: a for n, a in program.data.items() if n in forward.data})
    return forward


def _opened(model: str, program: Program) -> bool:
    """Whether a program has another batch than its file fixes."""
    fixed = fixed_batch(read_model(model).graph) if Path(model).is_file() else None
    return fixed not in (None, program.block.batch)


def _rows_of_file(
    file: Any, feeds: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Results of a program that was made for another batch than its file's, and the file's, for the first batches.

    [] where the batch is the file's.  A batch that the file drops from an output is its first axis here.
    """
    fixed = {
        i.name: (axis, d)
        for i in file.get_inputs()
        for axis, (d, n) in enumerate(zip(i.shape, feeds[i.name].shape, strict=True))
        if isinstance(d, int) and d != n
    }
    if not fixed:
        return []
    count = min(_ROWS, *(feeds[n].shape[axis] // size for n, (axis, size) in fixed.items()))

    def part(name: str, a: np.ndarray, k: int) -> np.ndarray:
        axis, size = fixed.get(name, (0, 0))
        return a.take(range(k * size, (k + 1) * size), axis) if size else a

    parts = [file.run(list(ours), {n: part(n, a, k) for n, a in feeds.items()}) for k in range(count)]
    rows = []
    for whole, *theirs in zip(ours.values(), *parts, strict=True):
        axes = [i for i, (m, n) in enumerate(zip(whole.shape, theirs[0].shape, strict=False)) if m != n]
        dropped = whole.ndim > theirs[0].ndim
        joined = np.stack(theirs) if dropped else np.concatenate(theirs, axes[0]) if axes else whole
        rows.append((whole.take(range(joined.shape[axes[0]]), axes[0]) if axes and not dropped else whole, joined))
    return [(a[: len(b)] if a.ndim and len(a) != len(b) else a, b) for a, b in rows]


def _providers(ort: Any) -> list[str]:
    """CUDA if this ONNX Runtime has it, and the CPU."""
    return [p for p in ("CUDAExecutionProvider", "CPUExecutionProvider") if p in ort.get_available_providers()]


def _bound(program: Program, names: Collection[str]) -> dict[str, np.ndarray]:
    """The inputs that were bound when the program was loaded (`load(set=)`), which the exported file still has."""
    assert program.source is not None
    declared = {i.name: i for i in program.source.graph.input}
    return {n: fitted(declared[n], v) for n, v in program.loaded.get("set", {}).items() if n in names}


def _relative(a: np.ndarray, b: np.ndarray, least: float) -> float:
    """The largest difference as a share of the largest number, or of `least`."""
    if not a.size:
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), least))


def _only_read_by_loss(program: Program, name: str) -> bool:
    readers = [op for op in program.block.operators if any(v.name == name for v in op.reads())]
    return bool(readers) and all(op.role is Role.LOSS for op in readers)
