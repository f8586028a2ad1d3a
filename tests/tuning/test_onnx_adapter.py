"""Adapters in ONNX Runtime's files: a session takes them, and computes what the program does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from few_bits_cases import IDS, two_layers

import recompute as rc
from recompute.cli.train import main

ort = pytest.importorskip("onnxruntime")
ALPHA = 12


def adapted(floats: bool, r: int, seed: int) -> rc.Program:
    """Adapters with contents on a table and two products, in 4 bits or in floats."""
    names = ["up", "down", "table"] if floats else ["up.codes", "down.codes", "table.codes"]
    program = rc.lora(rc.load(two_layers(floats=floats), batch=4), names, r=r, alpha=ALPHA)
    g = np.random.default_rng(seed)
    for v in program.block.parameters:
        program.data[v.name] = (0.1 * g.standard_normal(v.shape)).astype("f4")
    return program


def session(path: Path) -> object:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(path, options)


def scores(model: object, adapter: Path | None) -> np.ndarray:
    options = ort.RunOptions()
    if adapter is not None:
        loaded = ort.LoraAdapter()
        loaded.Load(str(adapter))
        options.add_active_adapter(loaded)
    return model.run(None, {"x": IDS}, options)[0]


@pytest.mark.parametrize("floats", [False, True])
def test_a_session_takes_adapters_of_any_rank(tmp_path: Path, floats: bool) -> None:
    first, second = adapted(floats, 3, 0), adapted(floats, 5, 1)
    rc.save_onnx_adapter(first, tmp_path)
    rc.save_onnx_adapter(second, tmp_path / "second", base=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter.onnx_adapter", "model.onnx", "second"]
    assert [p.name for p in (tmp_path / "second").iterdir()] == ["adapter.onnx_adapter"]
    written = onnx.load(tmp_path / "model.onnx")
    assert "recompute.adapters" not in {p.key for p in written.metadata_props}
    model = session(tmp_path / "model.onnx")
    assert [i.name for i in model.get_inputs()] == ["x"]
    (base,) = rc.load(two_layers(floats=floats), batch=4).evaluate({"x": IDS})
    np.testing.assert_allclose(scores(model, None), base, rtol=1e-4, atol=1e-5)
    for program, folder in ((first, tmp_path), (second, tmp_path / "second")):
        (own,) = program.evaluate({"x": IDS})
        assert abs(own - base).max() > 0.01
        np.testing.assert_allclose(scores(model, folder / "adapter.onnx_adapter"), own, rtol=1e-4, atol=1e-5)
    adapter = ort.AdapterFormat.read_adapter(str(tmp_path / "adapter.onnx_adapter"))  # owns the values' memory
    found = adapter.get_parameters()
    assert found.keys() == {v.name for v in first.block.parameters}
    for name, value in found.items():
        factor = 1 if name.endswith(("_A", "A.weight")) else ALPHA / 3
        np.testing.assert_array_equal(value.numpy(), np.float32(factor) * first.data[name])


def test_what_has_no_such_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rc.UsageError, match="has a DoRA adapter"):
        rc.save_onnx_adapter(rc.lora(rc.load(two_layers(floats=True), batch=4), "up", dora=True), tmp_path)
    with pytest.raises(rc.UsageError, match="no adapters"):
        rc.save_onnx_adapter(rc.load(two_layers(), batch=4), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(rc.ModelError, match="cannot write the adapter"):
        rc.save_onnx_adapter(adapted(False, 2, 0), tmp_path / "file" / "below")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(two_layers(), tmp_path / "model.onnx")
    g = np.random.default_rng(0)
    rows = [{"x": g.integers(0, 20, 6).tolist(), "label": g.standard_normal((6, 64)).tolist()} for _ in range(4)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = [str(tmp_path / "model.onnx"), "--data", str(tmp_path / "text.jsonl"), "--batch", "4", "--loss", "mse"]
    lora, saved = ["--lora", "r=2,targets=up.*"], ["--save", str(tmp_path / "run"), "--onnx-adapter"]
    assert main([*args, *lora, *saved, "--lr", "0.05", "--epochs", "2"]) == 0
    (own,) = rc.load(tmp_path / "run" / "model.onnx", batch=4).evaluate({"x": IDS})
    folder = tmp_path / "run" / "adapter"
    found = scores(session(folder / "model.onnx"), folder / "adapter.onnx_adapter")
    np.testing.assert_allclose(found, own, rtol=1e-4, atol=1e-5)
    capsys.readouterr()
    for given, said in ((saved, "--lora"), ([*lora, "--onnx-adapter"], "--save")):
        assert main([*args, *given]) == 2
        assert said in capsys.readouterr().err
