"""Cutting models, and new heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import recompute as rc
from recompute.data.batches import synthetic_batch

onnxruntime = pytest.importorskip("onnxruntime")


def lenet(batch: int | str = 4) -> onnx.ModelProto:
    return rc.models.build("lenet", batch=batch)


def test_cut_drops_what_comes_after() -> None:
    model = lenet()
    before = model.SerializeToString()
    found = rc.edit.cut(model, at="relu4")
    assert model.SerializeToString() == before
    assert [o.name for o in found.graph.output] == ["relu4"]
    assert {t.name for t in model.graph.initializer} - {t.name for t in found.graph.initializer} == {
        "fc3.weight", "fc3.bias",
    }  # fmt: skip
    onnx.checker.check_model(found)
    program = rc.edit.cut(rc.load(model), at="relu4")
    assert isinstance(program, rc.Program) and program.outputs[0].shape == (4, 84)
    feed = synthetic_batch(program)
    (own,) = program.evaluate(feed)
    (theirs,) = onnxruntime.InferenceSession(found.SerializeToString()).run(None, feed)
    np.testing.assert_allclose(own, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["lenet", "llama-tiny"])
def test_a_new_head_trains_and_is_exported(name: str, tmp_path: Path) -> None:
    """A head with other classes, from a file to a file, whatever the rank."""
    path = tmp_path / "model.onnx"
    rc.save_model(rc.models.build(name, batch="N"), path)
    edited = rc.edit.replace_head(path, 7, seed=3)
    program = rc.load(edited, batch=3)
    kept = {v.name for v in rc.load(path, batch=3).parameters}
    head = "fc3" if name == "lenet" else "lm_head"
    assert {v.name for v in program.parameters} == kept | {f"{head}.bias"}
    assert program["logits"].shape[-1] == 7 and program[f"{head}.weight"].shape[0] == 7
    loss = rc.losses.cross_entropy(program["logits"])
    rc.Adam(3e-4).minimize(loss)
    feed, executor = synthetic_batch(program), rc.Executor()
    losses = [float(executor.run(program, feed, [loss])[0]) for _ in range(4)]
    assert losses[-1] < losses[0]
    inputs = {n: a[:2] for n, a in feed.items() if n != "label"}  # another batch
    (own,) = program.evaluate(inputs, ["logits"])
    exported = rc.export_trained(program)
    (theirs,) = onnxruntime.InferenceSession(exported.SerializeToString()).run(["logits"], inputs)
    np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-5)


def test_a_head_on_a_cut_model_draws_as_linear_does() -> None:
    program = rc.edit.linear(rc.edit.cut(rc.load(lenet()), at="relu4"), 5, name="scores", seed=1)
    weight, bias = program.data["scores.weight"], program.data["scores.bias"]
    assert weight.shape == (5, 84) and program.outputs[0].name == "scores"
    limit = 1 / np.sqrt(84)
    assert 0.9 * limit < abs(weight).max() <= limit and 0 < abs(bias).max() <= limit
    other = rc.edit.linear(rc.edit.cut(rc.load(lenet()), at="relu4"), 5, name="scores", seed=2)
    assert not np.array_equal(other.data["scores.weight"], weight)
    bare = rc.edit.linear(rc.edit.cut(lenet(), at="relu4"), 5, bias=False)
    assert [t.name for t in bare.graph.initializer][-1] == "head.weight"


def test_a_program_keeps_what_it_is() -> None:
    """Contents that were changed since, what is frozen, and options of load survive an edit."""
    program = rc.load(lenet("N"), batch=2, mode="eval").freeze("conv*")
    program.data["fc1.bias"] = np.full(program["fc1.bias"].shape, 2, np.float32)
    edited = rc.edit.replace_head(program, 3)
    assert {v.name for v in edited.parameters} == {v.name for v in program.parameters}
    assert (edited.data["fc1.bias"] == 2).all() and edited.loaded["mode"] == "eval"
    assert edited.block.batch == 2 and edited.for_test(batch=5).block.batch == 5
    assert program["logits"].shape == (2, 10)


def test_what_cannot_be_edited() -> None:
    with pytest.raises(rc.UsageError, match=r"no value 'relu9' \(did you mean relu"):
        rc.edit.cut(lenet(), at="relu9")
    with pytest.raises(rc.UsageError, match="not made by a Gemm"):
        rc.edit.replace_head(rc.edit.cut(lenet(), at="relu4"), 3)
    with pytest.raises(rc.UsageError, match="out_features must be a whole number of at least 1, not 0"):
        rc.edit.replace_head(lenet(), 0)
    with pytest.raises(rc.UsageError, match="has 84 features, not in_features=3"):
        rc.edit.linear(rc.edit.cut(lenet(), at="relu4"), 3, in_features=3)
    program = rc.load(lenet())
    rc.losses.cross_entropy(program["logits"])
    with pytest.raises(rc.UsageError, match="edit it right after it is loaded"):
        rc.edit.cut(program, at="relu4")
    with pytest.raises(rc.UsageError, match="not loaded from an ONNX model"):
        rc.edit.cut(rc.Program(), at="x")


# -- heads with something behind them ---------------------------------------------------------------------------------

G = np.random.default_rng(0)
WEIGHTS = {"w1": (6, 8), "b1": (8,), "w2": (8, 4), "b2": (4,), "w3": (8, 3), "k": (4, 3, 1, 1), "kb": (4,)}
BODY = "a = MatMul (x, w1) c = Add (a, b1) r = Relu (c) "
LOGITS = BODY + "z = MatMul (r, w2) logits = Add (z, b2) "
SHAPE = "s = Constant <value = int64[3] {-1, 4, 1}> () a1 = Constant <value = int64[1] {1}> () "


def parsed(body: str, outputs: str = "probs", x: str = "float[N,6] x") -> onnx.ModelProto:
    """A model with those of WEIGHTS that it reads."""
    made = ", ".join(f"float[N,d{i}] {n}" for i, n in enumerate(outputs.split()))
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g ({x}) => ({made}) {{ {body} }}')
    read = {i for n in model.graph.node for i in n.input}
    tensors = {n: G.standard_normal(s).astype(np.float32) for n, s in WEIGHTS.items() if n in read}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in tensors.items())
    for o in model.graph.output:
        o.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(model)


def scored(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    """The outputs, by ONNX Runtime; those of the program are the same."""
    onnx.checker.check_model(model, full_check=True)
    theirs = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    for own, their in zip(rc.load(model, batch=len(x)).evaluate({"x": x}), theirs, strict=True):
        np.testing.assert_allclose(own, their, rtol=1e-5, atol=1e-6)
    return theirs


@pytest.mark.parametrize("at", [None, "probs", "logits"])
@pytest.mark.parametrize(
    "behind",
    [
        "probs = Softmax <axis = 1> (logits)",
        SHAPE + "q = Reshape (logits, s) h = Sigmoid (q) probs = Transpose <perm = [0, 2, 1]> (h)",
        SHAPE + "m = ReduceMax (logits, a1) d = Sub (logits, m) e = Exp (d) t = ReduceSum (e, a1) probs = Div (e, t)",
        SHAPE + "l = Constant <value = int64[2] {-1, 1}> () f = Constant <value = float {-1e9}> () "
        "g = Constant <value = int64[2] {1, 1}> () v = ReduceMax <keepdims = 0> (logits, a1) w = Max (f, v) "
        "m = Reshape (w, l) n = Expand (m, g) d = Sub (logits, n) e = Exp (d) u = ReduceSum <keepdims = 0> (e, a1) "
        "t = Reshape (u, l) h = Expand (t, g) probs = Div (e, h)",
    ],
)
def test_what_follows_a_head_follows_the_new_one(behind: str, at: str | None) -> None:
    """One output, of ten classes, made of the new weights as the old one was of the old."""
    x = G.standard_normal((2, 6)).astype(np.float32)
    edited = rc.edit.replace_head(parsed(LOGITS + behind), 10, at=at)
    assert [o.name for o in edited.graph.output] == ["probs"]
    (found,) = scored(edited, x)
    w = {t.name: onnx.numpy_helper.to_array(t) for t in edited.graph.initializer}
    assert {n: w[n].shape for n in ("w1", "b1", "w2", "b2")} == {"w1": (6, 8), "b1": (8,), "w2": (10, 8), "b2": (10,)}
    z = np.maximum(x @ w["w1"] + w["b1"], 0) @ w["w2"].T + w["b2"]
    wanted = 1 / (1 + np.exp(-z)) if "Sigmoid" in behind else np.exp(z) / np.exp(z).sum(1, keepdims=True)
    np.testing.assert_allclose(found.reshape(2, 10), wanted, rtol=1e-5, atol=1e-6)


IMAGE = "k1 = Constant <value = float[4] {1, 1, 2, 2}> () c = Conv (x, k, kb) "


@pytest.mark.parametrize(
    ("behind", "shape"),
    [
        ("r = Relu (c) p = GlobalAveragePool (r) f = Flatten (p) probs = Softmax (f)", (2, 10)),
        ("probs = Resize (c, , k1)", (2, 10, 8, 8)),
        ("probs = Softmax <axis = 1> (c)", (2, 10, 4, 4)),
    ],
)
def test_heads_that_are_convolutions(behind: str, shape: tuple[int, ...]) -> None:
    edited = rc.edit.replace_head(parsed(IMAGE + behind, x="float[N,3,4,4] x"), 10)
    (found,) = scored(edited, G.standard_normal((2, 3, 4, 4)).astype(np.float32))
    assert found.shape == shape
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in edited.graph.initializer}
    assert tensors["k"].shape == (10, 3, 1, 1) and abs(tensors["k"]).max() <= 1 / np.sqrt(3)
    assert tensors["kb"].shape == (10,)


def test_a_head_that_is_a_transposed_convolution() -> None:
    """As PP-OCR's detector ends: its weight is [in, out, ...]."""
    model = parsed("c = ConvTranspose <strides = [2, 2]> (x, t) probs = Sigmoid (c)", x="float[N,3,4,4] x")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 1, 2, 2), np.float32), "t"))
    edited = rc.edit.replace_head(model, 5)
    (found,) = scored(edited, G.standard_normal((2, 3, 4, 4)).astype(np.float32))
    assert found.shape == (2, 5, 8, 8)
    assert {t.name: tuple(t.dims) for t in edited.graph.initializer} == {"t": (3, 5, 2, 2), "t.bias": (5,)}


@pytest.mark.parametrize("last", ["s = Constant <value = int64[1] {-1}> () y = Reshape (z, s)", "y = Squeeze (z)",
                                  "s = Constant <value = int64[1] {-1}> () y = Squeeze (z, s)"])  # fmt: skip
def test_an_axis_of_one_feature_that_is_dropped_has_no_room_for_more(last: str) -> None:
    model = parsed(f"z = Gemm <transB = 1> (x, one) {last}", "y")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, 6), np.float32), "one"))
    with pytest.raises(rc.UsageError, match=r"'y' \((Reshape|Squeeze)\) follows it, and needs its 1 features"):
        rc.edit.replace_head(model, 3)
    assert len(rc.edit.replace_head(model, 1).graph.output) == 1


@pytest.mark.parametrize("pixels", [1, 4])
def test_a_bias_that_is_reshaped_belongs_to_the_layer(pixels: int) -> None:
    """As paddle2onnx writes it, with Identity nodes; a map of numbers for each pixel is no bias."""
    shape = f"int64[4] {{1, -1, 1, {pixels}}}"
    body = f"s = Constant <value = {shape}> () c = Conv (x, t) d = Identity (c) b = Reshape (given, s) e = Add (d, b)"
    model = parsed(f"{body} probs = Sigmoid (e)", x="float[N,3,4,4] x")
    for name, dims in (("t", (2, 3, 1, 1)), ("given", (2 * pixels,))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(dims, np.float32), name))
    if pixels > 1:
        with pytest.raises(rc.UsageError, match="is not made by a Gemm"):
            rc.edit.replace_head(model, 5)
        return
    edited = rc.edit.replace_head(model, 5)
    (found,) = scored(edited, G.standard_normal((2, 3, 4, 4)).astype(np.float32))
    assert found.shape == (2, 5, 4, 4)
    assert [n.op_type for n in edited.graph.node] == ["Conv", "Sigmoid"]
    assert {tuple(t.dims) for t in edited.graph.initializer} == {(5, 3, 1, 1), (5,)}


def test_one_feature_is_not_moved_into_the_batch() -> None:
    """A map of one channel that loses the channels' axis: [-1, 4, 4] would make a batch of ten times the images."""
    model = parsed("s = Constant <value = int64[3] {-1, 4, 4}> () c = Conv (x, t) y = Reshape (c, s)", "y",
                   x="float[N,3,4,4] x")  # fmt: skip
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, 3, 1, 1), np.float32), "t"))
    with pytest.raises(rc.UsageError, match=r"'y' \(Reshape\) follows it, and needs its 1 features"):
        rc.edit.replace_head(model, 10)


def test_several_heads() -> None:
    """By name, one or all of them; the others stay, and so does the order of the outputs."""
    model = parsed(LOGITS + "probs = Softmax (logits) other = MatMul (r, w3)", "probs other")
    with pytest.raises(rc.UsageError, match=r"2 outputs \(probs, other\): say by at= whose head"):
        rc.edit.replace_head(model, 5)
    x = G.standard_normal((2, 6)).astype(np.float32)
    assert [y.shape for y in scored(rc.edit.replace_head(model, 5, at="probs"), x)] == [(2, 5), (2, 3)]
    assert [y.shape for y in scored(rc.edit.replace_head(model, 5, at=["probs", "other"]), x)] == [(2, 5), (2, 5)]
    assert [y.shape for y in scored(rc.edit.replace_head(model, 5, at="*"), x)] == [(2, 5), (2, 5)]
    both = parsed(LOGITS + "probs = Softmax (logits)", "logits probs")  # one head, two outputs
    assert [y.shape for y in scored(rc.edit.replace_head(both, 5), x)] == [(2, 5), (2, 5)]


def test_a_head_whose_weights_are_nodes_with_declared_shapes() -> None:
    """As Paddle's files have them: the declarations of the old weights go with these."""
    model = parsed(LOGITS + "probs = Softmax (logits)")
    held = {t.name: t for t in model.graph.initializer}
    model.graph.node.extend(onnx.helper.make_node("Constant", [], [n], value=t) for n, t in held.items())
    nodes = sorted(model.graph.node, key=lambda n: n.op_type != "Constant")
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    model = onnx.shape_inference.infer_shapes(model)
    assert {"w2", "b2"} <= {v.name for v in model.graph.value_info}
    edited = rc.edit.replace_head(model, 10)
    assert [y.shape for y in scored(edited, G.standard_normal((2, 6)).astype(np.float32))] == [(2, 10)]


@pytest.mark.parametrize(
    ("body", "at", "why"),
    [
        (LOGITS + "probs = Max (logits, b2)", "logits", r"node 'probs' \(Max\) follows it, and needs its 4 features"),
        (LOGITS + "probs = Softmax (logits)", "c", r"node 'z' \(MatMul\) follows it, and needs its 8 features"),
        (LOGITS + "probs = Mul (logits, b2)", None, r"node 'probs' \(Mul\) follows it, and needs its 4 features"),
        (LOGITS + "s = Constant <value = int64[3] {-1, 2, 2}> () probs = Reshape (logits, s)", None, "reshapes its 4"),
        (BODY + "probs = Softmax (r)", None, "not made by a Gemm"),
    ],
)
def test_heads_that_something_needs_as_they_are(body: str, at: str | None, why: str) -> None:
    with pytest.raises(rc.UsageError, match=why):
        rc.edit.replace_head(parsed(body), 10, at=at)
