"""Adapters on networks of the zoo: where they go, what trains, what merging gives (beside PEFT: test_peft.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import recompute as rc
from recompute.compiling.compiler import compile_step
from recompute.data.batches import synthetic_batch

onnxruntime = pytest.importorskip("onnxruntime")

SMALL = {"layers": 1, "hidden": 32, "inner": 48, "heads": 2, "groups": 1, "vocab": 50, "seq": 12}
LINEAR = ["*_proj.weight"]
BUDGET = {"budget": "85%", "effort": 0.1}


def llama(batch: int | str = 2, **options: Any) -> onnx.ModelProto:
    return rc.models.build("llama-tiny", batch=batch, **{**SMALL, **options})


def trained(program: rc.Program, steps: int = 4) -> list[float]:
    loss = rc.losses.cross_entropy(program.outputs[0])
    rc.Adam(1e-2).minimize(loss)
    feed, executor = synthetic_batch(program), rc.Executor()
    return [float(executor.run(program, feed, [loss])[0]) for _ in range(steps)]


def onnx_scores(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()  # else ONNX Runtime rounds what int8 weights multiply to 8 bits too
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feed)[0]


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_merged_models_score_as_programs_do(dora: bool, dropout: float, int8: bool) -> None:
    """Nothing changes at first; then the adapters alone train; merged, the model has the base's nodes."""
    start = rc.load(llama())
    start = rc.quantize_frozen(start, LINEAR) if int8 else start
    program = rc.lora(start, LINEAR, r=3, alpha=6, dora=dora, dropout=dropout)
    assert all(".lora_" in v.name for v in program.parameters) and len(program.parameters) == 7 * (3 if dora else 2)
    feed = synthetic_batch(program)
    (first,), (base,) = program.evaluate(feed), start.evaluate(feed)
    np.testing.assert_allclose(first, base, rtol=0, atol=1e-5 if dora else 0)
    before = {n: a.copy() for n, a in program.data.items()}
    losses = trained(program)
    assert losses[-1] < losses[0]
    changed = {n for n, a in before.items() if not np.array_equal(a, program.data[n])}
    assert changed - {"step"} == {v.name for v in program.block.parameters}
    (own,) = program.evaluate(feed)
    assert abs(own - base).max() > 1e-2
    merged = rc.merge_adapters(program)
    np.testing.assert_allclose(onnx_scores(merged, feed), own, rtol=0, atol=1e-5)
    np.testing.assert_allclose(onnx_scores(rc.export_trained(program), feed), own, rtol=0, atol=1e-5)
    assert [n.op_type for n in merged.graph.node] == [n.op_type for n in llama().graph.node]
    assert not [t.name for t in merged.graph.initializer if "lora" in t.name or "int8" in t.name]
    assert {v.name for v in rc.load(merged).parameters} == {v.name for v in rc.load(llama()).parameters}


def test_dropout_is_drawn_in_training_only() -> None:
    program = rc.lora(rc.load(llama()), LINEAR, dropout=0.5)
    names = [v.name for v in program.block.parameters if v.name.endswith("lora_B.weight")]
    for n in names:
        program.data[n] = np.full(program[n].shape, 0.02, np.float32)
    feed = synthetic_batch(program)
    assert np.array_equal(program.evaluate(feed)[0], program.evaluate(feed)[0])
    loss = rc.losses.cross_entropy(program.outputs[0])
    rc.SGD(0.0).minimize(loss)
    executor, feed = rc.Executor(), synthetic_batch(program)
    a, b = (float(executor.run(program, feed, [loss])[0]) for _ in range(2))
    assert a != b  # each step draws another mask


def test_files_say_what_trains(tmp_path: Path) -> None:
    """An edited model that is saved and loaded, at any batch and by any door, trains its adapters alone."""
    path = tmp_path / "lora.onnx"
    rc.save_model(rc.lora(llama("N"), ["*.q_proj.weight"], r=2, train=["lm_head.weight"]), path)
    names = {"layers.0.self_attn.q_proj.lora_A.weight", "layers.0.self_attn.q_proj.lora_B.weight", "lm_head.weight"}
    for program in (rc.load(path, batch=3), rc.load(path, batch=3).for_test(batch=2)):
        assert {v.name for v in program.block.parameters} == names
    found = rc.estimate(str(path), batch=2)
    assert found.by_role["parameter"] == 4 * (2 * 32 + 2 * 32 + 32 * 50)
    assert found.by_role["optimizer state"] < 3 * found.by_role["parameter"]
    assert {v.name for v in rc.load(path, batch=1, trainable=["norm.weight"]).parameters} == {"norm.weight"}
    with pytest.raises(rc.UsageError, match="the model has adapters already"):
        rc.lora(path, ["*.k_proj.weight"])


def test_weights_in_other_files_are_read(tmp_path: Path) -> None:
    """The edited model has them all: it can be moved, and merged."""
    rc.save_model(llama(), tmp_path / "big.onnx", external_above=0)
    assert len(list(tmp_path.glob("*.data"))) == 1
    model = rc.lora(tmp_path / "big.onnx", LINEAR)
    program = rc.lora(rc.load(tmp_path / "big.onnx"), LINEAR)
    feed = synthetic_batch(program)
    (own,) = program.evaluate(feed)
    for found in (model, rc.merge_adapters(model), rc.export_trained(program), rc.merge_adapters(program)):
        assert not any(t.external_data for t in found.graph.initializer)
        np.testing.assert_allclose(onnx_scores(found, feed), own, rtol=0, atol=1e-5)


def test_old_opsets_are_brought_up_to_date() -> None:
    model = rc.models.build("lenet", batch=2)
    model.opset_import[0].version = 13  # its operators were the same then
    program = rc.load(rc.lora(model, ["fc*.weight"], r=2))
    feed = synthetic_batch(program)
    np.testing.assert_allclose(program.evaluate(feed)[0], rc.load(model).evaluate(feed)[0], rtol=0, atol=0)
    assert len(program.parameters) == 6


def test_large_models_need_no_weights() -> None:
    """Adapters go on a network whose weights are fills, to see what it takes."""
    model = rc.lora(rc.models.build("llama-block", batch=1, weights=False, seq=64), LINEAR, r=4)
    program = rc.load(model)
    assert {v.shape for v in program.parameters if "q_proj" in v.name} == {(4, 1024), (1024, 4)}


@pytest.mark.parametrize("other", [{"checkpoints": ["layers.*.out"]}, BUDGET])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_recomputed_steps_have_the_same_bits(dora: bool, other: dict[str, Any]) -> None:
    """With checkpoints, or within a budget; predicted peaks are those measured."""
    losses, peaks = [], []
    for kept in ({}, other):
        program = rc.lora(rc.load(llama(layers=2, seq=32)), LINEAR, r=2, dora=dora, dropout=0.1)
        loss = rc.losses.cross_entropy(program.outputs[0])
        feed = synthetic_batch(program)
        step = compile_step(program, loss.name, rc.Adam(1e-2), **kept)
        executor = rc.Executor()
        losses.append([float(executor.run(step.program, feed, [loss.name])[0]) for _ in range(3)])
        measured = executor.session(step.program, [loss.name]).measured_peak_bytes
        assert measured == step.figures.peak_bytes
        peaks.append(measured)
    assert losses[0] == losses[1] and peaks[1] < peaks[0]
    assert other is not BUDGET or peaks[1] <= 0.85 * peaks[0]


def test_what_has_no_adapter() -> None:
    with pytest.raises(rc.UsageError, match=r"no matrix of the model is called '\*\.w_proj\.weight'"):
        rc.lora(llama(), ["*.w_proj.weight"])
    with pytest.raises(rc.UsageError, match="is read by Gather"):
        rc.lora(llama(), ["embed_tokens.weight"], dora=True)
    with pytest.raises(rc.UsageError, match="r must be a whole number of at least 1, not 0"):
        rc.lora(llama(), LINEAR, r=0)
    with pytest.raises(rc.UsageError, match="dropout must be a number from 0 to less than 1, not 1"):
        rc.lora(llama(), LINEAR, dropout=1)
    with pytest.raises(rc.UsageError, match="nothing that can be trained is called 'head'"):
        rc.lora(llama(), LINEAR, train=["head"])
    with pytest.raises(rc.UsageError, match="there is nothing to merge"):
        rc.merge_adapters(llama())
    tied = rc.models.build("gpt2-tiny", batch=1)
    with pytest.raises(rc.UsageError, match="is read in several ways"):
        rc.lora(tied, ["wte.weight"])


@pytest.mark.parametrize(("name", "patterns"), [("llama", "*_proj.weight"), ("bert", "*.self.*.weight")])
def test_models_that_pytorch_exported(name: str, patterns: str) -> None:
    """Files of the dynamo exporter: Linear is a Transpose and a MatMul there, and the file says what is a parameter."""
    path = Path(__file__).parents[1] / "data" / "pytorch_exports" / f"{name}.onnx"
    program = rc.load(path, mode="file")
    program = rc.lora(program, patterns, r=2, dora=True)
    assert program.parameters and all(".lora_" in v.name for v in program.parameters)
    for v in program.block.parameters:
        if v.name.endswith("lora_B.weight"):
            program.data[v.name] = np.full(v.shape, 0.03, np.float32)
    feed = synthetic_batch(program)
    name = program.block.outputs[0]
    np.testing.assert_allclose(
        onnxruntime.InferenceSession(rc.merge_adapters(program).SerializeToString()).run([name], feed)[0],
        program.evaluate(feed, [name])[0], rtol=0, atol=2e-5,
    )  # fmt: skip


@pytest.mark.parametrize("edit", [rc.lora, rc.quantize_frozen])
def test_a_graph_is_searched_once_for_all_weights(edit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each weight: a large model would take quadratic time."""
    from recompute.tuning.graph import Graph

    calls = []
    reading = Graph.reading
    monkeypatch.setattr(Graph, "reading", lambda self: calls.append(self) or reading(self))
    assert len(edit(llama(), LINEAR).graph.initializer) > 7
    assert 1 <= len(calls) <= 2
