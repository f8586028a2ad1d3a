"""RNN, GRU and LSTM against ONNX Runtime; what their import leaves out; what their gradients compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import recompute as rc
from recompute.language.builder import Builder
from recompute.ops.recurrent.gru import GRU
from recompute.ops.recurrent.lstm import LSTM
from recompute.ops.recurrent.rnn import RNN
from recompute.ops.recurrent.shared import GRADIENTS
from recompute.testing import Case, case_block, check_expansion, evaluate

ort = pytest.importorskip("onnxruntime")

STEPS, BATCH, FEATURES, HIDDEN = 5, 3, 4, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def model_of(
    op_type: str, present: set[str], direction: str = "forward", outputs: list[str] | None = None, **attributes: Any
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one recurrent node with the optional inputs in `present`; x, lengths and states are fed."""
    g = np.random.default_rng(1)
    d, gates = (2 if direction == "bidirectional" else 1), GATES[op_type] * HIDDEN
    batch_first = attributes.get("layout", 0)
    shapes = {
        "x": (BATCH, STEPS, FEATURES) if batch_first else (STEPS, BATCH, FEATURES),
        "w": (d, gates, FEATURES),
        "r": (d, gates, HIDDEN),
        "b": (d, 2 * gates),
        "lengths": (BATCH,),
        "h0": (BATCH, d, HIDDEN) if batch_first else (d, BATCH, HIDDEN),
        "c0": (BATCH, d, HIDDEN) if batch_first else (d, BATCH, HIDDEN),
        "p": (d, 3 * HIDDEN),
    }
    present = present | {"x", "w", "r"}
    values = {n: g.uniform(-1, 1, s).astype(np.float32) for n, s in shapes.items()}
    values["lengths"] = np.array([5, 2, 4], np.int32)
    names = [n if n in present else "" for n in list(shapes)[: 8 if op_type == "LSTM" else 6]]
    outputs = outputs or ["y", "y_h", "y_c"][: 3 if op_type == "LSTM" else 2]
    node = helper.make_node(op_type, names, outputs, hidden_size=HIDDEN, direction=direction, **attributes)
    fed = {n: values[n] for n in ("x", "lengths", "h0", "c0") if n in names}
    weights = [onnx.numpy_helper.from_array(values[n], n) for n in names if n and n not in fed]
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in fed.items()
    ]
    results = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs if o]
    graph = helper.make_graph([node], "recurrent", inputs, results, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model), fed


def check(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> None:
    expected = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
    program = rc.load(model)
    got = rc.Executor().run(program, feed, [o.name for o in model.graph.output])
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape
        np.testing.assert_allclose(g, e, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("present", ["", "b", "b h0", "b h0 c0", "b lengths", "b lengths h0 c0", "b h0 c0 p", "p"])
def test_lstm(direction: str, present: str) -> None:
    check(*model_of("LSTM", set(present.split()), direction))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("present", ["", "b h0", "b lengths h0"])
@pytest.mark.parametrize("linear_before_reset", [0, 1])
def test_gru(direction: str, present: str, linear_before_reset: int) -> None:
    check(*model_of("GRU", set(present.split()), direction, linear_before_reset=linear_before_reset))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("present", ["", "b h0", "b lengths h0"])
@pytest.mark.parametrize("activation", ["Tanh", "Relu", "Sigmoid"])
def test_rnn(direction: str, present: str, activation: str) -> None:
    count = 2 if direction == "bidirectional" else 1
    check(*model_of("RNN", set(present.split()), direction, activations=[activation] * count))


@pytest.mark.parametrize("op_type", list(GATES))
def test_only_the_last_state(op_type: str) -> None:
    check(*model_of(op_type, {"b"}, outputs=["", "y_h"]))


@pytest.mark.parametrize("op_type", list(GATES))
def test_batch_first(op_type: str) -> None:
    """The batch-first layout gives the numbers of the other one (ONNX Runtime has no kernel for it)."""
    model, feed = model_of(op_type, {"b", "h0"}, "bidirectional", layout=1)
    plain, _ = model_of(op_type, {"b", "h0"}, "bidirectional")
    weights = {t.name: t for t in model.graph.initializer}
    for t in plain.graph.initializer:
        t.CopyFrom(weights[t.name])
    outs = [o.name for o in model.graph.output]
    got = rc.Executor().run(rc.load(model), feed, outs)
    turned = {n: np.ascontiguousarray(a.swapaxes(0, 1)) for n, a in feed.items()}
    expected = rc.Executor().run(rc.load(plain), turned, outs)
    np.testing.assert_array_equal(got[0], expected[0].transpose(2, 0, 1, 3))
    np.testing.assert_array_equal(got[1], expected[1].swapaxes(0, 1))


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"activations": ["Relu", "Tanh", "Tanh"]}, r"has activations \['Relu', 'Tanh', 'Tanh'\]; only"),
        ({"clip": 3.0}, "clips its gates"),
        ({"input_forget": 1}, "couples its input and forget gates"),
    ],
)
def test_what_is_not_supported(attributes: dict[str, Any], why: str) -> None:
    model, _ = model_of("LSTM", {"b"}, **attributes)
    with pytest.raises(rc.ModelError, match=r"\(LSTM\): .*" + why):
        rc.load(model)


def test_zero_states_and_full_lengths_are_left_out() -> None:
    model, _ = model_of("LSTM", {"b", "lengths", "h0", "c0"})
    for name, value in (("lengths", np.full(BATCH, STEPS, np.int32)), ("h0", None), ("c0", None)):
        array = np.zeros((1, BATCH, HIDDEN), np.float32) if value is None else value
        node = helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(array))
        model.graph.node.insert(0, node)
        del model.graph.input[[i.name for i in model.graph.input].index(name)]
    block = rc.load(model).block
    assert [len(o.inputs) for o in block.operators if o.op.name == "LSTM"] == [4]


def test_gradient_is_fused_and_without_what_nobody_needs() -> None:
    """x is fed, so its gradient is not computed; the initial states are absent, so theirs are not either."""
    model, _ = model_of("LSTM", {"b"}, "bidirectional")
    block = rc.load(model).block
    b = Builder.on(block)
    loss = b.ReduceSum(block.values()["y"], keepdims=0)
    from recompute.passes.gradient.autodiff import differentiate

    scalar = block.with_operators([*block.operators, *b.operators])
    after, pairs = differentiate(scalar, loss.name)
    grads = [o for o in after.operators if o.op.name == "LSTMGrad"]
    assert len(grads) == 1 and {v.name for v, _ in pairs} == {"w", "r", "b"}
    assert [v is not None for v in grads[0].outputs] == [False, True, True, True]


def test_no_recurrence_beyond_the_step_before() -> None:
    """A row's results after its length do not depend on what x holds there."""
    model, feed = model_of("GRU", {"b", "lengths"}, "bidirectional")
    program = rc.load(model)
    block, data = program.block, program.data
    other = feed["x"].copy()
    other[2:, 1] = np.nan  # row 1 has length 2
    first = evaluate(block, {**feed, **data}, ["y", "y_h"])
    second = evaluate(block, {**feed, **data, "x": other}, ["y", "y_h"])
    for a, c in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, c)


def cases_of(sizes: tuple[int, int]) -> list[Case]:
    """Every operator of so many steps and hidden elements, with all that it may have, and its gradient."""
    draw, (steps, hidden), found = np.random.default_rng(0), sizes, []
    for op in (LSTM(hidden, "bidirectional"), GRU(hidden, "reverse", 1), RNN(hidden, "reverse", "Sigmoid")):
        d, g, batch = op.directions, op.gates * hidden, 6
        shapes = [(steps, batch, 3), (d, g, 3), (d, g, hidden), (d, 2 * g), (batch,), *[(d, batch, hidden)] * 2]
        arrays = [draw.uniform(-1, 1, s).astype("f4") for s in (*shapes, (d, 3 * hidden))][: op.arity]
        arrays[4] = draw.integers(0, steps + 1, batch).astype(np.int32)
        case = Case(op, tuple(arrays), gradient=False)
        block, feed = case_block(case)
        made = evaluate(block, feed, providers=())
        grads = [draw.uniform(-1, 1, a.shape).astype("f4") for a in made[: op.onnx_outputs]]
        kept = made[0], *made[op.onnx_outputs :]
        gradient = GRADIENTS[op.name](**op.options())
        found += [case, Case(gradient, (*arrays, *kept, *grads), gradient=False)]
    return found


@pytest.mark.parametrize("sizes", [(0, 2), (3, 1)])
def test_no_steps_and_one_element(sizes: tuple[int, int]) -> None:
    """The numerics and the unrolled form, where gates are columns of one element, and where there is no step."""
    for case in cases_of(sizes):
        check_expansion(case, *case_block(case))
