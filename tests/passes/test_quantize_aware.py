"""Quantisation-aware training: which values are rounded, ranges in both modes, memory, recomputation."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import recompute as rc
from recompute.compiling.compiler import CompiledStep
from recompute.planning.figures import kept_for_backward

RNG = np.random.default_rng(0)
NETWORK = """<ir_version: 10, opset_import: ["": 21]> network (float[N,2,8,8] x) => (float[N,3] scores)
<float[4,2,3,3] c1_w, float[4] g, float[4] b, float[4] m, float[4] v, float[4,4,3,3] c2_w, float[4] c2_b,
 float[64,5] fc1_w, float[5] fc1_b, float[3,5] fc2_w, float[3] fc2_b>
{ c1 = Conv <pads = [1,1,1,1]> (x, c1_w)
  n1 = BatchNormalization (c1, g, b, m, v)
  r1 = Relu (n1)
  c2 = Conv <pads = [1,1,1,1]> (r1, c2_w, c2_b)
  sum = Add (c2, r1)
  r2 = Relu (sum)
  p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r2)
  f = Flatten (p)
  h = MatMul (f, fc1_w)
  hb = Add (h, fc1_b)
  hr = Relu (hb)
  scores = Gemm <transB = 1> (hr, fc2_w, fc2_b) }"""
LAYERS = ["c1_w", "c2_w", "fc1_w", "fc2_w"]


def network(text: str = NETWORK) -> onnx.ModelProto:
    """A convolution with a normalisation, one with a bias, a sum, a pool, two products; weights are drawn."""
    model = parser.parse_model(text)
    draws = np.random.default_rng(1)
    for v in model.graph.value_info:
        a = draws.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim])
        a *= 0.3 if a.ndim > 1 else 0.5
        if v.name in ("v", "g"):
            a = np.abs(a) + 0.5
            a[:2] *= -1 if v.name == "g" else 1
        model.graph.initializer.append(numpy_helper.from_array(a.astype(np.float32), v.name))
    del model.graph.value_info[:]
    return model


def batch(n: int = 6) -> dict[str, np.ndarray]:
    """Images and labels."""
    return {"x": RNG.standard_normal((n, 2, 8, 8)).astype("f4"), "label": RNG.integers(0, 3, n)}


def prepared(*layers: str, n: int = 6, **options: Any) -> rc.Program:
    """The network, prepared."""
    return rc.prepare_qat(rc.load(network(), batch=n), *([list(layers)] if layers else []), **options)


def trained(program: rc.Program, steps: int = 3, optimizer: Any = None) -> rc.Program:
    """The program after a few steps on the same data."""
    loss = rc.losses.cross_entropy(program["scores"])
    (optimizer or rc.Momentum(0.02)).minimize(loss)
    draws = np.random.default_rng(3)
    executor = rc.Executor()
    n = program["x"].shape[0]
    for _ in range(steps):
        feed = {"x": draws.standard_normal((n, 2, 8, 8)).astype("f4"), "label": draws.integers(0, 3, n)}
        executor.run(program, feed, [loss])
    return program


def compiled(checkpoints: list[str] | None = None) -> tuple[CompiledStep, str]:
    """The compiled step of the network, and the name of its loss."""
    program = prepared()
    loss = rc.losses.cross_entropy(program["scores"]).name
    return rc.compile_step(program, loss, rc.Momentum(0.02), checkpoints=checkpoints), loss


def rounded(program: rc.Program) -> list[str]:
    """What the forward pass rounds."""
    return [op.inputs[0].name for op in program.operators if op.op.name == "FakeQuantize" and op.inputs[0]]


def test_what_layers_read_and_make_is_rounded_once() -> None:
    """Behind the normalisation and the activation; what a pool takes from rounded values is not rounded again."""
    assert rounded(prepared()) == ["x", "c1_w", "r1", "c2_w", "c2", "r2", "fc1_w", "hr", "fc2_w"]
    program = prepared()
    reads = {next(op.writes()).name: [v.name for v in op.reads()] for op in program.operators}
    assert reads["sum"] == ["c2.quantized", "r1.quantized"] and reads["p"] == ["r2.quantized"]


def test_layers_are_chosen_by_weights_and_outputs() -> None:
    def weights(program: rc.Program) -> list[str]:
        return [n for n in rounded(program) if n in LAYERS]

    assert weights(prepared("c?_w")) == ["c1_w", "c2_w"]
    assert weights(prepared("scores", "h")) == ["fc1_w", "fc2_w"]
    assert weights(prepared(skip="c*")) == ["fc1_w", "fc2_w"]
    assert weights(prepared(skip_first=True, skip_last=True)) == ["c2_w", "fc1_w"]
    assert rounded(prepared("scores")) == ["hr", "fc2_w"]


def test_integers_of_weights_and_activations() -> None:
    program = prepared(activations="int8", reduce_range=True)
    found = {op.inputs[0].name: op.op for op in program.operators if op.op.name == "FakeQuantize" and op.inputs[0]}
    assert (found["x"].low, found["x"].high) == (-128, 127)  # type: ignore[attr-defined]
    assert (found["c1_w"].low, found["c1_w"].high) == (-63, 63)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "conv_w"}, "has a weight or output 'conv_w'"),
        ({"skip": ["nothing*"]}, "has a weight or output 'nothing"),
        ({"skip": "*"}, "no layer is left"),
        ({"activations": "int4"}, "must be 'uint8' or 'int8'"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
    ],
)
def test_what_does_not_fit_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(rc.UsageError, match=message):
        rc.prepare_qat(rc.load(network(), batch=6), **options)


def test_only_once_before_training_and_with_layers() -> None:
    with pytest.raises(rc.UsageError, match="prepared for quantisation already"):
        rc.prepare_qat(prepared())
    with pytest.raises(rc.UsageError, match="already a training step"):
        rc.prepare_qat(trained(rc.load(network(), batch=6)))
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    with pytest.raises(rc.UsageError, match="nothing to quantize"):
        rc.prepare_qat(rc.load(parser.parse_model(text)))


def test_ranges_move_in_training_and_stay_in_evaluation() -> None:
    program = prepared(momentum=0.5)
    feed = batch()
    with pytest.raises(rc.UsageError, match="has seen none: run it on some batches"):
        program.evaluate({"x": feed["x"]}, ["scores"])
    executor = rc.Executor()
    executor.run(program, {"x": feed["x"]}, ["scores"])
    first = float(program.data["x.range_high"])
    assert first == feed["x"].max() and program.data["x.range_low"] == feed["x"].min()
    assert program.data["r1.range_low"] == 0 < program.data["r1.range_high"]
    executor.run(program, {"x": 3 * feed["x"]}, ["scores"])
    moved = float(program.data["x.range_high"])
    np.testing.assert_allclose(moved, 0.5 * first + 0.5 * 3 * first, rtol=1e-6)
    (a,) = program.evaluate({"x": 9 * feed["x"]}, ["scores"])
    (b,) = program.evaluate({"x": 9 * np.repeat(feed["x"][:1], 2, 0)}, ["scores"])  # another batch
    assert float(program.data["x.range_high"]) == moved and b.shape == (2, 3)
    np.testing.assert_allclose(a[:1], b[:1], rtol=1e-4, atol=1e-4)
    ops = {op.op.name for op in program.for_test().operators}
    assert "FakeQuantize" in ops and not ops & {"MovingRange", "RunningUpdate"}


def test_evaluation_rounds_by_the_ranges() -> None:
    """The first convolution alone, against NumPy."""
    program = prepared("c1_w")
    x = batch()["x"]
    rc.Executor().run(program, {"x": x}, ["scores"])
    low, high = (float(program.data[f"x.range_{end}"]) for end in ("low", "high"))
    s = np.float32((high - low) / 255)
    z = np.rint(-low / s)
    w = program.data["c1_w"]
    ws = np.abs(w).max((1, 2, 3), keepdims=True) / 127
    plain = rc.load(network(), batch=6, mode="eval")
    plain.data["c1_w"] = (np.rint(w / ws) * ws).astype("f4")
    xq = ((np.clip(np.rint(x / s) + z, 0, 255) - z) * s).astype("f4")
    (expected,) = plain.evaluate({"x": xq}, ["c1"])
    (found,) = program.evaluate({"x": x}, ["c1"])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_recomputed_and_plain_are_the_same_bits_and_peaks_are_as_predicted() -> None:
    results = []
    for checkpoints in (None, ["r1", "r2"]):
        step, loss = compiled(checkpoints)
        executor, feed = rc.Executor(), np.random.default_rng(5)
        for _ in range(2):
            given = {"x": feed.standard_normal((6, 2, 8, 8)).astype("f4"), "label": feed.integers(0, 3, 6)}
            executor.run(step.program, given, [loss])
        assert executor.session(step.program, [loss]).measured_peak_bytes == step.figures.peak_bytes
        results.append({k: v.tobytes() for k, v in step.program.data.items()})
    assert results[0] == results[1]


def test_planned_within_a_budget_are_the_same_bits() -> None:
    budget = rc.RecomputeOptimizer(rc.Momentum(0.02)).set_budget("95%")
    again = trained(prepared(n=256), 2, budget)  # of a small batch, kernels' workspace is the peak
    plain = trained(prepared(n=256), 2)
    assert all(plain.data[k].tobytes() == again.data[k].tobytes() for k in plain.data)


def test_planned_are_the_same_bits() -> None:
    """By a strategy that needs no budget: how low a budget may be depends on the processor's kernels."""
    again = trained(prepared(n=64), 2, rc.RecomputeOptimizer(rc.Momentum(0.02)).set_strategy("chen"))
    plain = trained(prepared(n=64), 2)
    assert again.plan.reruns
    assert all(plain.data[k].tobytes() == again.data[k].tobytes() for k in plain.data)


def test_rounded_weights_are_not_kept_for_the_backward_pass() -> None:
    names, _ = kept_for_backward(compiled()[0].program.logical)
    assert not [n for n in names if n.endswith("_w.quantized")]
    assert not [n for n in names if n in ("r1", "r1.quantized")]  # made again from what the normalisation keeps


def test_a_failed_step_changes_no_range() -> None:
    program = trained(prepared(), 1)
    before = {k: v.tobytes() for k, v in program.data.items()}
    feed = batch()
    feed["label"][0] = 7
    with pytest.raises(rc.RecomputeError, match="7"):
        rc.Executor().run(program, feed, [program.loss])
    assert before == {k: v.tobytes() for k, v in program.data.items()}


def test_tied_weights_behind_a_transpose_are_rounded_by_their_rows() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> tied (int64[2,3] ids) => (float[2,3,7] y) <float[7,5] table>
    { e = Gather (table, ids)
      r = Tanh (e)
      t = Transpose (table)
      y = MatMul (r, t) }"""
    program = rc.prepare_qat(rc.load(network(text)))
    reads = {next(op.writes()).name: [v.name for v in op.reads()] for op in program.operators}
    assert program["table.scale"].shape == (7, 1)
    assert reads["t"] == ["table.quantized"] and reads["e"][0] == "table"


def test_ranges_of_frozen_parts_follow_the_data() -> None:
    program = prepared()
    program.freeze(["c1_w", "g", "b"], eval=True)
    before = {n: program.data[n].tobytes() for n in ("m", "v")}
    trained(program, 1)
    assert program.data["x.range_low"] < 0 < program.data["x.range_high"]
    assert before == {n: program.data[n].tobytes() for n in before}


def test_ranges_are_saved_and_loaded(tmp_path: Any) -> None:
    program = trained(prepared())
    rc.save_state(program, tmp_path / "state.safetensors")
    other = trained(prepared(), 0)
    rc.load_state(other, tmp_path / "state.safetensors")
    feed = {"x": batch()["x"]}
    assert program.evaluate(feed, ["scores"])[0].tobytes() == other.evaluate(feed, ["scores"])[0].tobytes()


def test_mixed_precision_trains_on_rounded_values() -> None:
    program = prepared()
    loss = rc.losses.cross_entropy(program["scores"])
    rc.MixedPrecision(rc.SGD(0.05), "bf16").minimize(loss)
    feed, executor = batch(), rc.Executor()
    losses = [float(executor.run(program, feed, [loss])[0]) for _ in range(8)]
    assert losses[-1] < losses[0]


def test_a_step_on_the_emulated_device_is_that_of_the_cpu() -> None:
    results = []
    for place in (rc.CPUPlace(), rc.EmulatedCUDAPlace()):
        program = prepared()
        loss = rc.losses.cross_entropy(program["scores"])
        rc.SGD(0.02).minimize(loss)
        executor, draws = rc.Executor(place), np.random.default_rng(3)
        feed = {"x": draws.standard_normal((6, 2, 8, 8)).astype("f4"), "label": draws.integers(0, 3, 6)}
        found = executor.run(program, feed, [loss])[0]
        results.append((float(found), {k: np.array(v) for k, v in program.data.items()}))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-4)
    for name, a in results[0][1].items():
        np.testing.assert_allclose(a, results[1][1][name], rtol=1e-3, atol=1e-4, err_msg=name)
