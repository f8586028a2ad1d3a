"""One program, two modes: evaluation with the weights that train, and frozen parts."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import recompute as rc
from recompute.ops.elementwise.relu import Relu

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 2, 5, 5)).astype(np.float32)
Y = np.array([0, 1, 2, 0, 1, 2])


def network(*, dynamic: bool = True) -> onnx.ModelProto:
    """Two convolutions with batch normalisation, dropout behind each, a classifier; exported in training mode."""
    n = "N" if dynamic else "6"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        net (float[{n},2,5,5] x) => (float[{n},3] scores) {{
            h1 = Conv <pads=[1,1,1,1]> (x, body_conv1)
            n1, m1, v1 = BatchNormalization <training_mode=1> (h1, body_s1, body_b1, body_m1, body_v1)
            r1 = Relu (n1)
            d1 = Dropout (r1, half, yes)
            h2 = Conv <pads=[1,1,1,1]> (d1, body_conv2)
            n2, m2, v2 = BatchNormalization <training_mode=1> (h2, body_s2, body_b2, body_m2, body_v2)
            r2 = Relu (n2)
            g = GlobalAveragePool (r2)
            f = Flatten (g)
            d2 = Dropout (f, half, yes)
            scores = Gemm <transB=1> (d2, head_weight, head_bias)
        }}"""
    )
    rng = np.random.default_rng(1)
    arrays = {"half": np.array(0.5, np.float32), "yes": np.array(True)}
    arrays |= {"body.conv1": rng.standard_normal((4, 2, 3, 3)), "body.conv2": rng.standard_normal((4, 4, 3, 3))}
    for i in (1, 2):
        arrays |= {f"body.s{i}": np.ones(4), f"body.b{i}": np.zeros(4), f"body.m{i}": np.zeros(4)}
        arrays[f"body.v{i}"] = np.ones(4)
    arrays |= {"head.weight": rng.standard_normal((3, 4)), "head.bias": np.zeros(3)}
    for name, a in arrays.items():
        for node in model.graph.node:  # ONNX's text has no dots in names
            node.input[:] = [name if i == name.replace(".", "_") else i for i in node.input]
        a = a.astype(np.float32) if a.dtype == np.float64 else a
        model.graph.initializer.append(onnx.numpy_helper.from_array(a, name))
    return model


def trained(optimizer: object | None = None, place: object = None, steps: int = 3, **load: object) -> rc.Program:
    program = rc.load(network(), batch=6, **load)
    loss = rc.losses.cross_entropy(program)
    (optimizer or rc.Adam(0.05)).minimize(loss)
    executor = rc.Executor(place)
    for _ in range(steps):
        executor.run(program, {"x": X, "label": Y}, ["loss"])
    return program


def by_hand(program: rc.Program, x: np.ndarray = X) -> np.ndarray:
    """Scores of the model loaded for evaluation, with a program's arrays."""
    other = rc.load(network(), batch=len(x), mode="eval")
    other.data.update({n: program.data[n] for n in other.data})
    return rc.Executor().run(other, {"x": x}, ["scores"])[0]


@pytest.mark.parametrize(
    "optimizer",
    [
        rc.Adam(0.05),
        rc.RecomputeOptimizer(rc.SGD(0.05)).set_checkpoints(["d1"]),
        rc.RecomputeOptimizer(rc.SGD(0.05)).set_budget("101%"),
        rc.MixedPrecision(rc.SGD(0.05), "bf16"),
    ],
    ids=["plain", "checkpoints", "budget", "bf16"],
)
def test_evaluation_uses_the_weights_that_train(optimizer: object) -> None:
    """Before the first step, between steps, and whatever was made of the step."""
    program = rc.load(network(), batch=6)
    loss = rc.losses.cross_entropy(program)
    np.testing.assert_array_equal(program.evaluate({"x": X})[0], by_hand(program))
    optimizer.minimize(loss)
    executor = rc.Executor()
    seen = []
    for _ in range(3):
        (scores,) = program.evaluate({"x": X}, ["scores"])
        np.testing.assert_array_equal(scores, by_hand(program))
        seen.append(scores)
        executor.run(program, {"x": X, "label": Y}, ["loss"])
    assert not np.array_equal(seen[0], seen[2])


def test_evaluation_changes_nothing() -> None:
    """Neither statistics nor the step counter."""
    program = trained()
    before = {n: a.copy() for n, a in program.data.items()}
    program.evaluate({"x": X, "label": Y})
    assert all(np.array_equal(a, program.data[n]) for n, a in before.items())


def test_any_batch_is_evaluated_with_the_same_weights() -> None:
    """Rows one by one and in batches; the loss too, without its being written again."""
    program = trained()
    whole = program.evaluate({"x": X})[0]
    for size in (1, 2, 4):
        parts = [program.evaluate({"x": X[i : i + size]}, "scores")[0] for i in range(0, 6, size)]
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-6)
    losses = [program.evaluate({"x": X[i : i + 2], "label": Y[i : i + 2]}, ["loss"])[0] for i in (0, 2, 4)]
    np.testing.assert_allclose(np.mean(losses), program.evaluate({"x": X, "label": Y}, ["loss"])[0], rtol=1e-5)


def test_a_program_for_test_shares_its_arrays() -> None:
    """The very arrays, at the program's batch and at another; a step of the one is seen by the other."""
    program = trained(steps=0)
    tests = [program.for_test(), program.for_test(batch=2, outputs=["scores"])]
    assert [v.name for v in tests[1].inputs] == ["x"]
    assert not any(t.updates for t in tests)
    rc.Executor().run(program, {"x": X, "label": Y}, ["loss"])
    for t, x in zip(tests, (X, X[:2]), strict=True):
        feed = {"x": x} if len(t.inputs) == 1 else {"x": x, "label": Y}
        np.testing.assert_array_equal(rc.Executor().run(t, feed, ["scores"])[0], by_hand(program, x))
        assert all(dict.get(t.data, v.name) is dict.get(program.data, v.name) for v in t.parameters)


@pytest.mark.parametrize("evaluated", [None, rc.EmulatedCUDAPlace()], ids=["cpu", "device"])
def test_what_a_device_trains_is_evaluated(evaluated: object) -> None:
    """The newest contents are on the device that ran last."""
    program = rc.load(network(), batch=6)
    rc.SGD(0.05).minimize(rc.losses.cross_entropy(program))
    executor = rc.Executor(rc.EmulatedCUDAPlace())
    found = []
    for _ in range(3):
        executor.run(program, {"x": X, "label": Y}, ["loss"])
        found.append(program.evaluate({"x": X}, ["scores"], place=evaluated)[0])
    expected = trained(rc.SGD(0.05))
    np.testing.assert_allclose(found[2], by_hand(expected), rtol=2e-4, atol=1e-5)
    assert not np.array_equal(found[0], found[1])


def test_a_compiled_step_from_a_file_is_evaluated(tmp_path: object) -> None:
    """Its forward pass is found by the operators' roles, also where a planner has split normalisations."""
    program = trained(rc.RecomputeOptimizer(rc.SGD(0.05)).set_budget("101%"))
    again = rc.load_compiled(rc.export_step(program))
    np.testing.assert_allclose(again.evaluate({"x": X}, ["scores"])[0], by_hand(program), rtol=1e-5, atol=1e-6)
    with pytest.raises(rc.UsageError, match="fixed at batch 6"):
        again.evaluate({"x": X[:2]}, ["scores"])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda p: p.evaluate({"X": X}), "no output can be computed: not fed are x"),
        (lambda p: p.evaluate({"x": X, "y": X}), "no input 'y'"),
        (lambda p: p.evaluate({"x": X}, ["score"]), r"no value 'score'.*scores"),
        (lambda p: p.evaluate({"x": X}, ["head.weight_grad"]), "has no value 'head.weight_grad'"),
        (lambda p: p.evaluate(X), "must be a dictionary"),
        (lambda p: p.evaluate({"x": X[:, :1]}), "has shape"),
        (lambda p: p.for_test(batch=0), "at least 1"),
        (lambda p: p.freeze("head.*"), "already a training step"),
    ],
)
def test_wrong_requests_are_told(call: object, match: str) -> None:
    """What, and what there is."""
    with pytest.raises(rc.UsageError, match=match):
        call(trained(steps=0))


def test_a_fixed_batch_is_told() -> None:
    """The model's, and that of operators appended by hand."""
    fixed = rc.load(network(dynamic=False))
    with pytest.raises(rc.UsageError, match="fixes its batch at 6"):
        fixed.evaluate({"x": X[:2]})
    program = rc.load(network(), batch=6)
    b = program.builder()
    program.append(b, outputs=[b.emit(Relu(), program["scores"].value, name="top").name])
    np.testing.assert_array_equal(program.evaluate({"x": X}, ["top"])[0], np.maximum(by_hand(program), 0))
    with pytest.raises(rc.UsageError, match="appended to it by hand"):
        program.evaluate({"x": X[:2]}, ["top"])


def test_fed_statistics_have_no_evaluation() -> None:
    """Nothing that could be used in place of the batch's."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        net (float[4,2] x, float[2] m, float[2] v) => (float[4,2] y) {
            y, m1, v1 = BatchNormalization <training_mode=1> (x, s, b, m, v)
        }"""
    )
    for name in ("s", "b"):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(2, np.float32), name))
    with pytest.raises(rc.UsageError, match="'x' has no running statistics"):
        rc.load(model).for_test()


@pytest.mark.parametrize(
    "mask",
    [
        "r = RandomUniformLike (x)  m = Less (r, keep)  f = Cast <to=1> (m)  d = Div (f, keep)",
        "r = RandomUniformLike (x)  m = Less (r, keep)  f = CastLike (m, x)  d = Div (f, keep)",
        "r = RandomUniform <shape=[6,1]> ()  a = Add (keep, r)  f = Floor (a)  d = Div (f, keep)",
    ],
    ids=["dropout in place", "its cast", "stochastic depth"],
)
def test_dropout_that_an_exporter_wrote_out_is_off(mask: str) -> None:
    """As PyTorch's exporters write dropout in place, and stochastic depth."""
    text = '<ir_version: 10, opset_import: ["" : 20]> net (float[N,4] x) => (float[N,4] y) { %s  y = Mul (x, d) }'
    model = onnx.parser.parse_model(text % mask)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.75, np.float32), "keep"))
    program = rc.load(model, batch=6)
    x = np.ones((6, 4), np.float32)
    assert [op.op.name for op in program.operators].count("Dropout") == 1
    (y,) = rc.Executor().run(program, {"x": x}, ["y"])
    assert set(np.round(y.ravel(), 5)) <= {0.0, np.float32(1.33333)}
    np.testing.assert_allclose(program.evaluate({"x": x})[0], x, rtol=1e-6)
    assert "Dropout" not in {n.op_type for n in rc.export_trained(program).graph.node}


def test_masks_that_are_no_dropout_are_told() -> None:
    """They stay random."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        net (float[4,2] x) => (float[4,2] y) {
            r = RandomUniformLike (x)
            m = Greater (r, x)
            f = Cast <to=1> (m)
            y = Mul (x, f)
        }"""
    )
    with pytest.warns(rc.ModelWarning, match="still draws random numbers: 'r'"):
        rc.load(model).for_test()


# -- frozen parts -----------------------------------------------------------------------------------------------------


def test_a_frozen_backbone_keeps_its_bits() -> None:
    """Parameters and statistics; the head learns."""
    program = rc.load(network(), batch=6).freeze("body.*", eval=True)
    before = {n: a.copy() for n, a in program.data.items()}
    loss = rc.losses.cross_entropy(program)
    rc.Adam(0.05).minimize(loss)
    assert [p for p, _ in program.gradients] == ["head.weight", "head.bias"]
    executor = rc.Executor()
    losses = [float(executor.run(program, {"x": X, "label": Y}, [loss])[0]) for _ in range(30)]
    changed = {n for n in before if not np.array_equal(before[n], program.data[n])}
    assert changed - {"step"} == {"head.weight", "head.bias"}
    assert np.mean(losses[-5:]) < losses[0]


def test_only_the_frozen_part_is_in_inference_mode() -> None:
    """The head's own dropout stays on, that of the backbone is off."""
    program = rc.load(network(), batch=6).freeze(["body.*"], eval=True)
    made = {op.op.name: 0 for op in program.operators}
    for op in program.operators:
        made[op.op.name] += 1
    assert made["Dropout"] == 1 and made["BatchNormalization"] == 2 and "BatchNormTrain" not in made
    assert next(op for op in program.operators if op.op.name == "Dropout").outputs[0].name == "d2"


def test_freezing_without_eval_leaves_the_mode() -> None:
    """As `requires_grad_(False)` does: statistics follow the batches."""
    program = rc.load(network(), batch=6).freeze("body.*")
    before = {n: a.copy() for n, a in program.data.items()}
    rc.SGD(0.05).minimize(rc.losses.cross_entropy(program))
    rc.Executor().run(program, {"x": X, "label": Y}, ["loss"])
    changed = {n for n in before if not np.array_equal(before[n], program.data[n])}
    assert changed - {"step"} == {"head.weight", "head.bias", "body.m1", "body.m2", "body.v1", "body.v2"}


def test_part_of_the_backbone_is_frozen() -> None:
    """Above a parameter that trains nothing is in inference mode."""
    program = rc.load(network(), batch=6).freeze("body.?2", eval=True)
    names = [op.op.name for op in program.operators]
    assert names.count("BatchNormTrain") == 2 and "BatchNormalization" not in names


def test_a_frozen_program_is_evaluated_at_any_batch() -> None:
    """And says why a tensor does not train."""
    program = rc.load(network(), batch=6).freeze("body.*", eval=True)
    rc.SGD(0.05).minimize(rc.losses.cross_entropy(program))
    rc.Executor().run(program, {"x": X, "label": Y}, ["loss"])
    np.testing.assert_allclose(program.evaluate({"x": X[:2]})[0], by_hand(program, X[:2]), rtol=1e-5, atol=1e-6)
    assert {t.why for t in program.tensors if t.name.startswith("body.conv")} == {"frozen"}


def test_a_pattern_without_a_parameter_is_told() -> None:
    """With the nearest name."""
    with pytest.raises(rc.UsageError, match=r"no parameter is called 'body\.con1'.*body\.conv1"):
        rc.load(network(), batch=6).freeze(["head.*", "body.con1"])


def test_a_program_lists_its_edits() -> None:
    """What was done since loading is a list, and is done again at another batch."""
    program = rc.load(rc.models.build("lenet"), batch=4)
    assert program.again is not None and program.again.edits == ()
    program.freeze("conv*")
    rc.losses.cross_entropy(program["logits"])
    assert [e.name for e in program.again.edits] == ["freeze", "cross_entropy"]
    other = program.again(2)
    assert other.block.batch == 2 and "loss" in other
    assert [v.name for v in other.parameters] == [v.name for v in program.parameters]
    b = program.builder()
    b.Neg(program["logits"].value)
    program.append(b)
    assert program.again is None  # an operator by hand is no edit that could be made again
