"""ONNX Runtime training as an oracle: the same ONNX files, weights and batches, there and here.

    python benchmarks/ort_training.py FOLDER --ort PYTHON [--only NAME ...]

PYTHON: an interpreter with onnxruntime-training 1.19.2, numpy < 2 and onnx 1.16.2; it runs this file with `--oracle`.
FOLDER: where models and results go; models that have results are not run again.  Compared are the losses of five steps,
the gradients of the first, and the weights after the last where gradients are more than rounding.
"""

from __future__ import annotations

import argparse
import copy
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from cpu_ort import training_form, without_torch
from onnx import numpy_helper

#: AdamW adds its epsilon before the correction there, after it here: it is too small to tell
STEPS, BATCH, RATES, EPSILON = 5, 8, {"AdamW": 1e-4, "SGD": 0.01, "": 1.0}, 1e-15
#: how far values may be apart: losses relatively, gradients and changes of weights as shares of a tensor's largest
NEAR = {"loss": 1e-4, "gradients": 1e-3, "weights": 2e-3}
#: gradients below this share of the network's largest may be rounding alone
ROUNDING = 1e-4
#: why a network's numbers differ
PURPOSE = {"gpt2-tiny": "there the gradient of GELU's tanh form is that of the erf form"}
_LANGUAGE = {"seq": 16, "dropout": 0.0}
#: zoo's name → options; "erf": with that form of GELU
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "lenet": {},
    "resnet18": {"width": 16, "image": 64, "classes": 10},
    "mobilenet_v2": {"width": 8, "image": 64, "classes": 10, "dropout": 0.0},
    "vit-tiny": {"layers": 2, "image": 32, "classes": 10},
    "bert-tiny": {**_LANGUAGE, "vocab": 500},
    "gpt2-tiny": {**_LANGUAGE, "vocab": 500},
    "gpt2-tiny erf": {**_LANGUAGE, "vocab": 500},
    "llama-tiny": {"seq": 16, "vocab": 500},
    "lstm": {"seq": 8},
}


def oracle(folder: Path) -> None:
    """Trains every model of the folder that has no results; NAME.txt says what went wrong, if something did."""
    without_torch()
    for path in sorted(folder.glob("*.onnx")):
        said = path.with_suffix(".txt")
        if said.exists():
            continue
        said.write_text("ends the process")
        try:
            np.savez(path.with_suffix(".there.npz"), **trained_there(path))
            said.write_text("")
        except Exception as e:
            said.write_text(f"{type(e).__name__}: {' '.join(str(e).split())[-300:]}")


def trained_there(path: Path) -> dict[str, np.ndarray]:
    """Losses, gradients and weights by ONNX Runtime."""
    from onnxruntime.training import artifacts, onnxblock
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    feeds, (loss, optimizer) = feeds_of(path)
    model, folder = onnx.load(str(path)), path.with_suffix("")
    folder.mkdir(exist_ok=True)
    parameters = training_form(model) if loss else [t.name for t in model.graph.initializer if t.name[:2] == "p_"]
    kinds = {"AdamW": onnxblock.optim.AdamW(eps=EPSILON), "SGD": artifacts.OptimType.SGD, "": None}
    while True:
        try:
            artifacts.generate_artifacts(
                copy.deepcopy(model),
                requires_grad=parameters,
                loss=artifacts.LossType[loss] if loss else None,
                optimizer=kinds[optimizer],
                artifact_directory=str(folder),
            )
            break
        except RuntimeError as e:  # bounds, indices: it has gradients of an operator's other inputs only
            still = re.search(r"derivative for '(\w+)' as it's unreachable", str(e))
            if still is None:
                raise
            parameters.remove(still[1])
    state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = Module(str(folder / "training_model.onnx"), state)
    module.train()
    update = Optimizer(str(folder / "optimizer_model.onnx"), module) if optimizer else None
    losses, results = [], {}
    for k, feed in enumerate(feeds):
        *inputs, last = feed.values()
        losses.append(np.float32(module(*inputs, last.reshape(-1) if loss == "CrossEntropyLoss" else last)))
        if k == 0:
            results = {f"gradient/{n}": np.array(state.parameters[n].grad) for n in parameters}
        if update is not None:
            update.set_learning_rate(RATES[optimizer])
            update.step()
        module.lazy_reset_grad()
    results |= {f"weight/{n}": np.array(state.parameters[n].data) for n in parameters}
    return results | {"loss": np.array(losses)}


def feeds_of(path: Path) -> tuple[list[dict[str, np.ndarray]], tuple[str, str]]:
    """Batches, loss and optimizer; an operator has none, and one batch."""
    data = path.with_suffix(".feeds.npz")
    if not data.exists():
        return [{"one": np.array(1, np.float32)}], ("", "")
    arrays = np.load(data)
    names = [str(n) for n in arrays["names"]]
    return [{n: arrays[f"{n}/{k}"] for n in names} for k in range(STEPS)], tuple(path.stem.split("-")[-2:])


def write_networks(folder: Path, only: Sequence[str]) -> None:
    """The zoo's files, and five batches of each."""
    from recompute import models

    for name in only or NETWORKS:
        zoo, options = name.split()[0], NETWORKS[name]
        entry = models.info(zoo, **options)
        for loss in ["MSELoss"] if zoo == "mlp" else ["CrossEntropyLoss"]:
            for optimizer in ("SGD", "AdamW"):
                path = folder / f"{name}-{loss}-{optimizer}.onnx"
                model = models.build(zoo, batch=BATCH, **options)
                for node in (n for n in model.graph.node if n.op_type == "Gelu" and "erf" in name):
                    del node.attribute[:]
                onnx.save(model, str(path))
                draw = np.random.default_rng(1)
                feeds = [
                    {s.name: s.sample(draw, batch=BATCH) for s in (*entry.inputs, entry.label)} for _ in range(STEPS)
                ]
                if loss == "MSELoss":
                    feeds = [{"x": f["x"], "target": np.eye(2, dtype=np.float32)[f["label"]]} for f in feeds]
                arrays = {f"{n}/{k}": a for k, f in enumerate(feeds) for n, a in f.items()}
                np.savez(path.with_suffix(".feeds.npz"), names=np.array(list(feeds[0])), **arrays)


def trained_here(path: Path, providers: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Losses, gradients and weights by this package, with these kernel providers."""
    import recompute as rc

    feeds, (loss, optimizer) = feeds_of(path)
    program = rc.load(str(path), **({} if loss else {"trainable": ["p_*"], "mode": "file"}))
    output, label = program.outputs[0], list(feeds[0])[-1]
    if loss:
        output = (rc.losses.mse if loss == "MSELoss" else rc.losses.cross_entropy)(output, label_name=label)
    options = {"weight_decay": 0.0, "epsilon": EPSILON} if optimizer == "AdamW" else {}
    rule = (rc.AdamW if options else rc.SGD)(RATES[optimizer], **options)
    _, pairs = rule.minimize(output)
    executor, results, losses = rc.Executor(providers=providers), {}, []
    for k, feed in enumerate(feeds):
        value, *gradients = executor.run(program, feed, [output, *(g for _, g in pairs)])
        losses.append(np.float32(value))
        if k == 0:
            results = {f"gradient/{p.name}": np.array(g) for (p, _), g in zip(pairs, gradients, strict=True)}
    results |= {f"weight/{p.name}": np.array(program.data[p.name]) for p, _ in pairs}
    return results | {"loss": np.array(losses)}


def differences(path: Path, here: dict[str, np.ndarray], there: Any) -> dict[str, float]:
    """Largest differences of losses, gradients and weights; weights only where steps were made."""
    start = {t.name: numpy_helper.to_array(t) for t in onnx.load(str(path)).graph.initializer}
    worst = {"loss": float(np.max(between(here["loss"], there["loss"]) / np.fmax(np.abs(there["loss"]), 1e-3)))}
    names = [k for k in there if k != "loss"]
    largest = max(np.nanmax(np.abs(there[n]), initial=0) for n in names if n[0] == "g")
    least = 1e-3 if len(here["loss"]) == 1 else 1e-4 * largest  # of gradients: smaller ones are rounding of others
    for key in names:
        kind, _, name = key.partition("/")
        base = start[name] if kind == "weight" else np.float32(0)
        want, apart = there[key] - base, between(here.get(key, base), there[key])
        if kind == "weight":  # beyond the rounding of sums; AdamW makes steps of its rate's size also of rounding alone
            real = np.abs(there[f"gradient/{name}"]) > ROUNDING * largest
            apart = np.maximum(apart - STEPS * np.finfo("f4").eps * np.abs(base).max(initial=0), 0) * real
        size = max(np.abs(want[np.isfinite(want)]).max(initial=0), least if kind == "gradient" else 1e-12)
        worst[f"{kind}s"] = float(np.maximum(worst.get(f"{kind}s", 0.0), np.max(apart, initial=0) / size))  # NaN stays
    return worst


def between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How far elements are apart; NaN and infinities that are the same are not."""
    with np.errstate(invalid="ignore"):
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))


def row_of(path: Path) -> dict[str, Any]:
    """What became of a model: a verdict, and what says so."""
    said, _, loss = path.with_suffix(".txt").read_text(), *feeds_of(path)
    row: dict[str, Any] = {"name": path.stem, "verdict": "not supported there", "why": said}
    if said:
        return row
    from recompute.errors import RecomputeError

    there = np.load(path.with_suffix(".there.npz"))
    try:
        here = trained_here(path)
    except RecomputeError as e:
        flat = all(not there[n].any() for n in there.files if n.startswith("gradient/"))
        return row | {"verdict": "no gradient" if flat else "not supported here", "why": " ".join(str(e).split())[:160]}
    worst = differences(path, here, there)
    if not loss[0]:
        worst.pop("weights", None)
    row |= {"verdict": "agrees", "why": shown(worst)}
    if all(v <= NEAR[k] for k, v in worst.items()):
        return row
    if loss[0]:  # an element on the other side of a ReLU's kink: other sums of ours differ as much
        spread = differences(path, trained_here(path, ("numpy",)), here)
        if all(v <= max(NEAR[k], 2 * spread[k]) for k, v in worst.items()):
            return row | {"verdict": "differs on purpose", "why": f"{row['why']}; our NumPy kernels: {shown(spread)}"}
    purpose = next((f"; {why}" for name, why in PURPOSE.items() if path.stem.startswith(f"{name}-")), "")
    return row | {"verdict": "differs on purpose" if purpose else "differs", "why": row["why"] + purpose}


def shown(worst: dict[str, float]) -> str:
    """Differences as text."""
    return ", ".join(f"{k} {v:.1e}" for k, v in worst.items())


def by_oracle(python: str, folder: Path) -> None:
    """Has every model of the folder trained by ONNX Runtime; a process that a model ends is followed by another one."""
    call = [python, __file__, str(folder), "--oracle"]
    while subprocess.run(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        print("a model ended the process", flush=True)


def arguments(description: str | None, python: str, only: Iterable[str] = ()) -> argparse.ArgumentParser:
    """The folder of models, the Python that has the oracle, which models, and whether this process is the oracle."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(f"--{python}", default=sys.executable)
    parser.add_argument("--only", nargs="*", default=[*only])
    parser.add_argument("--oracle", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Writes models, runs the oracle, and compares."""
    args = arguments(__doc__, "ort").parse_args()
    if args.oracle:
        oracle(args.folder)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    write_networks(args.folder, args.only)
    by_oracle(args.ort, args.folder)
    for path in sorted(args.folder.glob("*.onnx")):
        row = row_of(path)
        print(f"{row['name']:40} {row['verdict']:14} {row['why'][:160]}", flush=True)


if __name__ == "__main__":
    main()
