"""Files for generation train without a past: what is left out, what is said, and what the trained file has."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from few_bits_cases import generating
from onnx import helper

import recompute as rc

onnxruntime = pytest.importorskip("onnxruntime")
LAYERS = range(2)


def fed(model: onnx.ModelProto, ids: np.ndarray) -> list[np.ndarray]:
    """What ONNX Runtime computes with an empty past."""
    feed = {"input_ids": ids, "attention_mask": np.ones(ids.shape, np.int64)}
    feed |= {f"past_key_values.{i}.{p}": np.zeros((len(ids), 2, 0, 16), "f4") for i in LAYERS for p in ("key", "value")}
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, feed)


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 40, (2, 7))


def loaded() -> rc.Program:
    with pytest.warns(rc.ModelWarning, match="training begins without a past: the inputs attention_mask, .* 4 outputs"):
        return rc.load(generating(), batch=2, dims={"sequence_length": 7})


def test_values_are_those_with_an_empty_past(ids: np.ndarray) -> None:
    program = loaded()
    assert [v.name for v in program.inputs] == ["input_ids"] and [v.name for v in program.outputs] == ["logits"]
    np.testing.assert_allclose(program.evaluate({"input_ids": ids})[0], fed(generating(), ids)[0], rtol=1e-4, atol=1e-5)


def test_adapters_train_and_the_file_generates(ids: np.ndarray) -> None:
    """Gradients beside differences; the trained file has its past again, with which it gives the same."""
    program = rc.lora(loaded(), ["*q_proj*", "*k_proj*", "*v_proj*", "*o_proj*"], r=2)
    g = np.random.default_rng(1)
    for v in program.block.parameters:
        program.data[v.name] = (0.2 * g.standard_normal(v.shape)).astype("f4")
    loss = rc.losses.cross_entropy(program["logits"])
    rc.fuse_attention(program)
    rc.SGD(1.0).minimize(loss)
    feed = {"input_ids": ids, "label": np.roll(ids, -1, axis=1)}
    executor = rc.Executor()
    before = {v.name: program.data[v.name].copy() for v in program.block.parameters}
    executor.run(program, feed, [loss])
    gradients = {n: a - program.data[n] for n, a in before.items()}
    assert all(abs(a).max() > 0 for a in gradients.values())
    away = {n: g.standard_normal(a.shape) for n, a in before.items()}
    found = []
    for step in (1e-3, -1e-3):
        for n, a in before.items():
            program.data[n][...] = a + step * away[n]
        found.append(float(executor.run(program, feed, [loss])[0]))
    slope = sum(float((gradients[n] * away[n]).sum()) for n in before)
    assert (found[0] - found[1]) / 2e-3 == pytest.approx(slope, rel=2e-2)
    made = rc.export_trained(program)
    assert [i.name for i in made.graph.input] == [i.name for i in generating().graph.input]
    assert [o.name for o in made.graph.output] == [o.name for o in generating().graph.output]
    np.testing.assert_allclose(fed(made, ids)[0], program.evaluate({"input_ids": ids})[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["MultiHeadAttention", "Attention"])
def test_other_attention(op: str) -> None:
    """A past that is an input is left out, one that the model computes or holds is not."""
    x = np.random.default_rng(0).standard_normal((2, 5, 12)).astype("f4")
    ins = ["x", "x", "x", "", "", "", "k", "v"] if op == "MultiHeadAttention" else ["x", "w", "b", "", "p"]
    outs = ["y", "k2", "v2"] if op == "MultiHeadAttention" else ["y", "p2"]
    node = helper.make_node(op, ins, outs, domain="com.microsoft", num_heads=3, unidirectional=1)
    shapes = {"k": [2, 3, "past", 4], "v": [2, 3, "past", 4], "p": [2, 2, 3, "past", 4]}
    inputs = [helper.make_tensor_value_info("x", 1, [2, 5, 12])]
    inputs += [helper.make_tensor_value_info(i, 1, shapes[i]) for i in ins if i in shapes]
    g = np.random.default_rng(1)
    held = {"w": g.standard_normal((12, 36)).astype("f4"), "b": g.standard_normal(36).astype("f4")}
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in held.items() if n in ins]
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name=o) for o in outs], tensors)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    source = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    with pytest.warns(rc.ModelWarning, match="training begins without a past"):
        program = rc.load(source)
    feed = {"x": x} | {n: np.zeros([0 if d == "past" else d for d in shapes[n]], "f4") for n in ins if n in shapes}
    wanted = onnxruntime.InferenceSession(source.SerializeToString()).run(["y"], feed)[0]
    np.testing.assert_allclose(program.evaluate({"x": x})[0], wanted, rtol=1e-4, atol=1e-5)


def test_keys_that_concat_joins_to_a_past(ids: np.ndarray) -> None:
    """Positions begin behind the past, whose length the file reads; the causal mask too."""
    nodes = """
        e = Gather (table, input_ids)  n = Shape (input_ids)  s1 = Gather (n, one)
        p = Shape <start = 2, end = 3> (past.key)  total = Add (p, s1)
        first = Squeeze (p, zero)  end = Squeeze (total, zero)  places = Range (first, end, step)
        at = Gather (positions, places)  x = Add (e, at)
        k0 = MatMul (x, wk)  k1 = Reshape (k0, heads)  k = Transpose <perm = [0, 2, 1, 3]> (k1)
        v0 = MatMul (x, wv)  v1 = Reshape (v0, heads)  v = Transpose <perm = [0, 2, 1, 3]> (v1)
        q0 = MatMul (x, wq)  q1 = Reshape (q0, heads)  q = Transpose <perm = [0, 2, 1, 3]> (q1)
        present.key = Concat <axis = 2> (past.key, k)  present.value = Concat <axis = -2> (past.value, v)
        kt = Transpose <perm = [0, 1, 3, 2]> (present.key)  s = MatMul (q, kt)
        all = Range (nought, end, step)  columns = Unsqueeze (all, zero)  rows = Unsqueeze (places, one)
        later = Greater (columns, rows)  masked = Where (later, far, s)  a = Softmax (masked)
        o = MatMul (a, present.value)  ot = Transpose <perm = [0, 2, 1, 3]> (o)  oj = Reshape (ot, joined)
        logits = MatMul (oj, head)"""
    for name in ("past.key", "past.value", "present.key", "present.value"):
        nodes = nodes.replace(name, f'"{name}"')
    kv = "float[batch,2,past_length,4]"
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]>'
        f' g (int64[batch,sequence] input_ids, {kv} "past.key", {kv} "past.value")'
        f' => (float[batch,sequence,40] logits, {kv} "present.key", {kv} "present.value") {{ {nodes} }}'
    )
    g = np.random.default_rng(2)
    shapes = {"table": (40, 8), "positions": (20, 8), "wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "head": (8, 40)}
    held: dict[str, np.ndarray] = {n: g.standard_normal(s).astype("f4") for n, s in shapes.items()}
    held |= {"zero": np.array([0]), "one": np.array([1]), "step": np.array(1), "nought": np.array(0),
             "heads": np.array([0, 0, 2, 4]), "joined": np.array([0, 0, 8]), "far": np.array(-1e9, "f4")}  # fmt: skip
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in held.items())
    with pytest.warns(rc.ModelWarning, match="the inputs past.key, past.value are left out, and 2 outputs"):
        program = rc.load(model, batch=2, dims={"sequence": 7})
    assert [v.name for v in program.inputs] == ["input_ids"] and [v.name for v in program.outputs] == ["logits"]

    def theirs(m: onnx.ModelProto) -> np.ndarray:
        feed = {"input_ids": ids, **{f"past.{n}": np.zeros((2, 2, 0, 4), "f4") for n in ("key", "value")}}
        return onnxruntime.InferenceSession(m.SerializeToString()).run(["logits"], feed)[0]

    np.testing.assert_allclose(program.evaluate({"input_ids": ids})[0], theirs(model), rtol=1e-4, atol=1e-5)
    loss = rc.losses.cross_entropy(program["logits"])
    rc.SGD(0.1).minimize(loss)
    rc.Executor().run(program, {"input_ids": ids, "label": np.roll(ids, -1, axis=1)}, [loss])
    made = rc.export_trained(program)
    assert len(made.graph.input) == 3 and len(made.graph.output) == 3
    np.testing.assert_allclose(theirs(made), program.evaluate({"input_ids": ids})[0], rtol=1e-4, atol=1e-5)
