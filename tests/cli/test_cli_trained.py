"""What the command line writes after training, and its check of models that were exported in training mode."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.training.test_modes import X, Y, network

import recompute as rc
from recompute.cli import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(network(), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=X, label=Y)
    return tmp_path / "net.onnx"


def test_files_have_what_was_trained(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The step goes on where the run ended; the trained model is for inference; both lines say so."""
    folder = model.parent
    step, trained, report = folder / "step.onnx", folder / "trained.onnx", folder / "r.json"
    arguments = [str(model), "--batch", "6", "--data", str(folder / "data.npz"), "--lr", "0.05", "--optimizer", "sgd"]
    code = main([*arguments, "--run", "3", "-o", str(step), "--save-trained", str(trained), "--json", str(report)])
    assert code == 0
    said = capsys.readouterr().out
    assert f"wrote {step} (the training step, after 3 steps)" in said
    assert f"wrote {trained} (the model after 3 steps, for inference)" in said
    found = json.loads(report.read_text())
    assert (found["output"], found["trained"]) == (str(step), str(trained))
    assert {p.key: p.value for p in onnx.load(step).metadata_props}["recompute.steps_run"] == "3"
    ours = rc.load(network(), batch=6)
    rc.SGD(0.05).minimize(rc.losses.cross_entropy(ours))
    executor = rc.Executor()
    losses = [float(executor.run(ours, {"x": X, "label": Y}, ["loss"])[0]) for _ in range(4)]
    again = rc.load_compiled(step)
    assert float(rc.Executor().run(again, {"x": X, "label": Y}, ["loss"])[0]) == losses[3]
    assert found["run"]["losses"] == losses[:3]
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(trained).graph.initializer}
    np.testing.assert_array_equal(tensors["body.m1"], rc.load(trained, batch=1).data["body.m1"])
    assert not np.array_equal(tensors["head.weight"], rc.load(network(), batch=6).data["head.weight"])


def test_timed_steps_do_not_train_what_is_written(model: Path) -> None:
    """--profile runs further steps."""
    folder = model.parent
    paths = [folder / "a.onnx", folder / "b.onnx"]
    for path, more in zip(paths, ([], ["--profile"]), strict=True):
        assert main([str(model), "--batch", "6", "-q", "--run", "2", "--save-trained", str(path), *more]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_model_in_training_mode_is_checked_in_inference_mode(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Like with like: the file's own mode would normalise by the batch in ONNX Runtime, and drop values."""
    pytest.importorskip("onnxruntime")
    assert main([str(model), "--batch", "6", "--check"]) == 0
    assert "forward pass against ONNX Runtime" in capsys.readouterr().out


def test_nothing_trained_is_not_saved(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--save-trained needs --run."""
    assert main([str(model), "--batch", "6", "--save-trained", str(model.parent / "t.onnx")]) == 2
    assert "--save-trained needs --run N" in capsys.readouterr().err


def test_a_frozen_part_keeps_its_bits(model: Path) -> None:
    """--freeze: weights and statistics."""
    path = model.parent / "t.onnx"
    assert (
        main([str(model), "--batch", "6", "-q", "--freeze", "body.*", "--run", "2", "--save-trained", str(path)]) == 0
    )
    before, after = (
        {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(f).graph.initializer} for f in (model, path)
    )
    changed = {n for n in after if not np.array_equal(before[n], after[n])}
    assert changed == {"head.weight", "head.bias"}


def test_what_freezing_saves_is_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both steps are compiled; the figures of what is left are those of the plain step."""
    assert main([str(model), "--batch", "6", "--freeze", "body.*", "--json", str(model.parent / "f.json")]) == 0
    assert "parameters that train" in capsys.readouterr().out
    found = json.loads((model.parent / "f.json").read_text())
    before, after = found["frozen"]["before"], found["frozen"]["after"]
    assert after["trained"] == found["parameters"] < before["trained"]
    assert after["peak_bytes"] == found["plain"]["peak_bytes"] < before["peak_bytes"]
    assert after["gradient_bytes"] == 4 * after["trained"] and after["state_bytes"] < before["state_bytes"]
    assert after["weight_bytes"] == before["weight_bytes"] and after["kept_bytes"] < before["kept_bytes"]
