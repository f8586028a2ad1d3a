"""Which operators the kernels of "numba" take and which they leave to NumPy, and small shapes at the borders."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from kernel_cases import applied, native_provider
from test_cpu_rows import native_results, numpy_results

from recompute.language.op import op_class
from recompute.language.types import TensorType
from recompute.runtime.cpu import families
from recompute.runtime.cpu.device import jit, native
from recompute.runtime.cpu.families import ENOUGH
from recompute.runtime.cpu.kernels import reduce

pytestmark = pytest.mark.skipif(bool(jit.unavailable()), reason=jit.unavailable() or "there")

LOSS = {"reduction": "mean", "ignore_index": None}
MANY, FEW = -(-ENOUGH // 16), ENOUGH // 16 - 1


def make(name: str, **options: Any) -> Any:
    return op_class(name)(**options)


def zeros(types: str) -> list[np.ndarray | None]:
    found = [None if t == "_" else TensorType.parse(t) for t in types.split()]
    return [None if t is None else np.zeros(t.shape, t.numpy) for t in found]


TAKEN: list[tuple[Any, str, bool]] = [
    (make("Softmax"), "f32[5,2]", True),
    (make("Softmax"), "f32[5,1]", False),
    (make("Softmax"), "f16[5,2]", native.converts_float16()),
    (make("Softmax", axis=0), "f32[5,2]", False),
    (make("LayerNormalization"), "f32[3,2] f32[2]", True),
    (make("LayerNormalization"), "f32[3,1] f32[1]", False),
    (make("LayerNormalization"), "f16[3,2] f16[2]", native.converts_float16()),
    (make("GroupNormalization", num_groups=2), "f32[2,4,3] f32[4] f32[4]", True),
    (make("InstanceNormalization"), "f32[2,4,1] f32[4] f32[4]", False),
    (make("NormGrad", view=(2, 1, 2, 1)), "f32[2,2] f32[2] f32[2] f32[2] f32[2,2]", True),
    (make("NormGrad", view=(2, 2, 1, 1)), "f32[2,2] f32[2] f32[4] f32[4] f32[2,2]", False),
    (make("ReduceSum", axes=(1,)), "f32[2,3,16]", True),
    (make("ReduceSum", axes=(1,)), "f32[2,3,15]", False),
    (make("ReduceSum", axes=(2,)), "f32[2,3,15]", True),
    (make("ReduceSum", axes=(0, 2)), "f32[2,3,4,5]", False),
    (make("ReduceSum", axes=(0, 2)), "f32[2,3,4]", True),
    (make("ReduceSum", axes=(0, 2)), "f32[2,1,16]", True),
    (make("ReduceSum", axes=(1,)), "f32[2,0,16]", False),
    (make("ReduceSum", axes=(1,)), "f16[2,3,16]", False),
    (make("ReduceMax", axes=(0,)), "f64[2,16]", True),
    (make("SoftmaxCrossEntropyLoss", **LOSS), "f32[2,3] i64[2]", True),
    (make("SoftmaxCrossEntropyLoss", **LOSS), "f32[2,3,2] i64[2,2]", False),
    (make("SoftmaxCrossEntropyLoss", **LOSS), "f16[2,3] i64[2]", False),
    (make("SoftmaxCrossEntropyLoss", **LOSS), "f32[2,0] i64[2]", False),
    (make("NegativeLogLikelihoodLoss", **LOSS), "f32[2,3,2] i64[2,2]", True),
    (make("Dropout"), "f32[2] i64[]", True),
    (make("Dropout"), "f16[2] i64[]", False),
    (make("GatherGrad", shape=(9, 32)), "i64[5] f32[5,32]", True),
    (make("GatherGrad", shape=(9, 31)), "i64[5] f32[5,31]", False),
    (make("GatherGrad", shape=(9, 32)), "i64[5] f16[5,32]", False),
    (make("ChannelsLastMaxPool", kernel_shape=(2, 2)), "f32[4,30,30,16]", False),
    (make("ChannelsLastGlobalAveragePool"), "f32[4,30,30,16]", True),
    (make("ChannelsLastGlobalAveragePool"), "f16[4,30,30,16]", False),
    (make("ChannelsLastAveragePool", kernel_shape=(2, 2, 2)), "f32[4,9,9,9,16]", True),
    (make("ChannelsLastAveragePool", kernel_shape=(2, 2, 1, 1)), "f32[4,9,9,3,3,16]", False),
    (make("ChannelsLastAveragePool", kernel_shape=(2, 2)), "f32[4,9,9,16]", True),
]  # fmt: skip
#: the same where the number of elements counts
LARGE: list[tuple[Any, str, bool]] = [
    (make("RandomUniform", shape=(ENOUGH,)), "i64[]", True),
    (make("RandomUniform", shape=(ENOUGH - 1,)), "i64[]", False),
    (make("RandomUniform", shape=(ENOUGH,), dtype="f64"), "i64[]", False),
    (make("Bernoulli", dtype="bool"), f"f32[{ENOUGH}] i64[]", True),
    (make("Bernoulli", dtype="bool"), f"f32[{ENOUGH - 1}] i64[]", False),
    (make("Bernoulli", dtype="f16"), f"f32[{ENOUGH}] i64[]", False),
    (make("Bernoulli", dtype="f32"), f"f16[{ENOUGH}] i64[]", False),
    (make("Gather"), f"f32[9,16] i64[{MANY}]", True),
    (make("Gather"), f"f32[9,16] i64[{FEW}]", False),
    (make("Gather"), f"f32[9,15] i64[{2 * MANY}]", False),
    (make("Gather", axis=1), f"f32[9,16] i64[{MANY}]", False),
    (make("GatherElements", axis=1), f"f32[16,9] i64[16,{MANY}]", True),
    (make("GatherElements", axis=1), f"i64[16,9] i64[16,{MANY}]", True),
    (make("GatherElements", axis=1), f"f32[16,9] i64[16,{FEW}]", False),
    (make("GatherElements", axis=1), f"f32[17,9] i64[16,{MANY}]", True),
    (make("GatherElementsGrad", shape=(16, 9), axis=1), f"i64[16,{MANY}] f32[16,{MANY}]", True),
    (make("GatherElementsGrad", shape=(16, 9), axis=1), f"i64[16,{MANY}] f16[16,{MANY}]", False),
    (make("Concat", axis=1), f"f32[16,{MANY}] f32[16,1]", True),
    (make("Concat", axis=1), f"f32[16,{FEW - 1}] f32[16,1]", False),
    (make("Pad", pads=(1, 1)), f"f32[{ENOUGH}]", True),
    (make("Pad", pads=(1, 1), mode="reflect"), f"f32[{ENOUGH}]", False),
    (make("Fill", dtype="i8", shape=(ENOUGH,)), "", True),
    (make("Fill", dtype="i8", shape=(ENOUGH - 1,)), "", False),
    (make("Slice", starts=(0,) * 4, ends=(9, 9, 9, 99), axes=(0, 1, 2, 3), steps=(2,) * 4), "f32[9,9,9,99]", True),
    (make("Slice", starts=(0,) * 5, ends=(3,) * 5, axes=(0, 1, 2, 3, 4), steps=(2,) * 5), "f32[9,9,9,9,9]", False),
]  # fmt: skip


def short(x: object) -> str | None:
    return x.name if hasattr(x, "name") else None if isinstance(x, tuple) else str(x)


def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for however few elements."""
    for module in [families, *(sys.modules[type(f).__module__] for f in families.FAMILIES.table().values())]:
        monkeypatch.setattr(module, "ENOUGH", 0, raising=False)


@pytest.mark.parametrize(("op", "types", "taken"), TAKEN, ids=short)
def test_what_is_taken(op: Any, types: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    all_sizes(monkeypatch)
    assert (native_provider(applied(op, *zeros(types))) is not None) is taken


@pytest.mark.parametrize(("op", "types", "taken"), LARGE, ids=short)
def test_what_is_enough(op: Any, types: str, taken: bool) -> None:
    assert (native_provider(applied(op, *zeros(types))) is not None) is taken


G = np.random.default_rng(3)


def draw(*shape: int) -> np.ndarray:
    return G.standard_normal(shape)


@pytest.mark.parametrize(
    ("op", "inputs", "want"),
    [
        (make("GroupNormalization", num_groups=2), (draw(3, 6, 2) + 1, draw(6), draw(6)), None),
        (make("GroupNormalization", num_groups=3), (draw(2, 6, 5), draw(6), draw(6)), 1),
        (make("InstanceNormalization"), (draw(3, 4, 2) + 1, draw(4), draw(4)), None),
        (make("NormGrad", view=(3, 2, 3, 2)), (draw(3, 6, 2), draw(6), draw(6), draw(6) ** 2, draw(3, 6, 2)), None),
        (make("NormGrad", view=(3, 2, 3, 2)), (draw(3, 6, 2), draw(6), None, draw(6) ** 2, draw(3, 6, 2)), None),
        (make("NormGrad", view=(130, 2, 3, 1)), (draw(130, 6), draw(6), draw(260), draw(260) ** 2, draw(130, 6)), None),
        (make("NormGrad", view=(1, 1, 3, 1)), (draw(1, 3), draw(3), draw(1), draw(1) ** 2, draw(1, 3)), None),
        (make("Softmax"), (draw(3, 2) * 30,), None),
        (make("Softmax"), (draw(1, 5),), None),
        (make("LogSoftmax"), (draw(3, 2) * 30,), None),
        (make("ChannelsLastSoftmaxCrossEntropyLoss", **LOSS), (draw(2, 3, 1), np.zeros((2, 3), np.int64)), None),
        (make("ChannelsLastSoftmaxCrossEntropyLoss", **LOSS), (draw(2, 3, 4), np.ones((2, 3), np.int64)), None),
        (make("SoftmaxGrad"), (abs(draw(3, 2)), draw(3, 2)), None),
        (make("LogSoftmaxGrad"), (-abs(draw(3, 2)), draw(3, 2)), None),
        *[(make(f"Reduce{kind}", axes=axes, keepdims=keep), (draw(*shape),), None)
          for kind in ("Sum", "Mean", "SumSquare", "L2", "Max", "Min")
          for axes, keep, shape in (
              ((0,), 1, (2, 17)), ((1,), 0, (2, 65, 16)), ((0, 2), 1, (3, 4, 5)), ((0, 2), 1, (3, 64, 5)),
              ((0,), 1, (65, 16)), ((1,), 0, (3, 7, 1200)),
              ((1,), 1, (1, 300)), ((0,), 0, (130, 2049)), ((0, 1), 1, (7, 3)), ((1,), 0, (2, 129, 16)),
              ((0,), 0, (17000,)), ((1,), 1, (2, 40000)), ((0, 2), 0, (3, 2, 30000)),
          )],
    ],
    ids=short,
)  # fmt: skip
def test_corners(op: Any, inputs: Any, want: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where the sums' orders hardly matter."""
    all_sizes(monkeypatch)
    for got, expected in zip(native_results(op, inputs, want), numpy_results(op, inputs, want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dims", [(1, 9), (2, 2), (9, 1), (5, 7)])
@pytest.mark.parametrize("name", ["ChannelsLastAveragePool", "ChannelsLastMaxPool"])
@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 0, 0, 1)])
def test_corners_of_pools(name: str, dims: tuple[int, int], pads: tuple[int, ...], monkeypatch: Any) -> None:
    """One window in an axis, edges on one side, windows of unlike counts."""
    all_sizes(monkeypatch)
    window = {"kernel_shape": tuple(min(2, d) for d in dims), "strides": (2, 1), "pads": pads}
    x = draw(2, *dims, 3)
    op = make(name, **window)
    both = (native_results, numpy_results) if "Average" in name else (pooled, pooled_own)
    y, want = (run(op, (x,), 1)[0] for run in both)
    np.testing.assert_allclose(y, want, rtol=1e-13)
    if "Average" in name:
        grad = make(f"{name}Grad", shape=dims, **window)
        dy = draw(*y.shape)
        np.testing.assert_allclose(native_results(grad, (dy,))[0], numpy_results(grad, (dy,))[0], rtol=1e-13)


def pooled(op: Any, inputs: Any, want: int) -> list[np.ndarray]:
    from test_cpu_pooling import run

    return run(applied(op, *inputs, absent=(1,)), *inputs)


def pooled_own(op: Any, inputs: Any, want: int) -> list[np.ndarray]:
    from test_cpu_pooling import run

    return run(applied(op, *inputs, absent=(1,)), *inputs, own=True)


@pytest.mark.parametrize(
    ("axes", "shape", "seen"),
    [
        ((0, 2), (4, 1, 5), (False, (1, 1, 20))),
        ((1,), (4, 1, 5), (True, (1, 1, 20))),
        ((0, 1), (1, 1), (True, (1, 1, 1))),
        ((2,), (4, 1, 5), (False, (1, 4, 5))),
        ((1,), (4, 3, 1, 5), (True, (4, 3, 5))),
    ],
)
def test_reduced_axes_of_one_element_are_no_groups(axes: tuple[int, ...], shape: tuple[int, ...], seen: Any) -> None:
    assert reduce.form(applied(make("ReduceSum", axes=axes), np.zeros(shape, np.float32))) == seen


@pytest.mark.parametrize("name", ["ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare", "ReduceMax", "ReduceMin"])
def test_reductions_over_axes_of_one_element(name: str) -> None:
    """The operator's numerics, by a kernel: a library has no others."""
    op, x = make(name, axes=(1,), keepdims=0), np.linspace(-3, 3, 128 * 256, dtype="f4").reshape(128, 1, 256)
    np.testing.assert_array_equal(native_results(op, [x])[0], numpy_results(op, [x])[0])


@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_reduced_sums_of_many_are_as_good_as_their_parts(axes: tuple[int, ...]) -> None:
    """Columns of many rows are summed in parts, rows that are many each at once; parts are added in float64."""
    x = np.full((50_000, 16) if axes == (0,) else (600, 40), np.float32(0.1))
    op = make("ReduceSum", axes=axes, keepdims=0)
    o = applied(op, x)
    family = families.FAMILIES.table()["ReduceSum"]
    scratch = family.scratch(o)
    assert [t.shape for t in scratch] == ([(1, families.PARTS, 16)] * 2 if axes == (0,) else [(600, 1)])
    spare, y = [np.zeros(t.shape, t.numpy) for t in scratch], np.zeros(o.outputs[0].shape, np.float32)  # type: ignore[union-attr]
    assert len(family.bind(o, [x], [y], spare)) == 2
    (out,) = native_results(op, (x,))
    exact = x.sum(axis=axes, dtype=np.float64)
    assert (np.abs(out - exact) <= 64 * 2**-24 * exact).all()  # a block of 64 rows is summed in float32


def test_rows_added_beside_the_table_they_come_from_index() -> None:
    """Elsewhere than in the table, which is copied first."""
    x, dy = np.arange(ENOUGH, dtype=np.float32).reshape(-1, 32), np.ones((2, 32), np.float32)
    indices = np.array([3, 3])
    op = make("AddRows")
    for got, want in zip(native_results(op, (x, indices, dy)), numpy_results(op, (x, indices, dy)), strict=True):
        assert got.tobytes() == want.tobytes()
