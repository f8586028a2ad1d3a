"""Losses on labels: from ONNX with all their attributes, what they refuse, and what they take for a tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import recompute as rc
from recompute import TensorType
from recompute.errors import TypeRuleError
from recompute.language.op import op_class
from recompute.ops.tiles import TILE
from recompute.testing import Case, case_block, check_expansion, evaluate

G = np.random.default_rng(2)
LABELS = np.array([[0, 4, 2], [2, 1, 2]])
WEIGHTS = G.uniform(0.5, 1.5, 5).astype(np.float32)
SCORES = G.standard_normal((2, 5, 3)).astype(np.float32)


def model(kind: str, weighted: bool, outputs: list[str], attributes: dict[str, Any]) -> onnx.ModelProto:
    node = helper.make_node(kind, ["x", "l", "w"][: 2 + weighted], outputs, name="loss", **attributes)
    infos = [helper.make_tensor_value_info("x", 1, [2, 5, 3]), helper.make_tensor_value_info("l", 7, [2, 3])]
    results = [helper.make_tensor_value_info(n, 1, None) for n in outputs]
    weights = [numpy_helper.from_array(WEIGHTS, "w")] if weighted else []
    graph = helper.make_graph([node], "g", infos, results, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize(
    "attributes", [{}, {"reduction": "sum"}, {"reduction": "none", "ignore_index": 2}, {"ignore_index": 4}]
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", "both"])
def test_from_onnx(kind: str, weighted: bool, attributes: dict[str, Any]) -> None:
    """As onnx's reference evaluator has it, with log-probabilities where they are asked for."""
    from onnx.reference import ReferenceEvaluator

    outputs = ["y", "p"] if kind == "both" else ["y"]
    made = model("SoftmaxCrossEntropyLoss" if kind == "both" else kind, weighted, outputs, attributes)
    program = rc.load(made)
    (op,) = [o for o in program.operators if o.op.name.endswith("Loss")]
    assert len(op.outputs) == len(outputs)
    if weighted:
        assert [v.name for v in program.block.buffers] == ["w"] and not program.block.parameters
    feed = {"x": SCORES, "l": LABELS}
    for got, want in zip(
        rc.Executor().run(program, feed, outputs), ReferenceEvaluator(made).run(None, feed), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "types", "options", "why"),
    [
        ("SoftmaxCrossEntropyLoss", "f32[2,5] i64[2]", {"reduction": "most"}, "reduction must be one of mean, sum"),
        ("SoftmaxCrossEntropyLoss", "f32[2] i64[2]", {}, "scores must be [N, C, d1, ...]"),
        ("SoftmaxCrossEntropyLoss", "f32[2,5] i64[3]", {}, "scores must be [N, C, d1, ...]"),
        ("SoftmaxCrossEntropyLoss", "f32[2,5,3] i64[2]", {}, "scores must be [N, C, d1, ...]"),
        ("SoftmaxCrossEntropyLoss", "f32[2,5] f32[2]", {}, "labels must be i32 or i64"),
        ("SoftmaxCrossEntropyLoss", "f32[2,5] i32[2] f32[4]", {}, "weights must be one number a class"),
        ("NegativeLogLikelihoodLoss", "f32[2,5] i32[2] f64[5]", {}, "weights must be one number a class"),
        ("SoftmaxCrossEntropyGrad", "f32[2,5] i32[2] _ f32[2]", {}, "dloss does not have the loss's type"),
        ("SoftmaxCrossEntropyGrad", "f32[2,5] i32[2] _ f64[]", {}, "dloss does not have the loss's type"),
        ("NegativeLogLikelihoodGrad", "i32[2] _ f32[2]", {"shape": (2, 5)}, "dloss does not have the loss's type"),
        ("NegativeLogLikelihoodGrad", "i32[3] _ f32[]", {"shape": (2, 5)}, "scores must be [N, C, d1, ...]"),
    ],
)  # fmt: skip
def test_types_that_are_refused(name: str, types: str, options: dict[str, Any], why: str) -> None:
    ins = [None if t == "_" else TensorType.parse(t) for t in types.split()]
    with pytest.raises(TypeRuleError) as e:
        op_class(name)(**options).infer(*ins)
    assert why in str(e.value)


@pytest.mark.parametrize(
    ("shape", "weighted", "ignore", "expected"),
    [
        # of all labels: places, which are ignored, numbers, weights; then rows of a tile of whole samples
        ((3, 5), False, None, "i64[3] bool[0] f32[3] f32[0] f32[3,1,1] f32[3,5,1]"),
        ((3, 5, 2), True, None, "i64[6] bool[6] f32[6] f32[6] f32[3,1,2] f32[3,5,2]"),
        ((3, 5), False, 1, "i64[3] bool[3] f32[3] f32[3] f32[3,1,1] f32[3,5,1]"),
        ((4000, TILE // 8), False, None, f"i64[4000] bool[0] f32[4000] f32[0] f32[8,1,1] f32[8,{TILE // 8},1]"),
        ((2, 2 * TILE), False, None, f"i64[2] bool[0] f32[2] f32[0] f32[1,1,1] f32[1,{2 * TILE},1]"),
    ],
)  # fmt: skip
def test_scratch_is_a_tile(shape: tuple[int, ...], weighted: bool, ignore: int | None, expected: str) -> None:
    scores, labels = TensorType("f32", shape), TensorType("i64", (shape[0], *shape[2:]))
    weights = [TensorType("f32", shape[1:2])] if weighted else []
    op = op_class("SoftmaxCrossEntropyLoss")(ignore_index=ignore)
    found = op.scratch([scores, labels, *weights], [None, None])
    assert list(map(str, found)) == [*expected.split(), expected.split()[-1]]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_expansions_with_inner_axes(reduction: str, weighted: bool) -> None:
    """In simpler operators, for labels in rows and columns, some of which are ignored."""
    shape = {"none": (2, 3)}.get(reduction, ())
    weights, dloss = WEIGHTS.astype(np.float64) if weighted else None, np.full(shape, 1.5)
    scores, lp = SCORES.astype(np.float64), -abs(SCORES.astype(np.float64))
    options: dict[str, Any] = {"reduction": reduction, "ignore_index": 2}
    for name, inputs, more in (
        ("SoftmaxCrossEntropyLoss", (scores, LABELS, weights), {}),
        ("SoftmaxCrossEntropyGrad", (lp, LABELS, weights, dloss), {}),
        ("NegativeLogLikelihoodLoss", (lp, LABELS.astype(np.int32), weights), {}),
        ("NegativeLogLikelihoodGrad", (LABELS, weights, dloss), {"shape": (2, 5, 3)}),
    ):
        case = Case(op_class(name)(**options, **more), inputs)
        check_expansion(case, *case_block(case))


def test_log_probabilities_take_the_place_of_scores() -> None:
    loss, grad = op_class("SoftmaxCrossEntropyLoss")(), op_class("SoftmaxCrossEntropyGrad")()
    assert (loss.overwrites(0), loss.overwrites(1), grad.overwrites(0)) == ((), (0,), (0,))
    assert vars(loss) == vars(grad) == {"reduction": "mean", "ignore_index": None}


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision_gradients(dtype: str) -> None:
    """Worked out in float32, stored as they are asked for."""
    kind = TensorType(dtype, (2, 5, 3)).numpy
    lp = np.log(np.exp(SCORES) / np.exp(SCORES).sum(axis=1, keepdims=True))
    found = []
    for given in (lp, lp.astype(kind)):
        block, feed = case_block(
            Case(op_class("SoftmaxCrossEntropyGrad")(), (given, LABELS, None, np.asarray(3, given.dtype)))
        )
        found.append(evaluate(block, feed)[0])
    assert found[1].dtype == kind
    np.testing.assert_allclose(found[1].astype(np.float32), found[0], atol=2e-2)
