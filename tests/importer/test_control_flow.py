"""If, Loop and Scan become plain programs: against ONNX Runtime, and against the same mathematics written out."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.helper import make_node as node
from onnx.numpy_helper import from_array, to_array

import recompute as rc
from recompute.cli import main
from recompute.exporter.trained import export_trained

FLOAT, INT, BOOL = 1, 7, 9


def info(name: str, shape: Any = None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def weight(name: str, *shape: int) -> onnx.TensorProto:
    g = np.random.default_rng([ord(c) for c in name])
    return from_array(g.uniform(-0.5, 0.5, shape).astype(np.float32), name)


def graph(nodes: list, inputs: list, outputs: list, weights: tuple = ()) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", inputs, outputs, list(weights))


def model(nodes: list, inputs: list, outputs: list, weights: tuple = (), opset: int = 18) -> onnx.ModelProto:
    return helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, list(weights)),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=8 if opset > 8 else 3,
    )


def constant(name: str, value: Any, kind: str = "int64") -> onnx.NodeProto:
    return node("Constant", [], [name], value=from_array(np.array(value, kind), name))


def outputs_of(source: onnx.ModelProto, feed: dict[str, np.ndarray], **options: Any) -> list[np.ndarray]:
    program = rc.load(source, **options)
    return rc.Executor().run(program, feed, [o.name for o in source.graph.output])


def check(source: onnx.ModelProto, feed: dict[str, np.ndarray]) -> None:
    """Ours against ONNX Runtime's."""
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(source.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for mine, theirs in zip(outputs_of(source, feed), session.run(None, feed), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def trained(program: rc.Program, feed: dict[str, np.ndarray], steps: int = 2, output: str = "y") -> list[float]:
    loss = rc.losses.mse(program[output])
    rc.SGD(0.1).minimize(loss)
    feed = {**feed, **{v.name: np.zeros(v.shape, np.float32) for v in program.inputs if v.name not in feed}}
    executor = rc.Executor()
    return [float(executor.run(program, feed, [loss])[0]) for _ in range(steps)]


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


# -- Scan --------------------------------------------------------------------------------------------------------------


def cell(batch: int, features: int, hidden: int) -> onnx.GraphProto:
    """h' = tanh(x w + h u + b); w is outside, u and b are inside."""
    nodes = [
        node("MatMul", ["x_t", "w"], ["a"]), node("MatMul", ["h", "u"], ["c"]), node("Add", ["a", "c"], ["d"]),
        node("Add", ["d", "b"], ["e"]), node("Tanh", ["e"], ["h_next"]), node("Identity", ["h_next"], ["out"]),
    ]  # fmt: skip
    state = [batch, hidden]
    return graph(nodes, [info("h", state), info("x_t", [batch, features])], [info("h_next", state), info("out", state)],
                 (weight("u", hidden, hidden), weight("b", hidden)))  # fmt: skip


def recurrent(steps: int, **attributes: Any) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    scan = node("Scan", ["h0", "x"], ["last", "y"], body=cell(2, 3, 5), num_scan_inputs=1, **attributes)
    shape = [steps, 2, 3]
    axis = attributes.get("scan_input_axes", [0])[0]
    shape.insert(axis % 3, shape.pop(0))
    source = model([scan], [info("h0", [2, 5]), info("x", shape)], [info("y"), info("last")], (weight("w", 3, 5),))
    g = np.random.default_rng(steps)
    return source, {"h0": g.standard_normal((2, 5)).astype("f4"), "x": g.standard_normal(shape).astype("f4")}


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"scan_input_directions": [1]},
        {"scan_output_directions": [1]},
        {"scan_input_axes": [1]},
        {"scan_input_axes": [-1], "scan_output_axes": [-1], "scan_input_directions": [1]},
        {"scan_output_directions": [1], "scan_input_directions": [1]},
        {"scan_output_axes": [2]},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("steps", [1, 4])
def test_scan(steps: int, attributes: dict[str, Any]) -> None:
    check(*recurrent(steps, **attributes))


def test_scan_of_several_inputs_and_outputs() -> None:
    body = graph(
        [node("Add", ["s", "p"], ["s1"]), node("Mul", ["r", "q"], ["r1"]), node("Sub", ["s1", "q"], ["o1"]),
         node("ReduceSum", ["p", "axes"], ["o2"], keepdims=0)],
        [info("s", [3]), info("r", [3]), info("p", [3]), info("q", [3])],
        [info("s1", [3]), info("r1", [3]), info("o1", [3]), info("o2", [])],
        (from_array(np.array([0]), "axes"),),
    )  # fmt: skip
    scan = node("Scan", ["a", "b", "x", "z"], ["s", "r", "o1", "o2"], body=body, num_scan_inputs=2,
                scan_input_directions=[0, 1], scan_input_axes=[0, 1], scan_output_axes=[1, 0])  # fmt: skip
    source = model([scan], [info("a", [3]), info("b", [3]), info("x", [4, 3]), info("z", [3, 4])],
                   [info("s"), info("r"), info("o1"), info("o2")])  # fmt: skip
    check(source, {"a": X[0], "b": X[1], "x": X, "z": X.T.copy() + 1})


def test_a_scan_of_a_cell_is_the_recurrent_operator() -> None:
    source, feed = recurrent(5)
    of = {t.name: to_array(t) for t in (*source.graph.initializer, *source.graph.node[0].attribute[0].g.initializer)}
    rnn = node("RNN", ["x", "W", "R", "B", "", "H"], ["Y"], hidden_size=5)
    weights = {"W": of["w"].T[None], "R": of["u"].T[None], "b": of["b"][None]}
    nodes = [node("Unsqueeze", ["h0", "first"], ["H"]), constant("zeros", np.zeros((1, 5)), "float32"),
             node("Concat", ["b", "zeros"], ["B"], axis=1), rnn, node("Squeeze", ["Y", "second"], ["y"])]  # fmt: skip
    held = [from_array(np.ascontiguousarray(a), n) for n, a in weights.items()]
    held += [from_array(np.array([i]), n) for i, n in enumerate(("first", "second"))]
    fused = model(nodes, list(source.graph.input), [info("y")], tuple(held))
    programs = rc.load(source), rc.load(fused)
    losses = [trained(p, feed, 3) for p in programs]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    scanned, built_in = (p.data for p in programs)
    np.testing.assert_allclose(scanned["last/body/u"], built_in["R"][0].T, rtol=1e-5, atol=1e-6)
    assert {v.name for v in programs[0].parameters} == {"w", "last/body/u", "last/body/b"}
    assert {"last/2/e", "last/3/d", "last"} <= set(programs[0].block.values())


def test_scans_of_many_steps_are_quick() -> None:
    seconds = {}
    for steps in (100, 1000):
        source, _ = recurrent(steps)
        began = time.perf_counter()
        program = rc.load(source)
        seconds[steps] = time.perf_counter() - began
        assert len(program.operators) == 7 * steps + 2
    assert seconds[1000] < 5


def test_scan_of_opset_8_runs_each_batch_element_by_itself() -> None:
    body = graph(
        [node("Add", ["s", "x_t"], ["s1"]), node("Squeeze", ["s1"], ["o"], axes=[0])],
        [info("s", [1]), info("x_t", [1])], [info("s1", [1]), info("o", [])],
    )  # fmt: skip
    for lengths, way in (("", 0), ("", 1), ("n", 1)):
        scan = node("Scan", [lengths, "s0", "x"], ["s", "y"], body=body, num_scan_inputs=1, directions=[way])
        held = (from_array(np.array([3, 2]), "n"),) if lengths else ()
        given = [info("s0", [2, 1]), info("x", [2, 3, 1]), *([info("n", [2], INT)] if lengths else [])]
        source = model([scan], given, [info("s"), info("y")], held, opset=8)
        x = np.arange(1, 7, dtype=np.float32).reshape(2, 3, 1)
        s, y = outputs_of(source, {"s0": np.zeros((2, 1), np.float32), "x": x})
        want = np.zeros((2, 3), np.float32)
        for b, n in enumerate((3, 2) if lengths else (3, 3)):
            row = x[b, :n, 0][:: -1 if way else 1]
            want[b, :n] = np.cumsum(row)
            assert s[b, 0] == row.sum()
        np.testing.assert_array_equal(y, want)


# -- Loop --------------------------------------------------------------------------------------------------------------


def counted(trips: int | None, condition: str = "", body_condition: list | None = None) -> onnx.ModelProto:
    """v = v w + number; the scan outputs are v and the number."""
    stop = body_condition or [node("Identity", ["go"], ["more"])]
    nodes = [*stop, node("MatMul", ["v", "w"], ["m"]), node("Cast", ["number"], ["f"], to=1),
             node("Add", ["m", "f"], ["v1"]), node("Identity", ["v1"], ["row"]), node("Identity", ["number"], ["at"]),
             constant("one", [1.0, 2.0, 3.0], "float32"), node("Mul", ["v1", "one"], ["scaled"])]  # fmt: skip
    body = graph(nodes, [info("number", [], INT), info("go", [], BOOL), info("v", [4, 3])],
                 [info("more", [], BOOL), info("v1", [4, 3]), info("row", [4, 3]), info("at", [], INT),
                  info("scaled", [4, 3])])  # fmt: skip
    loop = node("Loop", ["" if trips is None else "trips", condition, "x"], ["y", "rows", "at", "scaled"], body=body)
    made = [constant("trips", trips)] if trips is not None else []
    made += [constant(condition, True, "bool")] if condition else []
    outs = [info("y"), info("rows"), info("at", None, INT), info("scaled")]
    return model([*made, loop], [info("x", [4, 3])], outs, (weight("w", 3, 3),))


LESS = [constant("three", 3), node("Less", ["number", "three"], ["more"])]


@pytest.mark.parametrize(
    "arguments", [(0,), (1,), (3,), (3, "c"), (2**62, "c", LESS), (None, "c", LESS), (None, "", LESS), (2, "", LESS)]
)
def test_loop(arguments: tuple) -> None:
    check(counted(*arguments), {"x": X})


def test_loops_in_loops_and_branches_share_one_weight() -> None:
    inner = graph(
        [node("Identity", ["go2"], ["more2"]), node("MatMul", ["v2", "w"], ["a"]), node("Add", ["a", "b"], ["c"]),
         node("Mul", ["c", "outer_value"], ["v2_next"])],
        [info("i", [], INT), info("go2", [], BOOL), info("v2", [4, 3])],
        [info("more2", [], BOOL), info("v2_next", [4, 3])], (weight("b", 3),),
    )  # fmt: skip
    then = graph([constant("k", [0.5, 0.25, 2.0], "float32"), node("Mul", ["held", "k"], ["r"])], [], [info("r")])
    other = graph([node("Add", ["held", "k"], ["r"])], [], [info("r")], (weight("k", 3),))
    body = graph(
        [node("Identity", ["go"], ["more"]), node("Sigmoid", ["v"], ["outer_value"]),
         node("Loop", ["two", "", "v"], ["held"], body=inner), node("Equal", ["i", "zero"], ["is_first"]),
         node("If", ["is_first"], ["next"], then_branch=then, else_branch=other)],
        [info("i", [], INT), info("go", [], BOOL), info("v", [4, 3])], [info("more", [], BOOL), info("next", [4, 3])],
    )  # fmt: skip
    nodes = [constant("three", 3), constant("two", 2), constant("zero", 0)]
    source = model([*nodes, node("Loop", ["three", "", "x"], ["y"], body=body)], [info("x", [4, 3])], [info("y")],
                   (weight("w", 3, 3),))  # fmt: skip
    check(source, {"x": X})
    program = rc.load(source)
    names = {"w", "y/body/held/body/b", "y/body/next/else_branch/k"}
    assert {v.name for v in program.parameters} == names
    losses = trained(program, {"x": X}, 3)
    assert losses[2] < losses[0]
    after = export_trained(program)
    assert after.ByteSize() - source.ByteSize() < 200  # no weight is there twice
    again = rc.load(after)
    assert all(np.array_equal(again.data[n], program.data[n]) for n in names)
    check(after, {"x": X})


def test_names_inside_may_hide_names_outside() -> None:
    inner = graph([node("Relu", ["x"], ["v"]), node("Neg", ["v"], ["x_1"])], [], [info("x_1")])
    body = graph(
        [node("Identity", ["go"], ["more"]), node("Add", ["x", "y_0"], ["v"]),
         node("If", ["go"], ["q"], then_branch=inner, else_branch=inner), node("Add", ["v", "q"], ["out"])],
        [info("i", [], INT), info("go", [], BOOL), info("x", [4, 3])], [info("more", [], BOOL), info("out", [4, 3])],
    )  # fmt: skip
    nodes = [node("Abs", ["x"], ["y_0"]), node("Exp", ["x"], ["v"]), constant("n", 2),
             node("Loop", ["n", "", "v"], ["z"], body=body), node("Mul", ["z", "x"], ["y"])]  # fmt: skip
    (y,) = outputs_of(model(nodes, [info("x", [4, 3])], [info("y")]), {"x": X})
    v = np.exp(X)
    for _ in range(2):
        v = v + np.abs(X) - np.maximum(v, 0)
    np.testing.assert_allclose(y, v * X, rtol=1e-6)


def test_a_loop_may_hand_back_what_it_got() -> None:
    body = graph([node("Identity", ["go"], ["more"])], [info("i", [], INT), info("go", [], BOOL), info("a"), info("b")],
                 [info("more", [], BOOL), info("b"), info("a"), info("x"), info("k")], (weight("k", 3),))  # fmt: skip
    nodes = [
        constant("n", 3),
        node("Relu", ["x"], ["r"]),
        node("Loop", ["n", "", "x", "r"], ["p", "q", "o", "k3"], body=body),
    ]
    source = model(nodes, [info("x", [4, 3])], [info(n) for n in ("p", "q", "o", "k3")])
    p, q, o, k = outputs_of(source, {"x": X})
    assert np.array_equal(p, np.maximum(X, 0)) and np.array_equal(q, X)
    assert np.array_equal(o, np.stack([X] * 3)) and np.array_equal(k, np.stack([to_array(weight("k", 3))] * 3))


# -- what cannot be static ---------------------------------------------------------------------------------------------


def loop_of(body_nodes: list, before: list, trips: str = "n") -> list:
    body = graph(body_nodes, [info("i", [], INT), info("go", [], BOOL), info("v", [4, 3])],
                 [info("more", [], BOOL), info("v1", [4, 3])])  # fmt: skip
    return [*before, node("Loop", [trips, "", "x"], ["y"], name="the_loop", body=body)]


SAME = node("Identity", ["go"], ["more"])
SUM = [node("ReduceSum", ["x"], ["s"], keepdims=0), node("Cast", ["s"], ["n"], to=7)]
ABOVE = [node("ReduceMax", ["v"], ["top"], keepdims=0), constant("one", 1.0, "float32"),
         node("Less", ["top", "one"], ["more"])]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (loop_of([SAME, node("Relu", ["v"], ["v1"])], SUM), r"'the_loop' \(Loop\): its trip count .* from data"),
        (loop_of([*ABOVE, node("Relu", ["v"], ["v1"])], [constant("n", 5)]),
         r"'the_loop' \(Loop\): whether it goes on after 1 iterations is computed from data"),
        (loop_of([SAME, node("Relu", ["v"], ["v1"])], [], ""), r"'the_loop' \(Loop\): it never ends"),
        (loop_of([SAME, node("Nothing", ["v"], ["v1"], name="odd")], [constant("n", 5)]),
         r"node 'y/0/odd' \(Nothing\): this operator is not supported"),
        ([*SUM, node("Greater", ["s", "s"], ["c"]), node("If", ["c"], ["y"], name="the_if",
          then_branch=graph([], [], [info("x")]), else_branch=graph([], [], [info("s")]))],
         r"node 'the_if' \(If\): its condition is computed from data"),
    ],
)  # fmt: skip
def test_what_cannot_be_static_is_named(nodes: list, why: str) -> None:
    with pytest.raises(rc.ModelError, match=why) as caught:
        rc.load(model(nodes, [info("x", [4, 3])], [info("y")]))
    assert str(caught.value).count("\n") == 1


# -- weights inside branches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("taken", [True, False])
def test_weights_inside_branches_are_trained_and_exported(opset: int, taken: bool) -> None:
    def branch(k: int) -> onnx.GraphProto:
        nodes = [constant("v", np.full((3, 2), 0.1 * k), "float32"), node("MatMul", ["x", "w"], ["m"]),
                 node("Relu", ["m"], ["h"]), node("MatMul", ["h", "v"], ["out"])]  # fmt: skip
        return graph(nodes, [], [info("out", [4, 2])], (weight("w", 3, 3),))

    cond = constant("c", taken, "bool")
    made = node("If", ["c"], ["y"], then_branch=branch(1), else_branch=branch(2))
    source = model([cond, made], [info("x", [4, 3])], [info("y")], opset=opset)
    program = rc.load(source)
    at = "then_branch" if taken else "else_branch"
    assert {v.name for v in program.parameters} == {f"y/{at}/w", f"y/{at}/v"}
    trained(program, {"x": X}, 3)
    after = export_trained(program)
    again = rc.load(after)
    for name in again.data:
        assert np.array_equal(again.data[name], program.data[name]), name
    (other,) = (a.g for n in after.graph.node for a in n.attribute if a.name.endswith("_branch") and a.name != at)
    assert to_array(other.initializer[0]).tobytes() == to_array(weight("w", 3, 3)).tobytes()
    check(after, {"x": X})


# -- recurrent operators, step by step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("op_type", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("given", ["", "b n h", "b n h c p"])
def test_unrolled_recurrent_operators_train_alike(op_type: str, direction: str, given: str) -> None:
    d, g, h = (2 if direction == "bidirectional" else 1), {"LSTM": 4, "GRU": 3, "RNN": 1}[op_type], 4
    shapes = {"x": (5, 2, 3), "w": (d, g * h, 3), "r": (d, g * h, h), "b": (d, 2 * g * h), "n": (2,), "h": (d, 2, h),
              "c": (d, 2, h), "p": (d, 3 * h)}  # fmt: skip
    present = {"x", "w", "r", *given.split()}
    names = [n if n in present else "" for n in shapes][: 8 if op_type == "LSTM" else 6]
    held = [from_array(np.array([5, 3], np.int32), n) if n == "n" else weight(n, *shapes[n]) for n in names[1:] if n]
    more = {"linear_before_reset": 1} if op_type == "GRU" and given else {}
    made = node(op_type, names, ["y", "y_h"], hidden_size=h, direction=direction, **more)
    source = model([made], [info("x", list(shapes["x"]))], [info("y"), info("y_h")], tuple(held))
    feed = {"x": np.random.default_rng(1).standard_normal(shapes["x"]).astype(np.float32)}
    fused, unrolled = rc.load(source), rc.load(source, unroll=True)
    assert op_type not in {o.op.name for o in unrolled.operators}
    steps = {f"y/{t}/h" for t in range(5)} | ({f"y/reverse/{t}/h" for t in range(5)} if d == 2 else set())
    assert steps <= set(unrolled.block.values())
    np.testing.assert_allclose(trained(fused, feed, 3), trained(unrolled, feed, 3), rtol=2e-6)
    assert fused.data.keys() == unrolled.data.keys()
    for name, array in fused.data.items():
        np.testing.assert_allclose(unrolled.data[name], array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op_type", ["LSTM", "GRU", "RNN"])
def test_unrolled_recurrent_operators_have_the_same_gradients_in_float64(op_type: str) -> None:
    g = {"LSTM": 4, "GRU": 3, "RNN": 1}[op_type]
    arrays = {n: to_array(weight(n, *s)).astype(np.float64)
              for n, s in (("w", (2, 4 * g, 3)), ("r", (2, 4 * g, 4)), ("b", (2, 8 * g)))}  # fmt: skip
    made = node(op_type, ["x", *arrays], ["y"], hidden_size=4, direction="bidirectional")
    source = model([made], [info("x", [5, 2, 3], 11)], [info("y", None, 11)],
                   tuple(from_array(a, n) for n, a in arrays.items()))  # fmt: skip
    feed = {"x": np.sin(np.arange(30.0)).reshape(5, 2, 3)}
    grads = []
    for unroll in (False, True):
        program = rc.load(source, unroll=unroll)
        loss = rc.losses.mse(program["y"])
        rc.SGD(1.0).minimize(loss)
        feeds = {v.name: feed.get(v.name, np.zeros(v.shape)) for v in program.inputs}
        rc.Executor().run(program, feeds, [loss])
        grads.append({n: arrays[n] - program.data[n] for n in arrays})
    for n, fused in grads[0].items():
        assert np.abs(fused).max() > 1e-4
        np.testing.assert_allclose(grads[1][n], fused, rtol=1e-9, atol=1e-12)


def test_a_scan_of_no_steps_gives_back_its_state() -> None:
    source, feed = recurrent(0)
    y, last = outputs_of(source, feed)
    assert y.shape == (0, 2, 5) and np.array_equal(last, feed["h0"])


def test_unrolling_from_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node("LSTM", ["x", "W", "R"], ["", "", "c"], hidden_size=4), node("Squeeze", ["c", "zero"], ["y"])]
    source = model(nodes, [info("x", [6, 2, 3])], [info("y")],
                   (weight("W", 1, 16, 3), weight("R", 1, 16, 4), from_array(np.array([0]), "zero")))  # fmt: skip
    onnx.save(source, tmp_path / "lstm.onnx")
    given = [str(tmp_path / "lstm.onnx"), "--loss", "mse", "--checkpoints", "c/2/[hc]", "--unroll"]
    assert main(given) == 0
    assert main([*given[:-2], "c/2/h"]) == 2
    assert "no value is called 'c/2/h'" in capsys.readouterr().err


def test_recurrent_operators_are_chosen_by_name() -> None:
    nodes = [node("RNN", [x, "w", "r"], [y], name=y + "_cell", hidden_size=3) for x, y in (("x", "p"), ("x", "q"))]
    nodes += [node("Add", ["p", "q"], ["y"])]
    source = model(nodes, [info("x", [4, 2, 3])], [info("y")], (weight("w", 1, 3, 3), weight("r", 1, 3, 3)))
    for chosen in (["q"], "q_c*"):
        program = rc.load(source, unroll=chosen)
        assert sum(o.op.name == "RNN" for o in program.operators) == 1 and "q/3/h" in program and "p/3/h" not in program
    with pytest.raises(rc.UsageError, match="unroll: no recurrent node is called 'pp'"):
        rc.load(source, unroll=["pp"])


def test_steps_of_recurrent_operators_are_checkpoints() -> None:
    source, feed = recurrent(12)
    nodes = [node("LSTM", ["x", "W", "R"], ["y"], hidden_size=4)]
    source = model(nodes, [info("x", [12, 2, 3])], [info("y")], (weight("W", 1, 16, 3), weight("R", 1, 16, 4)))
    losses = []
    for kept in (None, ["y/3/[hc]", "y/7/[hc]"]):
        program = rc.load(source, unroll=True)
        loss = rc.losses.mse(program["y"])
        optimizer = rc.SGD(0.1) if kept is None else rc.RecomputeOptimizer(rc.SGD(0.1))
        if kept is not None:
            optimizer._set_checkpoints(kept)
        optimizer.minimize(loss)
        full = {**{v.name: np.zeros(v.shape, np.float32) for v in program.inputs}, "x": feed["x"]}
        executor = rc.Executor()
        losses.append([float(executor.run(program, full, [loss])[0]) for _ in range(3)])
        if kept is not None:
            assert any(o.role.value == "recompute" for o in program.operators)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("source", ["x", "s"])
def test_second_outputs_inside_bodies(source: str) -> None:
    """States that go to the next iteration, and what an operator that runs once (it reads x only) gives the others."""
    body = [
        node("LSTM", ["x", "W", "R", "", "", "s", "c"], ["", "s2", "c2"], hidden_size=4),
        node("MaxPool", [source], ["p", "i"], kernel_shape=[2]), node("Cast", ["i"], ["f"], to=FLOAT),
        node("ReduceMean", ["f"], ["m"], keepdims=0), node("Mul", ["s2", "m"], ["s3"]), node("Identity", ["k"], ["k2"]),
    ]  # fmt: skip
    inputs = [info("t", [], INT), info("k", [], BOOL), info("s", [1, 2, 4]), info("c", [1, 2, 4])]
    outputs = [info("k2", [], BOOL), info("s3", [1, 2, 4]), info("c2", [1, 2, 4])]
    loop = node("Loop", ["count", "", "h", "h"], ["y", "z"], body=graph(body, inputs, outputs))
    held = (weight("W", 1, 16, 3), weight("R", 1, 16, 4), weight("h", 1, 2, 4), from_array(np.array(2), "count"))
    check(model([loop], [info("x", [5, 2, 3])], [info("y"), info("z")], held), {"x": np.ones((5, 2, 3), np.float32)})
