"""Encoder-decoders and LSTMs in 8 bits, as ONNX Runtime's tool writes them: trained straight through, and scored."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from tests.seq2seq_cases import SOURCE, T5, TARGET, WORDS, lstm, pairs_passed_by, quantised, straight_through, twin

import recompute as rc

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxruntime.quantization")
G = np.random.default_rng(3)
FEED = {"ids": G.integers(0, WORDS, (4, SOURCE)), "decoder_ids": G.integers(0, WORDS, (4, TARGET))}
LABELS = G.integers(0, WORDS, (4, TARGET))
X = G.standard_normal((4, 5, 6)).astype(np.float32)
#: codes of 7 bits: sums of two products of 8 saturate in ONNX Runtime's kernels on processors without VNNI
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("dynamic", {"weight_type": "QInt8"}),
    "uint8": ("dynamic", {"weight_type": "QUInt8"}),
    "int8 by channel": ("dynamic", {"weight_type": "QInt8", "per_channel": True}),
    "uint8 by channel": ("dynamic", {"weight_type": "QUInt8", "per_channel": True}),
    "products alone": ("dynamic", {"op_types_to_quantize": ["MatMul"]}),
    "static": ("static", {"op_types_to_quantize": ["MatMul"]}),
    "static by channel": (
        "static",
        {"op_types_to_quantize": ["MatMul"], "per_channel": True, "activation_type": "QUInt8"},
    ),
}  # fmt: skip


def file_of(model: onnx.ModelProto, form: str, feed: dict[str, np.ndarray]) -> onnx.ModelProto:
    kind, options = FORMS[form]
    types = pytest.importorskip("onnxruntime.quantization").QuantType
    given = {n: types[v] if n.endswith("type") else v for n, v in options.items()}
    return quantised(model, kind, [feed], reduce_range=True, **given)


def scores(model: onnx.ModelProto, feed: dict[str, np.ndarray], *, fused: bool = True) -> np.ndarray:
    """ONNX Runtime's; `fused`: with its integer kernels."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if not fused:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, feed)[0]


def step(model: onnx.ModelProto, feed: dict[str, np.ndarray], **options: Any) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and the gradient of each parameter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rc.ModelWarning)
        program = rc.load(model, batch=4, **options)
    before = {v.name: np.array(program.data[v.name]) for v in program.parameters}
    labels = LABELS if "ids" in feed else np.arange(4)
    loss = rc.losses.cross_entropy(program)
    rc.SGD(1.0).minimize(loss)
    (value,) = rc.Executor().run(program, {**feed, "label": labels}, [loss])
    return float(value), {n: a - np.array(program.data[n]) for n, a in before.items()}


def falls(program: rc.Program, feed: dict[str, np.ndarray]) -> None:
    """The loss over some steps."""
    labels = LABELS if "ids" in feed else np.arange(4)
    loss = rc.losses.cross_entropy(program)
    rc.Adam(0.02).minimize(loss)
    executor = rc.Executor()
    found = [float(executor.run(program, {**feed, "label": labels}, [loss])[0]) for _ in range(12)]
    assert found[-1] < 0.97 * found[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_an_encoder_decoder_trains_through_its_integers(form: str) -> None:
    model = T5().model()
    integers = file_of(model, form, FEED)
    static = form.startswith("static")
    options = {"quantization": "ste"} if static else {}
    loss, taken = step(integers, FEED, **options)
    same, wanted = step(pairs_passed_by(integers) if static else straight_through(model, integers), FEED)
    assert loss == pytest.approx(same, rel=1e-5) and len(taken) >= 7
    for name, gradient in taken.items():
        size = np.linalg.norm(wanted[name])
        assert np.linalg.norm(gradient - wanted[name]) < 1e-4 * size, name
    program = rc.load(integers, batch=4, **options)
    floats = scores(twin(model, integers), FEED)
    assert np.abs(program.evaluate(FEED)[0] - floats).mean() < 0.05 * np.abs(floats).max()
    falls(program, FEED)
    exported, (own,) = rc.export_trained(program), program.evaluate(FEED)
    assert {n.op_type for n in exported.graph.node} == {n.op_type for n in integers.graph.node}
    np.testing.assert_allclose(scores(exported, FEED, fused=not static), own, rtol=1e-4, atol=1e-4)
    if static:  # integer kernels round sums that lie at an edge the other way
        assert np.abs(scores(exported, FEED) - own).mean() < 0.05 * np.abs(own).max()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "uint8", "int8 by channel", "uint8 by channel"])
def test_an_lstm_in_8_bits_trains_what_is_around_it(form: str) -> None:
    """Its own weights multiply what is not rounded; ONNX Runtime rounds it."""
    model = lstm()
    integers = file_of(model, form, {"x": X})
    assert "DynamicQuantizeLSTM" in {n.op_type for n in integers.graph.node}
    loss, taken = step(integers, {"x": X})
    same, wanted = step(straight_through(model, integers), {"x": X})
    assert loss == pytest.approx(same, rel=1e-5) and {"norm", "B"} <= taken.keys()
    for name, gradient in taken.items():
        np.testing.assert_allclose(gradient, wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)
    program = rc.load(integers, batch=4)
    falls(program, {"x": X})
    exported, (own,) = rc.export_trained(program), program.evaluate({"x": X})
    assert np.abs(scores(exported, {"x": X}) - own).max() < 0.05 * np.abs(own).max()
