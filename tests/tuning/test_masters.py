"""Weights of integers train as floats, and go back to the file's own form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from few_bits_cases import IDS, generating, two_layers
from onnx.numpy_helper import from_array, to_array
from test_integers import FORMS, X, source

import recompute as rc
from recompute.cli.train import main

G = np.random.default_rng(0)


def line(axis: int | None) -> onnx.ModelProto:
    """A weight behind DequantizeLinear, with one scale or one for each column, and its zero point."""
    form = "" if axis is None else f"<axis = {axis}> "
    text = f"g (float[4,32] x) => (float[4,16] y) {{ v = DequantizeLinear {form}(w, s, z) y = MatMul (x, v) }}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
    size = () if axis is None else (16,)
    tensors = {"w": G.integers(0, 255, (32, 16)).astype(np.uint8), "s": G.uniform(0.002, 0.004, size).astype("f4")}
    tensors["z"] = np.full(size, 120, np.uint8)
    model.graph.initializer.extend(from_array(np.asarray(a), n) for n, a in tensors.items())
    return model


CASES = {**{f: source(f) for f in FORMS if f != "cast"}, "one scale": line(None), "columns": line(1)}


@pytest.mark.parametrize("form", CASES)
def test_masters_train_and_round_to_the_file(form: str) -> None:
    """Untrained they give the file back, to the bit; trained, the file scores nearer to them than it did."""
    model = CASES[form]
    program = rc.load(rc.dequantize(model))
    (name,) = (v.name for v in program.parameters)
    (base,), (floats,) = rc.load(model).evaluate({"x": X}), program.evaluate({"x": X})
    np.testing.assert_allclose(floats, base, rtol=0.02, atol=0.02 * abs(base).max())  # activations are not rounded
    same = {t.name: to_array(t) for t in rc.requantize(program, model).graph.initializer}
    assert all(np.array_equal(to_array(t), same[t.name]) for t in model.graph.initializer)
    loss = rc.losses.mse(program["y"])
    rc.SGD(0.3).minimize(loss)
    executor, feed = rc.Executor(), {"x": X, "label": np.zeros((4, 16), "f4")}
    losses = [float(executor.run(program, feed, [loss])[0]) for _ in range(3)]
    assert losses[-1] < 0.9 * losses[0]
    made = rc.requantize(program, model)
    assert [n.op_type for n in made.graph.node] == [n.op_type for n in model.graph.node]
    assert [(t.name, t.data_type, t.dims) for t in made.graph.initializer] == [
        (t.name, t.data_type, t.dims) for t in model.graph.initializer
    ]
    (own,), (found,) = program.evaluate({"x": X}), rc.load(made).evaluate({"x": X})
    assert np.linalg.norm(found - own) < 0.2 * np.linalg.norm(base - own), name


def test_weights_in_few_bits_with_norms_and_biases() -> None:
    model = two_layers()
    program = rc.load(rc.dequantize(model), batch=4)
    masters = ["down.codes.weight", "table.codes.weight", "up.codes.weight"]
    assert sorted(v.name for v in program.parameters) == sorted(["b", "g", *masters])
    (base,), (own,) = rc.load(model, batch=4).evaluate({"x": IDS}), program.evaluate({"x": IDS})
    np.testing.assert_allclose(own, base, rtol=1e-4, atol=1e-5)
    loss = rc.losses.mse(program["y"])
    rc.Adam(0.02).minimize(loss)
    executor, feed = rc.Executor(), {"x": IDS, "label": np.ones((4, 6, 64), "f4")}
    losses = [float(executor.run(program, feed, [loss])[0]) for _ in range(10)]
    made = rc.requantize(program, model)
    assert [n.op_type for n in made.graph.node] == [n.op_type for n in model.graph.node]
    (found,) = rc.load(made, batch=4).evaluate({"x": IDS})
    assert ((found - 1) ** 2).mean() < 0.5 * losses[0]
    tensors = {t.name: to_array(t) for t in made.graph.initializer}
    assert np.array_equal(tensors["g"], program.data["g"])


def test_a_weight_that_is_read_twice_has_one_master() -> None:
    text = "g (float[4,16] x) => (float[4,16] y) { u = MatMul (x, m) y = MatMul (u, m) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
    model.graph.initializer.append(from_array(G.standard_normal((16, 16)).astype("f4"), "m"))
    coded = rc.quantize_frozen(model)
    assert [n.op_type for n in coded.graph.node].count("DequantizeLinear") == 2
    program = rc.load(rc.dequantize(coded))
    assert [v.name for v in program.parameters] == ["m"]
    same = {t.name: to_array(t) for t in rc.requantize(program, coded).graph.initializer}
    assert all(np.array_equal(to_array(t), same[t.name]) for t in coded.graph.initializer)


def test_patterns_choose_and_errors_say_what_is_missing() -> None:
    program = rc.load(rc.dequantize(two_layers(), "up*"), batch=4)
    assert "up.codes.weight" in program.data and "down.codes" in program.data
    with pytest.raises(rc.UsageError, match="no weight of integers is called 'left'"):
        rc.dequantize(two_layers(), "left")
    with pytest.raises(rc.UsageError, match=r"was not made by rc\.dequantize"):
        rc.requantize(two_layers(), two_layers())
    with pytest.raises(rc.UsageError, match=r"the original has no tensor 'up\.codes'"):
        rc.requantize(rc.dequantize(two_layers(), "up*"), source("fused"))


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(generating(), tmp_path / "model.onnx")
    rows = [{"input_ids": ids[:-1], "label": ids[1:]} for ids in G.integers(0, 40, (8, 7)).tolist()]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = [str(tmp_path / "model.onnx"), "--data", str(tmp_path / "text.jsonl"), "--batch", "4"]
    args += ["--dim", "sequence_length=6", "--dequantize", "*o_proj*,lm_head*", "-q"]
    assert main([*args, "--save", str(tmp_path / "run"), "--epochs", "2", "--lr", "0.01"]) == 0
    made = onnx.load(tmp_path / "run" / "quantized.onnx")
    assert [n.op_type for n in made.graph.node] == [n.op_type for n in generating().graph.node]
    before = {t.name: to_array(t) for t in generating().graph.initializer}
    changed = {t.name for t in made.graph.initializer if not np.array_equal(to_array(t), before[t.name])}
    assert "lm_head.MatMul.weight_Q4" in changed and "norm" in changed
    assert "layers.0.attn.q_proj.MatMul.weight_Q4" not in changed
    assert main([*args, "--lora", "targets=*q_proj*"]) == 2
    assert "leave out --dequantize" in capsys.readouterr().err
