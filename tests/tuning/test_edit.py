"""Cutting models, and new heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import recompute as rc
from recompute.training.data import synthetic_batch

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
