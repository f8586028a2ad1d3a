"""The loops of examples/anywhere: exported steps train in ONNX Runtime alone, in Python and in JavaScript."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import recompute as rc
from recompute.language.ir import Value

pytest.importorskip("onnxruntime")

FOLDER = Path(__file__).parents[2] / "examples" / "anywhere"
STEPS = 4


def pattern(v: Value) -> np.ndarray:
    """What the loops feed."""
    i = np.arange(v.size).reshape(v.shape)
    return (i * 7 % 2).astype(np.int64) if v.dtype == "i64" else ((i * 7 % 17 - 8) / 8).astype(np.float32)


def exported(folder: Path, name: str, optimizer: object) -> list[float]:
    """Writes a step of a network of the zoo to step.onnx; the losses that our executor gets."""
    program = rc.load(rc.models.build(name, batch=3))
    loss = rc.losses.cross_entropy(program.outputs[0])
    rc.RecomputeOptimizer(optimizer).set_checkpoints(list(rc.models.info(name).checkpoints)[:1]).minimize(loss)
    rc.save_step(program, folder / "step.onnx")
    feed, executor = {v.name: pattern(v) for v in program.block.inputs}, rc.Executor()
    return [executor.run(program, feed, [loss])[0].item() for _ in range(STEPS)]


def printed(command: list[str], folder: Path) -> list[float]:
    """The losses that a loop prints; it prints nothing else, no warnings either."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return [float(line) for line in done.stdout.split()]


def test_the_loop_in_python(tmp_path: Path) -> None:
    ours = exported(tmp_path, "lenet", rc.Momentum(0.01))
    theirs = printed([sys.executable, str(FOLDER / "loop.py"), "step.onnx", str(STEPS)], tmp_path)
    np.testing.assert_allclose(theirs, ours, rtol=1e-5)
    assert ours[-1] < ours[0] / 2


@pytest.mark.filterwarnings("ignore:checkpoint .* saves nothing")
@pytest.mark.parametrize(("name", "optimizer"), [("lenet", rc.Momentum(0.01)), ("bert-tiny", rc.Adam(1e-3))])
def test_the_loop_in_javascript(tmp_path: Path, name: str, optimizer: object) -> None:
    """Needs node, and a folder in ONNXRUNTIME_NODE with node_modules/onnxruntime-node."""
    folder = Path(os.environ.get("ONNXRUNTIME_NODE", FOLDER.parents[1]))
    if shutil.which("node") is None or not (folder / "node_modules" / "onnxruntime-node").is_dir():
        pytest.skip("no node, or no onnxruntime-node: npm install onnxruntime-node, and name its folder in "
                    "ONNXRUNTIME_NODE")  # fmt: skip
    ours = exported(tmp_path, name, optimizer)
    theirs = printed(["node", str(FOLDER / "loop.mjs"), str(tmp_path / "step.onnx"), str(STEPS)], folder)
    np.testing.assert_allclose(theirs, ours, rtol=1e-5)
    assert ours[-1] < ours[0]
