"""Training curves: six SGD steps of files that PyTorch exported must give PyTorch's own losses.

tests/data/pytorch/README.md says how the references were made; nothing here needs PyTorch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.language.ir import Role

FOLDER = Path(__file__).parents[1] / "data" / "pytorch"
CASES = json.loads((FOLDER / "index.json").read_text())["cases"]
#: see architectures.py
ARCHITECTURES = (
    "yolo", "deeplab", "swin", "efficientnet", "whisper", "llama_masked", "experts", "wavenet", "dlrm", "graph",
    "graph_scatter", "convnext",
)  # fmt: skip
ONE_EACH = [next(c for c in CASES if c["network"] == name) for name in ARCHITECTURES]
IDS = [c["file"].removesuffix(".onnx") for c in CASES]


def program_of(case: dict[str, Any], data: Any, mode: str = "train") -> tuple[rc.Program, dict[str, np.ndarray], str]:
    """The forward program with its loss, the feed, and the loss's name."""
    shapes = {name: data[key].shape for name, key in case["inputs"].items()}
    program = rc.load(FOLDER / case["file"], input_shapes=shapes, trainable=case["trainable"], mode=mode)
    feed = {name: data[key] for name, key in case["inputs"].items()}
    if case["loss"] == "internal":
        return program, feed, program.outputs[0].name
    options = {"axis": 1, "ignore_index": -100} if case["loss"] in ("cross_entropy", "nll") else {}
    loss = getattr(rc.losses, case["loss"])(program.outputs[0], **options)
    feed["label"] = data[case["label"]].astype(program["label"].value.type.numpy)
    return program, feed, loss.name


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_losses_of_six_sgd_steps(case: dict[str, Any]) -> None:
    data = np.load(FOLDER / case["npz"])
    program, feed, loss = program_of(case, data)
    rc.SGD(learning_rate=case["lr"]).minimize(program[loss], no_grad_set=case["no_grad"])
    # the larger ones are scheduled and packed below
    executor = rc.Executor(schedule=case["network"] not in ARCHITECTURES)
    losses = [float(executor.run(program, feed, [loss])[0].reshape(())) for _ in range(6)]
    # float32 rounding of the framework itself is up to 5e-7; 1e-5 leaves room for another order of summation
    np.testing.assert_allclose(losses, data["losses64"], rtol=1e-5)


@pytest.mark.parametrize("case", ONE_EACH, ids=ARCHITECTURES)
def test_losses_in_bfloat16(case: dict[str, Any]) -> None:
    data = np.load(FOLDER / case["npz"])
    program, feed, loss = program_of(case, data)
    optimizer = rc.MixedPrecision(rc.SGD(learning_rate=case["lr"]), "bf16")
    optimizer.minimize(program[loss], no_grad_set=case["no_grad"])
    executor = rc.Executor(schedule=False)
    losses = [float(executor.run(program, feed, [loss])[0].reshape(())) for _ in range(2)]
    # a few roundings of bfloat16 (2⁻⁸) of what the loss is made of
    np.testing.assert_allclose(losses, data["losses64"][:2], rtol=2.0**-6)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_first_gradients(case: dict[str, Any]) -> None:
    data = np.load(FOLDER / case["npz"])
    program, feed, loss = program_of(case, data)
    pairs = rc.SGD(learning_rate=0.0).backward(program[loss], no_grad_set=case["no_grad"])
    found = dict(
        zip(
            [p.name for p, _ in pairs],
            rc.Executor(schedule=False).run(program, feed, [g for _, g in pairs]),
            strict=True,
        )
    )
    norms = dict(zip(data["grad_names"].tolist(), data["grad_norm"], strict=True))
    largest = max(norms.values())
    checked = 0
    for i, torch_name in enumerate(data["grad_names"].tolist()):
        name = case["parameters"].get(torch_name)
        if name is None or name not in found:
            continue
        g = found[name].T if torch_name in case["transposed"] else found[name]
        assert abs(np.linalg.norm(g.astype(np.float64)) - norms[torch_name]) <= 1e-5 * max(norms[torch_name], largest)
        at, values = data["grad_index"][i], data["grad_value"][i]
        tolerance = 1e-5 * max(np.abs(values).max(), largest)
        np.testing.assert_allclose(np.ravel(g)[at], values, rtol=0, atol=tolerance, err_msg=torch_name)
        checked += 1
    assert checked or not case["parameters"]


@pytest.mark.parametrize("case", ONE_EACH, ids=lambda c: c["file"][:-5])
@pytest.mark.filterwarnings("ignore:checkpoint")
def test_recomputation_changes_no_bit(case: dict[str, Any]) -> None:
    data = np.load(FOLDER / case["npz"])
    losses = []
    for kept in (None, 4):
        program, feed, loss = program_of(case, data)
        optimizer: Any = rc.SGD(learning_rate=case["lr"])
        if kept:
            forward = [o.outputs[0].name for o in program.operators if o.outputs[0] and o.outputs[0].name != loss]
            optimizer = rc.RecomputeOptimizer(optimizer).set_checkpoints(forward[kept::kept])
        optimizer.minimize(program[loss], no_grad_set=case["no_grad"])
        assert any(o.role is Role.RECOMPUTE for o in program.operators) == bool(kept)
        executor = rc.Executor()
        losses.append([executor.run(program, feed, [loss])[0].tobytes() for _ in range(3)])
    assert losses[0] == losses[1]
