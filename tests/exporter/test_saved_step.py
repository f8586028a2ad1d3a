"""Steps for a loop in any ONNX runtime: plain inputs, the state in a file beside, graph optimisation on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import recompute as rc
from recompute.cli import main
from recompute.data.batches import synthetic_batch
from recompute.errors import ModelError, UsageError

ort = pytest.importorskip("onnxruntime")


def small(checkpoints: bool = True) -> tuple[rc.Program, dict[str, np.ndarray]]:
    """A recomputed step of LeNet, and a batch."""
    program = rc.load(rc.models.build("lenet", batch=4))
    loss = rc.losses.cross_entropy(program.outputs[0])
    optimizer = rc.Momentum(1e-2)
    (rc.RecomputeOptimizer(optimizer).set_checkpoints(["pool1"]) if checkpoints else optimizer).minimize(loss)
    specs = {s.name: s for s in rc.models.info("lenet").inputs}
    return program, synthetic_batch(program, 0, specs)


def test_a_loop_with_plain_inputs_and_optimisation(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every stored value is an input without default; ONNX Runtime's full optimisation; losses are the executor's."""
    program, feed = small()
    beside = rc.save_step(program, tmp_path / "step.onnx")
    assert beside == tmp_path / "step.state.safetensors"
    onnx.checker.check_model(onnx.load(tmp_path / "step.onnx"), full_check=True)
    state = load_file(beside)
    with safe_open(beside, framework="np") as file:
        updates = json.loads(file.metadata()["updates"])
    session = ort.InferenceSession(tmp_path / "step.onnx", providers=["CPUExecutionProvider"])
    assert {i.name for i in session.get_inputs()} == {*feed, *state} and not session.get_overridable_initializers()
    assert set(updates) == {*state} - {"learning_rate"}  # which a loop may set
    executor = rc.Executor()
    for step in range(5):
        theirs, *after = session.run(["loss", *updates.values()], {**feed, **state})
        state.update(zip(updates, after, strict=True))
        (ours,) = executor.run(program, feed, ["loss"])
        assert abs(theirs - ours) <= 1e-6 * max(1, abs(ours)), step
    for name, array in state.items():
        np.testing.assert_allclose(array, program.data[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert "Initializer" not in capfd.readouterr().err  # ONNX Runtime's warning of overridable ones


def test_a_loops_state_comes_back(tmp_path: Path) -> None:
    """What a loop saved under the same name is what the compiled program goes on with."""
    program, feed = small()
    beside = rc.save_step(program, tmp_path / "step.onnx")
    state = {n: a + np.ones((), a.dtype) if n.endswith("bias") else a for n, a in load_file(beside).items()}
    save_file(state, beside)
    again = rc.load_compiled(tmp_path / "step.onnx")
    assert again.block == program.block
    for name, array in again.data.items():
        np.testing.assert_array_equal(array, state[name])
    rc.Executor().run(again, feed, ["loss"])


def test_the_command_line_reads_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights are still parameters."""
    path = tmp_path / "step.onnx"
    assert main(["mlp", "--batch", "4", "-q", "--run", "2", "-o", str(path)]) == 0
    assert main(["mlp", "--batch", "4", "--run", "2", "-o", str(path)]) == 0
    assert f"wrote {tmp_path / 'step.state.safetensors'} (its weights and state)" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step.onnx", "step.state.safetensors"]
    weights = {v.name for v in rc.load_compiled(path).parameters}
    assert weights and weights <= {v.name for v in rc.load(path).parameters}
    assert main([str(path), "-q", "--list-parameters"]) == 0
    both = ["mlp", "--batch", "4", "-o", str(path), "--json", str(tmp_path / "step.state.safetensors")]
    assert main(both) == 2
    assert "-o" in (said := capsys.readouterr().err) or "--output" in said
    assert "would both write" in said


def damaged(beside: Path, tensor: str, **entry: object) -> None:
    raw = beside.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header[tensor].update(entry)
    text = json.dumps(header).encode()
    beside.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"dtype": "X9"}, "damaged entry"),
        ({"shape": [-1]}, "damaged entry"),
        ({"shape": [True]}, "damaged entry"),
        ({"shape": 7}, "damaged entry"),
        ({"data_offsets": [0]}, "damaged entry"),
        ({"data_offsets": [0, 1 << 40]}, "declared length"),
        ({"data_offsets": [1 << 40, (1 << 40) + 600]}, "which has"),
        ({"dtype": "I32"}, "does not match the program"),
    ],
)
def test_damaged_entries(tmp_path: Path, entry: dict, why: str) -> None:
    program, _ = small(checkpoints=False)
    name = program.parameters[0].name
    beside = rc.save_step(program, tmp_path / "step.onnx")
    damaged(beside, name, **entry)
    with pytest.raises(ModelError, match=why):
        rc.load_compiled(tmp_path / "step.onnx")


def test_damaged_files(tmp_path: Path) -> None:
    """One clear error each."""
    program, _ = small(checkpoints=False)
    path = tmp_path / "step.onnx"
    beside = rc.save_step(program, path)
    raw = beside.read_bytes()
    for part in (b"", raw[:7], raw[:30], b"\xff" * 40, (2).to_bytes(8, "little") + b"[]", b"\2" + b"\0" * 7 + b"{:"):
        beside.write_bytes(part)
        for load in (rc.load, rc.load_compiled):
            with pytest.raises(ModelError, match=r"step\.state\.safetensors"):
                load(path)
    beside.unlink()
    with pytest.raises(ModelError, match=r"missing: keep 'step\.state\.safetensors' beside the model"):
        rc.load_compiled(path)
    model = onnx.load(path)
    with pytest.raises(ModelError, match="load it by its path, not as a ModelProto"):
        rc.load(model)
    for name in ("../step.state.safetensors", os.fspath(beside)):
        next(p for p in model.metadata_props if p.key == "recompute.state").value = name
        onnx.save(model, path)
        with pytest.raises(ModelError, match="outside the model's folder"):
            rc.load(path)


def test_wrong_requests(tmp_path: Path) -> None:
    program, _ = small(checkpoints=False)
    with pytest.raises(UsageError, match="state must be 'defaults' or 'inputs', not 'none'"):
        rc.export_step(program, state="none")
    with pytest.raises(ModelError, match="cannot write"):
        rc.save_step(program, tmp_path / "no" / "step.onnx")
    assert not list(tmp_path.iterdir())
