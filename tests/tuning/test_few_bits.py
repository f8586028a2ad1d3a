"""LoRA on weights in few bits: beside the same numbers in floats; what merging keeps."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from few_bits_cases import IDS, MS, generating, model, packed, two_layers
from onnx import helper
from onnx.numpy_helper import to_array

import recompute as rc
from recompute.cli.train import main
from recompute.ops.linear.nbits import TABLES
from recompute.tuning.few_bits import few_bits, rounded, whole
from recompute.tuning.graph import Graph

WEIGHTS = {"up": "up.codes", "down": "down.codes", "table": "table.codes"}


def both(names: list[str], bits: int | str = 4, **options: object) -> list[rc.Program]:
    """The model in few bits and in floats, with the same adapters."""
    made = []
    for floats in (False, True):
        program = rc.load(two_layers(bits=bits, floats=floats), batch=4)
        program = rc.lora(program, [n if floats else WEIGHTS[n] for n in names], r=3, alpha=6, **options)
        g = np.random.default_rng(7)
        for v in sorted(program.block.parameters, key=lambda v: v.name):
            program.data[v.name] = (0.1 * g.standard_normal(v.shape)).astype("f4")
        made.append(program)
    return made


@pytest.mark.parametrize("bits", [4, 8, "nf4"])
def test_adapters_train_as_beside_the_same_numbers_in_floats(bits: int | str) -> None:
    found = []
    for program in both(["up", "down", "table"], bits):
        assert len(program.block.parameters) == 6
        loss = rc.losses.mse(program["y"])
        rc.SGD(1.0).minimize(loss)
        before = {v.name: program.data[v.name].copy() for v in program.block.parameters}
        feed = {v.name: IDS if v.name == "x" else np.ones(v.shape, "f4") for v in program.inputs}
        executor = rc.Executor()
        (value,) = executor.run(program, feed, [loss])
        session = executor.session(program, [loss])
        assert session.report.peak == session.measured_peak_bytes
        found.append((value, {n.replace(".codes", ""): program.data[n] - a for n, a in before.items()}))
    (mine, gradients), (theirs, wanted) = found
    np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert gradients.keys() == wanted.keys()
    for name, array in gradients.items():
        assert abs(array).max() > 1e-4
        np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-5 * abs(wanted[name]).max())


def test_rounding_keeps_the_form_and_is_within_half_a_step() -> None:
    """What is on the grid comes back to the bit; other numbers are off by half a step of their block at most."""
    for bits in (4, 8):
        graph = Graph(two_layers(bits=bits))
        w = few_bits(graph)["up.codes"]
        own = whole(graph, w).astype(float)
        same, held = rounded(graph, w, own)
        assert all(np.array_equal(array, graph.constant(name)) for name, array in same.items())
        np.testing.assert_allclose(held, own, rtol=1e-6)
        wanted = own + np.random.default_rng(0).standard_normal(own.shape)
        found, held = rounded(graph, w, wanted)
        step = np.repeat(found["up.scales"], 32, axis=1)
        assert {n: (a.shape, a.dtype) for n, a in found.items()} == {n: (a.shape, a.dtype) for n, a in same.items()}
        assert (abs(held - wanted) <= step * 0.51 + 1e-6).mean() > 0.999  # a zero point is rounded too


def test_merging_keeps_what_rounding_would_lose_beside_the_weight() -> None:
    """Small changes to 4 bits are lost by rounding; the file computes what the program does either way."""
    onnxruntime = pytest.importorskip("onnxruntime")
    program = both(["up", "down"])[0]
    (own,) = program.evaluate({"x": IDS})
    with pytest.warns(rc.ModelWarning, match="2 of 2 adapters stay beside their weights"):
        merged = rc.merge_adapters(program)
    nodes = [n.op_type for n in merged.graph.node]
    assert nodes.count("MatMulNBits") == 2 and nodes.count("MatMul") == 4
    (scores,) = onnxruntime.InferenceSession(merged.SerializeToString()).run(None, {"x": IDS})
    np.testing.assert_allclose(scores, own, rtol=1e-4, atol=1e-5)
    assert sorted(v.name for v in rc.load(merged, batch=4).parameters) == sorted(v.name for v in program.parameters)

    forced = rc.merge_adapters(program, tolerance=math.inf)
    assert [n.op_type for n in forced.graph.node] == [n.op_type for n in two_layers().graph.node]
    assert not [t.name for t in forced.graph.initializer if "lora" in t.name]
    (near,) = onnxruntime.InferenceSession(forced.SerializeToString()).run(None, {"x": IDS})
    (base,) = rc.load(two_layers(), batch=4).evaluate({"x": IDS})
    assert np.linalg.norm(near - own) < np.linalg.norm(base - own)  # nearer than the base, and not equal


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_floats_of_4_bits_are_rounded_as_onnx_runtime_does(kind: str) -> None:
    """To the nearest of 16 numbers by the largest of a block; merging and `requantize` keep the nodes."""
    quantizer = pytest.importorskip("onnxruntime.capi._pybind_state").quantize_matmul_bnb4
    graph = Graph(two_layers(bits=kind))
    w = few_bits(graph)["up.codes"]
    same, held = rounded(graph, w, whole(graph, w).astype(float))
    np.testing.assert_allclose(held, whole(graph, w), rtol=1e-6)
    assert np.array_equal(same["up.scales"], graph.constant("up.scales"))
    wanted = 9 * np.random.default_rng(0).standard_normal(w.shape).astype("f4")
    found, held = rounded(graph, w, wanted)
    codes, largest = np.zeros(wanted.size // 2, np.uint8), np.zeros(wanted.size // 32, "f4")
    quantizer(codes, np.ascontiguousarray(wanted), largest, 32, int(kind == "nf4"), *w.shape)
    assert found["up.codes"].shape == codes.shape and found["up.scales"].shape == largest.shape
    np.testing.assert_allclose(found["up.scales"], largest, rtol=1e-6)
    for place in (0, 4):  # of -0 and 0 either
        mine, theirs = (TABLES[kind][c >> place & 15] for c in (found["up.codes"], codes))
        assert np.array_equal(mine, theirs)

    program = both(["up", "down"], bits=kind)[0]
    forced = rc.merge_adapters(program, tolerance=math.inf)
    nodes = [n.op_type for n in two_layers(bits=kind).graph.node]
    assert [n.op_type for n in forced.graph.node] == nodes and nodes.count("MatMulBnb4") == 2
    program = rc.load(rc.dequantize(two_layers(bits=kind)), batch=4)
    again = rc.requantize(program, two_layers(bits=kind))
    for t in two_layers(bits=kind).graph.initializer:
        if "codes" in t.name:
            assert np.array_equal(Graph(again).constant(t.name), to_array(t))
    np.testing.assert_allclose(
        rc.load(again, batch=4).evaluate({"x": IDS})[0], program.evaluate({"x": IDS})[0], rtol=1e-4, atol=1e-5
    )


def test_large_changes_of_8_bits_are_merged() -> None:
    program = both(["up"], bits=8)[0]
    for v in program.block.parameters:
        program.data[v.name] *= 10
    merged = rc.merge_adapters(program)
    assert "lora" not in str([t.name for t in merged.graph.initializer])
    (own,), (scores,) = program.evaluate({"x": IDS}), rc.load(merged, batch=4).evaluate({"x": IDS})
    assert np.linalg.norm(scores - own) < 0.02 * np.linalg.norm(own)


def test_peft_files_come_back(tmp_path: Path) -> None:
    program = both(["up", "table"])[0]
    rc.save_adapter(program, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["table.codes", "up.codes"] and config["r"] == 3
    again = rc.load_adapter(rc.load(two_layers(), batch=4), tmp_path)
    assert np.array_equal(again.evaluate({"x": IDS})[0], program.evaluate({"x": IDS})[0])


@pytest.mark.filterwarnings("ignore:training begins without a past")
def test_parts_of_names_are_those_of_peft(tmp_path: Path) -> None:
    program = rc.lora(rc.load(generating(), batch=2, dims={"sequence_length": 6}), "*q_proj*", r=2)
    for v in program.block.parameters:
        program.data[v.name] = np.full(v.shape, 0.1, "f4")
    rc.save_adapter(program, tmp_path, prefix="model.", rename={"attn": "self_attn"})
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    plain = rc.load(generating(), batch=2, dims={"sequence_length": 6})
    with pytest.raises(rc.UsageError, match="has no module"):
        rc.load_adapter(plain, tmp_path)
    again = rc.load_adapter(plain, tmp_path, rename={"attn": "self_attn"})
    feed = {"input_ids": IDS[:2]}
    assert np.array_equal(again.evaluate(feed)[0], program.evaluate(feed)[0])
    with pytest.raises(rc.UsageError, match="rename"):
        rc.save_adapter(program, tmp_path, rename={"attn": 1})


@pytest.mark.parametrize(
    "name", ["q_proj.MatMul.weight_Q4", "q_proj.weight_Bnb4", "q_proj.qweight", "q_proj.weight_quant", "q_proj.weight"]
)
def test_names_of_tools_are_those_of_modules(name: str) -> None:
    source = two_layers()
    for t in source.graph.initializer:
        t.name = t.name.replace("up.codes", name)
    for n in source.graph.node:
        n.input[:] = [i.replace("up.codes", name) for i in n.input]
    program = rc.lora(rc.load(source, batch=4), "*q_proj*", r=2)
    assert sorted(v.name for v in program.parameters) == ["q_proj.lora_A.weight", "q_proj.lora_B.weight"]


def test_what_weights_in_few_bits_cannot_have_is_said() -> None:
    program = rc.load(two_layers(), batch=4)
    with pytest.raises(rc.UsageError, match=r"DoRA of weights in few bits is not supported: 'up\.codes'"):
        rc.lora(program, "up.codes", dora=True)
    with pytest.raises(rc.UsageError, match="stored in 8 bits or fewer already"):
        rc.quantize_frozen(program, "up.codes")
    with pytest.raises(rc.UsageError, match="tolerance must be at least 0"):
        rc.merge_adapters(program, tolerance=-1)


def test_the_command_trains_adapters_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(two_layers(), tmp_path / "model.onnx")
    g = np.random.default_rng(0)
    rows = [{"x": g.integers(0, 20, 6).tolist(), "label": g.standard_normal((6, 64)).tolist()} for _ in range(8)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = [str(tmp_path / "model.onnx"), "--data", str(tmp_path / "text.jsonl"), "--batch", "4", "--loss", "mse"]
    adapters = ["--lora", "r=2,alpha=4,targets=up.*,down*", "--lr", "0.05", "--epochs", "2"]
    assert main([*args, *adapters, "--save", str(tmp_path / "run"), "--json", str(tmp_path / "r.json")]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["parameters"] == 2 * (2 * (64 + 96))
    assert found["epochs"][1]["train"]["loss"] < found["epochs"][0]["train"]["loss"]
    assert found["peak_bytes"]["predicted"] == found["peak_bytes"]["measured"]
    again = rc.load_adapter(rc.load(tmp_path / "model.onnx", batch=4), tmp_path / "run" / "adapter")
    own = rc.load(tmp_path / "run" / "model.onnx", batch=4)
    np.testing.assert_array_equal(again.evaluate({"x": IDS})[0], own.evaluate({"x": IDS})[0])
    capsys.readouterr()
    for wrong, said in (
        (["--lora", "r=2"], "name the weights that get adapters"),
        (["--lora", "rank=2,targets=up*"], "cannot read 'rank=2'"),
        (["--lora", "targets=up*", "--trainable", "g"], "leave out --trainable"),
        (["--lora", "targets=left*"], "no matrix of the model is called 'left*'"),
    ):
        assert main([*args, *wrong]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_benchmark_meets_its_target_on_a_small_file() -> None:
    """A file as ONNX Runtime's tools write it, with GroupQueryAttention and its norms; predicted = measured."""
    script = Path(__file__).parents[2] / "benchmarks" / "few_bits.py"
    if not script.is_file():
        pytest.skip("a source distribution has no benchmarks")
    found = subprocess.run([sys.executable, script, "--small"], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "13,312 numbers" in found.stdout


@pytest.mark.slow
def test_losses_fall_as_beside_the_same_numbers_in_floats(tmp_path: Path) -> None:
    """Adapters on every product of the benchmark's small LLaMA-like file; later, last bits part the two runs."""
    script = Path(__file__).parents[2] / "benchmarks" / "few_bits.py"
    if not script.is_file():
        pytest.skip("a source distribution has no benchmarks")
    benchmark = runpy.run_path(str(script))
    path = tmp_path / "llama.onnx"
    benchmark["write"](path, benchmark["LEARNED"])
    (mine, trained), (theirs, same) = (benchmark["learn"](m, 30) for m in (str(path), rc.dequantize(path)))
    assert trained == same == 82_944
    assert mine[-5:].mean() < mine[:5].mean() - 0.5
    np.testing.assert_allclose(mine, theirs, rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "shapes", "said"),
    [
        ({"bits": 0}, {}, "bits=0"),
        ({"block_size": -32}, {}, "block_size=-32"),
        ({"K": 1 << 62}, {}, "codes must be"),
        ({"N": -8}, {}, "N=-8"),
        ({}, {"codes": (8, 1, 15)}, "codes must be 16 a row"),
        ({}, {"scales": ()}, "scales must be 1 a row"),
        ({}, {"zeros": (128,)}, "zero points must be 1 a row"),
    ],
    ids=str,
)
def test_files_whose_sizes_do_not_fit_are_refused(given: dict, shapes: dict, said: str) -> None:
    """By what changes them; what loads them: test_nbits.py."""
    parts = packed(8, 32)
    parts |= {name: np.resize(parts[name], shape) for name, shape in shapes.items()}
    options = {"N": 8, "K": 32, "block_size": 32, "bits": 4, **given}
    source = model([helper.make_node("MatMulNBits", ["x", *parts], ["y"], domain=MS, **options)], parts, [3, 32])
    for change in (rc.dequantize, lambda m: rc.lora(m, "codes", r=2)):
        with pytest.raises(rc.ModelError, match=said):
            change(source)


def test_a_table_whose_columns_are_gathered_is_no_weight_of_rows() -> None:
    parts = {name: a.reshape(32, -1) for name, a in packed(32, 32, 16).items()}
    options = {"block_size": 16, "bits": 4, "gather_axis": 1}
    node = helper.make_node("GatherBlockQuantized", ["codes", "x", "scales", "zeros"], ["y"], domain=MS, **options)
    source = model([node], parts, [3], onnx.TensorProto.INT64)
    assert rc.load(source)["y"].shape == (32, 3)
    for change in (rc.dequantize, lambda m: rc.lora(m, "codes", r=2)):
        with pytest.raises(rc.UsageError, match=r"no weight|only weights of"):
            change(source)
