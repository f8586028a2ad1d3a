"""Attention and RotaryEmbedding: imported through ONNX's own function bodies, compared with its evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import recompute as rc
from recompute.testing import check_gradient

LATEST = onnx.defs.onnx_opset_version()
pytestmark = pytest.mark.skipif(LATEST < 23, reason="this onnx has no Attention operator")

GENERATOR = np.random.default_rng(11)


def f32(*shape: int) -> np.ndarray:
    return GENERATOR.uniform(-1, 1, shape).astype(np.float32)


def check(op_type: str, inputs: list[np.ndarray | None], opset: int, outputs: int = 1, **attributes: Any) -> None:
    if opset > LATEST:
        pytest.skip(f"this onnx has no opset {opset}")
    names = ["" if a is None else f"x{i}" for i, a in enumerate(inputs)]
    outs = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op_type, names, outs, **attributes)
    feed = {n: a for n, a in zip(names, inputs, strict=True) if a is not None}
    declared = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feed.items()
    ]
    results = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outs]
    graph = helper.make_graph([node], "one", declared, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    expected = ReferenceEvaluator(model).run(None, feed)
    got = rc.Executor().run(rc.load(model), feed, outs)
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize(
    ("inputs", "attributes"),
    [
        ([f32(2, 3, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 5)], {}),
        ([f32(2, 3, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8)], {"is_causal": 1}),
        ([f32(2, 6, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8)], {}),
        ([f32(2, 4, 24), f32(2, 6, 24), f32(2, 6, 24)], {"q_num_heads": 3, "kv_num_heads": 3}),
        ([f32(2, 4, 48), f32(2, 6, 24), f32(2, 6, 24)], {"q_num_heads": 6, "kv_num_heads": 3}),
        ([f32(2, 3, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8), f32(4, 6)], {}),
        ([f32(2, 3, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8), f32(2, 1, 4, 6)], {"is_causal": 1}),
        ([f32(2, 3, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8), f32(2, 3, 4, 6) > -0.9], {}),
        ([f32(2, 3, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8)], {"softcap": 2.0, "scale": 0.5}),
        ([f32(2, 3, 4, 8), f32(2, 3, 4, 8), f32(2, 3, 4, 8)], {"softcap": 2.0, "is_causal": 1}),
        ([f32(2, 6, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8), f32(2, 6, 4, 6)], {"is_causal": 1}),
        ([f32(2, 6, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8), f32(2, 1, 4, 6) > -0.5], {}),
        ([f32(1, 1, 4, 8), f32(1, 1, 6, 8), f32(1, 1, 6, 8), np.arange(4).reshape(4, 1) + np.zeros(6) > 1], {}),
        (
            [f32(2, 3, 4, 8), f32(2, 3, 4, 8), f32(2, 3, 4, 8), None, f32(2, 3, 2, 8), f32(2, 3, 2, 8)],
            {"is_causal": 1},
        ),
        ([f32(2, 3, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8)], {"softmax_precision": TensorProto.DOUBLE}),
        (
            [f32(2, 3, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8), None, f32(2, 3, 2, 8), f32(2, 3, 2, 8)],
            {"outputs": 3},
        ),
        ([f32(2, 3, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8)], {"outputs": 4, "qk_matmul_output_mode": 0}),
        ([f32(2, 3, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8)], {"outputs": 4, "qk_matmul_output_mode": 3}),
    ],
)
def test_attention(inputs: list[np.ndarray | None], attributes: dict[str, Any], opset: int) -> None:
    check("Attention", inputs, opset, **attributes)


def test_attention_to_a_part_of_the_cache() -> None:
    qkv = [f32(2, 3, 4, 8), f32(2, 3, 6, 8), f32(2, 3, 6, 8)]
    check("Attention", [*qkv, None, None, None, np.array([6, 3], np.int64)], 24)


@pytest.mark.parametrize(
    ("inputs", "attributes"),
    [
        ([f32(2, 3, 4, 8), f32(10, 4), f32(10, 4), np.array([[0, 1, 2, 3], [4, 5, 6, 9]])], {}),
        ([f32(2, 3, 4, 8), f32(2, 4, 4), f32(2, 4, 4)], {}),
        ([f32(2, 3, 4, 8), f32(2, 4, 4), f32(2, 4, 4)], {"interleaved": 1}),
        ([f32(2, 4, 24), f32(2, 4, 4), f32(2, 4, 4)], {"num_heads": 3}),
        ([f32(2, 3, 4, 8), f32(2, 4, 2), f32(2, 4, 2)], {"rotary_embedding_dim": 4}),
    ],
)
def test_rotary_embedding(inputs: list[np.ndarray | None], attributes: dict[str, Any]) -> None:
    check("RotaryEmbedding", inputs, 23, **attributes)


def test_gradient_where_rows_attend_to_nothing() -> None:
    """Causal attention of shared heads in float64; a mask leaves row 1 nothing: its gradients are zero, none is NaN."""
    q, k, v = (GENERATOR.uniform(-1, 1, s) for s in ((2, 4, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4)))
    mask = np.ones((3, 3), bool)
    mask[1] = False
    feed = {"q": q, "k": k, "v": v, "mask": mask}
    declared = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feed.items()
    ]
    node = helper.make_node("Attention", list(feed), ["y"], is_causal=1)
    y = helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)
    model = helper.make_model(
        helper.make_graph([node], "one", declared, [y]), opset_imports=[helper.make_opsetid("", 23)]
    )
    block = rc.load(model).block
    check_gradient(block, feed, second_order=True)
