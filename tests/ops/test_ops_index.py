"""Shape and indexing operators against ONNX Runtime (or ONNX's reference): one-node models, imported and run."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import recompute as rc

GENERATOR = np.random.default_rng(5)


def f32(*shape: int) -> np.ndarray:
    return GENERATOR.uniform(-1, 1, shape).astype(np.float32)


def i64(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def one_node(
    op_type: str, inputs: list[Any], outputs: int = 1, opset: int = 18, data: tuple[int, ...] = (0,), **attributes: Any
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node and its feed; inputs not in `data` are initializers, None ones are absent."""
    names = [f"x{i}" if a is not None else "" for i, a in enumerate(inputs)]
    outs = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op_type, names, outs, **attributes)
    feed = {f"x{i}": inputs[i] for i in data}
    constants = [onnx.numpy_helper.from_array(a, n) for n, a in zip(names, inputs, strict=True) if n and n not in feed]
    declared = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feed.items()
    ]
    results = [helper.make_tensor_value_info(o, TensorProto.UNDEFINED, None) for o in outs]
    graph = helper.make_graph([node], "one", declared, results, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    inferred = onnx.shape_inference.infer_shapes(model)
    return inferred, feed


def reference(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What ONNX Runtime gives, or ONNX's reference evaluator where it has no kernel."""
    missing = False
    try:
        import onnxruntime

        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, feed)
    except ImportError:
        missing = True
    except Exception as e:
        if "NOT_IMPLEMENTED" not in str(e) and "opset" not in str(e).lower():
            raise
    from onnx.reference import ReferenceEvaluator

    try:
        return ReferenceEvaluator(model).run(None, feed)
    except ValueError as e:  # it refuses some of what ONNX allows
        if not missing:
            raise
        pytest.skip(f"without ONNX Runtime there is no reference: {e}")


def check(op_type: str, inputs: list[Any], rtol: float = 0.0, atol: float = 0.0, **options: Any) -> None:
    """Ours equals the reference, shape and element type included."""
    model, feed = one_node(op_type, inputs, **options)
    expected = reference(model, feed)
    program = rc.load(model)
    got = rc.Executor().run(program, feed, [o.name for o in model.graph.output])
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape and g.dtype == e.dtype
        np.testing.assert_allclose(g, e, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes"),
    [
        ("Squeeze", [f32(1, 3, 1)], {}),
        ("Squeeze", [f32(1, 3, 1), i64(-1)], {}),
        ("Unsqueeze", [f32(2, 3), i64(0, -1)], {}),
        ("Flatten", [f32(2, 3, 4)], {}),
        ("Flatten", [f32(2, 3, 4)], {"axis": 0}),
        ("Flatten", [f32(2, 3, 4)], {"axis": -1}),
        ("CastLike", [f32(2, 3), i64(1)], {}),
        ("Split", [f32(5, 3)], {"num_outputs": 2, "outputs": 2}),
        ("Split", [f32(6, 3)], {"num_outputs": 3, "outputs": 3}),
        ("Split", [f32(2, 3), i64(1, 2)], {"axis": -1, "outputs": 2}),
        ("Split", [f32(2, 3), i64(1, 2)], {"axis": 1, "outputs": 2, "opset": 13}),
        ("Split", [f32(2, 4)], {"axis": 1, "outputs": 2, "opset": 13}),
        ("Split", [f32(4, 3)], {"split": [1, 3], "outputs": 2, "opset": 11}),
        ("Slice", [f32(5, 6), i64(1, -1), i64(9, -7), i64(0, 1), i64(2, -2)], {}),
        ("Slice", [f32(5, 6), i64(1), i64(2**63 - 1)], {}),
        ("Slice", [f32(5, 6), i64(2**63 - 1), i64(-(2**63)), i64(1), i64(-1)], {}),
        ("Slice", [f32(5, 6)], {"starts": [1], "ends": [-1], "axes": [1], "opset": 9}),
        ("Pad", [f32(2, 3), i64(1, 0, 0, 2)], {}),
        ("Pad", [f32(2, 3), i64(1, -1, 0, 2), np.float32(2.5)], {}),
        ("Pad", [f32(2, 5, 5), i64(2, 1, 1, 3), None, i64(1, -1)], {"mode": "reflect"}),
        ("Pad", [f32(2, 3), i64(1, 4, 2, 4)], {"mode": "edge"}),
        ("Pad", [f32(2, 3), i64(1, 2, 2, 1)], {"mode": "wrap", "opset": 19}),
        ("Pad", [f32(2, 3)], {"pads": [0, 1, 1, 0], "value": 3.0, "opset": 7}),
        ("Tile", [f32(2, 3), i64(2, 3)], {}),
        ("Gather", [f32(4, 3), i64(1, -1, 1)], {}),
        ("Gather", [f32(4, 3), np.array(2, np.int64)], {"axis": 1}),
        ("Trilu", [f32(4, 3)], {}),
        ("Trilu", [f32(2, 4, 3), np.array(-1, np.int64)], {"upper": 0}),
        ("Concat", [f32(2, 3), f32(2, 2)], {"axis": -1, "data": (0, 1)}),
        ("Concat", [f32(2, 3)], {"axis": 0}),
        ("TopK", [f32(3, 7), i64(3)], {"outputs": 2}),
        ("TopK", [f32(3, 7), i64(2)], {"axis": 0, "largest": 0, "outputs": 2}),
        ("EyeLike", [f32(3, 4)], {"k": 1}),
        ("EyeLike", [f32(3, 4)], {"k": -1, "dtype": TensorProto.INT64}),
    ],
)  # fmt: skip
def test_against_reference(op_type: str, inputs: list[Any], attributes: dict[str, Any]) -> None:
    check(op_type, inputs, **attributes)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes"),
    [
        ("Gather", [f32(4, 3), np.array([[1, -1], [3, 3]], np.int32)], {}),
        ("GatherElements", [f32(4, 3), np.array([[1, -1, 2], [0, 0, -4]])], {"axis": 0}),
        ("GatherElements", [f32(4, 3), np.array([[1, -1, 2, 0], [0, 0, 2, 1]])], {"axis": -1}),
        ("GatherND", [f32(4, 3), np.array([[1, -1], [3, 2]])], {}),
        ("GatherND", [f32(2, 3, 4), np.array([[[1], [0]], [[-1], [2]]])], {"batch_dims": 1}),
        ("OneHot", [i64(0, 2, -1, 7), i64(4).reshape(()), f32(2)], {"axis": 0, "data": (0,)}),
        ("OneHot", [np.array([[0, 2], [5, 1]]), i64(4).reshape(()), i64(0, 3)], {"axis": 1, "data": (0,)}),
        ("ReverseSequence", [f32(4, 3, 2), i64(4, 1, 2)], {}),
        ("ReverseSequence", [f32(3, 4), i64(4, 1, 2)], {"batch_axis": 0, "time_axis": 1}),
    ],
)
def test_indices_as_data(op_type: str, inputs: list[Any], attributes: dict[str, Any]) -> None:
    check(op_type, inputs, **{"data": tuple(range(2)), **attributes})


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter(reduction: str) -> None:
    rows = np.array([[0, 3], [1, 2]]) if reduction == "none" else np.array([[0, 0], [1, -1]])
    check("ScatterElements", [f32(2, 4), rows, f32(2, 2)], axis=1, reduction=reduction, data=(0, 1, 2))
    rows = np.array([[2], [0]]) if reduction == "none" else np.array([[0], [0]])
    check("ScatterND", [f32(3, 2), rows, f32(2, 2)], reduction=reduction, data=(0, 1, 2))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(2, 3), (3, 4)]),
        ("ij,jk", [(2, 3), (3, 4)]),
        ("ba,cb", [(2, 3), (4, 2)]),
        ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("bqhd,bkhd->bhqk", [(2, 4, 3, 5), (2, 6, 3, 5)]),
        ("bhqk,bkhd->bqhd", [(2, 3, 4, 6), (2, 6, 3, 5)]),
        ("...ij,...jk->...ik", [(2, 1, 3, 4), (2, 5, 4, 2)]),
        ("...ij->...ji", [(2, 3, 4)]),
        ("ij->", [(2, 3)]),
        ("ij->j", [(2, 3)]),
        ("i,j->ij", [(2,), (3,)]),
        ("i,i->", [(3,), (3,)]),
        ("ijk,ijk->ijk", [(2, 3, 4), (2, 3, 4)]),
        ("ij,k->i", [(2, 3), (4,)]),
        ("abc,cd,de->abe", [(2, 3, 4), (4, 5), (5, 2)]),
        ("bld,dhk->blhk", [(2, 3, 4), (4, 2, 3)]),
        ("b i d , b j d -> b i j", [(2, 3, 4), (2, 5, 4)]),
        ("ii->i", [(3, 3)]),
        ("bii->b", [(2, 3, 3)]),
    ],
)
def test_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    inputs = [f32(*s) for s in shapes]
    check("Einsum", inputs, equation=equation, data=tuple(range(len(inputs))), rtol=1e-5, atol=1e-6)


def test_index_out_of_range() -> None:
    model, feed = one_node("Gather", [f32(4, 3), i64(1, 4)], data=(0, 1))
    with pytest.raises(rc.JobError, match=r"Gather: index 4 is out of range for 4 entries"):
        rc.Executor().run(rc.load(model), feed, ["y0"])


def test_embedding_gradient_adds_repeated_rows() -> None:
    from recompute.ops.indexing.gather import GatherGrad

    indices, dy = GENERATOR.integers(0, 50, (8, 16)), f32(8, 16, 128)
    got, expected = np.empty((50, 128), np.float32), np.zeros((50, 128), np.float32)
    GatherGrad(shape=(50, 128)).compute((indices, dy), (got,), ())
    np.add.at(expected, indices.reshape(-1), dy.reshape(-1, 128))
    assert got.tobytes() == expected.tobytes()


def test_what_is_unknown_is_named() -> None:
    model, _ = one_node("Trilu", [f32(3, 3), np.array(1, np.int64)], data=(0, 1))
    with pytest.raises(rc.ModelError, match=r"\(Trilu\): its diagonal k \(input 1\) is computed from data"):
        rc.load(model)


@pytest.mark.parametrize(
    ("name", "options", "types", "why"),
    [
        ("Gather", {}, "f32[4,3] f32[2]", "indices must be i64 or i32"),
        ("Gather", {"axis": 2}, "f32[4,3] i64[2]", "axis 2"),
        ("Gather", {"axis": 1}, "f32[4,0] i64[2]", "there is nothing to take"),
        ("GatherGrad", {"shape": (4, 3)}, "f32[2] f32[2,3]", "indices must be i64 or i32"),
        ("GatherGrad", {"shape": (4, 3)}, "i64[2] f32[3,3]", "is not the gradient of Gather on [4, 3]"),
        ("GatherGrad", {"shape": (4, 3), "axis": 1}, "i64[2] f32[2,3]", "is not the gradient of Gather on [4, 3]"),
    ],
)
def test_gather_refuses(name: str, options: dict[str, Any], types: str, why: str) -> None:
    from recompute.language.op import op_class

    with pytest.raises(rc.errors.TypeRuleError) as e:
        op_class(name)(**options).infer(*map(rc.TensorType.parse, types.split()))
    assert why in str(e.value)


@pytest.mark.parametrize(
    ("name", "options", "types", "made", "scratch"),
    [
        ("Gather", {"axis": -1}, "f32[4,3] i64[2,5]", "f32[4,2,5]", ""),
        ("Gather", {}, "f32[0,3] i32[0]", "f32[0,3]", "i64[0]"),
        ("Gather", {}, "f32[4] i64[]", "f32[]", ""),
        ("GatherGrad", {"shape": (4, 3), "axis": 1}, "i32[2] f32[4,2]", "f32[4,3]", "i64[2]"),
        ("GatherGrad", {"shape": (4, 3)}, "i64[2] f16[2,3]", "f16[4,3]", "f32[4,3]"),
        ("GatherGrad", {"shape": (4, 3)}, "i32[2] bf16[2,3]", "bf16[4,3]", "i64[2] f32[4,3]"),
        ("GatherGrad", {"shape": (4, 3)}, "i64[2] f64[2,3]", "f64[4,3]", ""),
    ],
)
def test_gather_types(name: str, options: dict[str, Any], types: str, made: str, scratch: str) -> None:
    from recompute.language.op import op_class

    op, ins = op_class(name)(**options), [rc.TensorType.parse(t) for t in types.split()]
    outs = op.infer(*ins)
    assert [*map(str, outs)] == [made] and [*map(str, op.scratch(ins, outs))] == scratch.split()


def test_half_precision_rows_are_added_in_float32() -> None:
    from recompute.language.op import op_class
    from recompute.testing import Case, case_block, evaluate

    dy = np.full((3000, 2), 1.0, np.float16)
    block, feed = case_block(Case(op_class("GatherGrad")(shape=(3, 2)), (np.full(3000, -1), dy)))
    np.testing.assert_array_equal(evaluate(block, feed)[0], [[0, 0], [0, 0], [3000, 3000]])
