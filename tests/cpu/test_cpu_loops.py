"""Generated loops: every element expression against NumPy, the same bits in every grouping, shape and split of work."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from kernel_cases import applied

from recompute.language.ir import Operator
from recompute.language.op import Op, op_class
from recompute.ops.fused import loop
from recompute.ops.fused.loop import Loop
from recompute.runtime.cpu.device import native
from recompute.runtime.cpu.device.native import Table
from recompute.runtime.cpu.providers.loops import LoopProvider, merged, plan_of
from recompute.testing import Case, all_ops, case_block, cases

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "native code runs here")
PROVIDER = LoopProvider()


def run(op: Operator, ins: list, outs: list | None = None) -> list:
    """The operator on its kernel; buffers hold garbage before."""
    outs = outs or [None if v is None else np.full(v.shape, 7, v.type.numpy) for v in op.outputs]
    scratch = [np.full(t.shape, 3, t.numpy) for t in PROVIDER.scratch(op)]
    Table(PROVIDER.bind(op, ins, outs, scratch)).run()
    return outs


def native_of(op: Op, *ins: np.ndarray) -> list[np.ndarray]:
    return run(applied(op, *ins), list(ins))


def numpy_of(op: Op, *ins: np.ndarray) -> list[np.ndarray]:
    a = applied(op, *ins)
    outs = [np.full(v.shape, 7, v.type.numpy) for v in a.outputs if v is not None]
    with np.errstate(all="ignore"):
        op.compute(list(ins), outs, [np.empty(t.shape, t.numpy) for t in a.workspace()])
    return outs


def sampled() -> list[tuple[str, Case]]:
    """For each operator its first sample, and the first in float32."""
    found = []
    for cls in all_ops():
        seen = set()
        for case in cases(cls):
            single = any(a is not None and a.dtype == np.float32 for a in case.inputs)
            key = (single, type(case.op) is Loop and case.op.body, sum(a is not None for a in case.inputs))
            if key not in seen:
                seen.add(key)
                found.append((cls.__name__, case))
    return found


def test_every_sample_agrees_with_its_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions in float32 err by 2.5 units, and what is made of several by a few more."""
    monkeypatch.setattr(loop, "SMALLEST", 0)
    tried = set()
    for name, case in sampled():
        block, _ = case_block(case)
        op = block.operators[0]
        if not PROVIDER.accepts(op):
            continue
        tried.add(name)
        results = []
        for numpy in (True, False):
            ins = [None if a is None else np.array(a) for a in case.inputs]
            outs = [None if v is None else np.full(v.shape, 7, v.type.numpy) for v in op.outputs]
            for i, j in enumerate(case.op.updates[: len(outs)]):
                outs[i] = ins[j]
            if numpy:
                with np.errstate(all="ignore"):
                    case.op.compute(ins, outs, [np.empty(t.shape, t.numpy) for t in op.workspace()])
            else:
                run(op, ins, outs)
            results.append(outs)
        sums = [m.sums for m in case.op.makers] if isinstance(case.op, Loop) else [False] * len(op.outputs)
        for wanted, got, summed in zip(*results, sums, strict=True):
            if wanted is not None and not summed:  # sums have a test of their own
                eps = float(np.finfo(wanted.dtype).eps) if wanted.dtype.kind == "f" else 0.0
                np.testing.assert_allclose(got, wanted, rtol=16 * eps, atol=8 * eps, err_msg=f"{name} {case.op}")
    assert tried >= {"Add", "Where", "Cast", "Gelu", "GeluGrad", "AdamUpdate", "Loop", "Pow", "Equal"}


FUNCTIONS = {
    "Exp": (np.exp, -80.0, 88.0, 1.5),
    "Log": (np.log, 1e-30, 1e30, 1.5),
    "Tanh": (np.tanh, -12.0, 12.0, 2.5),
    "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)), -80.0, 80.0, 2.5),
    "Softplus": (lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), -80.0, 80.0, 2.5),
    "Elu": (lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), -30.0, 5.0, 1.5),
    "Erf": (np.vectorize(math.erf), -5.0, 5.0, 5.5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_functions_are_close(name: str) -> None:
    exact, low, high, bound = FUNCTIONS[name]
    g = np.random.default_rng(0)
    x = g.uniform(low, high, 1 << 15).astype("f4")
    small = (np.exp(g.uniform(-40, 0, 1 << 15)) * min(high, 1.0)).astype("f4")
    x = np.concatenate([x, small, -small if low < 0 else small])
    (got,) = native_of(op_class(name)(), x)
    wanted = exact(x.astype("f8"))
    assert (np.abs(got - wanted) / np.spacing(np.abs(wanted).astype("f4")).astype("f8")).max() <= bound


def test_what_is_no_number_stays_so() -> None:
    x = np.resize(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], "f4"), 1 << 14)
    for name in ("Relu", "Exp", "Tanh", "Sigmoid", "Erf", "Softplus", "Gelu", "Neg", "Abs", "Relu6"):
        op = op_class(name)()
        np.testing.assert_array_equal(native_of(op, x)[0][:5], numpy_of(op, x)[0][:5], err_msg=name)
    y = np.roll(x, 1)
    for name in ("Max", "Min", "Add", "Less", "Equal"):
        np.testing.assert_array_equal(native_of(op_class(name)(), x, y)[0], numpy_of(op_class(name)(), x, y)[0])


CHAIN = "%3 = Mul(%0, %1); %4 = Add(%3, %2); %5 = Gelu(%4); %6 = Sigmoid(%5); %7 = Mul(%6, %4)"
SHAPES = [
    ((300, 70), (70,), ()),
    ((300, 70), (300, 1), (70,)),
    ((7, 5, 11, 80), (7, 1, 11, 80), (5, 1, 80)),
    ((3, 4, 40, 50), (4, 1, 1), (3, 1, 40, 1)),
    ((20000,), (20000,), (1,)),
    ((2, 9000), (2, 1), (2, 9000)),
    ((17000, 3), (3,), (17000, 1)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=[str(s[0]) for s in SHAPES])
def test_a_group_has_the_bits_of_its_members(shapes: tuple) -> None:
    g = np.random.default_rng(1)
    ins = [g.standard_normal(s).astype("f4") for s in shapes]
    known = dict(enumerate(ins))
    whole = Loop(body=CHAIN, yields=(3, 4, 5, 6, 7))
    for m in whole.members:
        (known[m.result],) = native_of(m.op, *(known[i] for i in m.inputs if i is not None))
    for y, got in zip(whole.yields, native_of(whole, *ins), strict=True):
        assert got.tobytes() == known[y].tobytes(), f"%{y}"


def test_bits_do_not_depend_on_where_an_element_lies() -> None:
    """Registers, rests, and pieces of work."""
    x = np.random.default_rng(2).standard_normal(50000).astype("f4") * 3
    for name in ("Gelu", "Tanh", "Exp", "Log", "Softplus"):
        (wanted,) = native_of(op_class(name)(), np.abs(x))
        for columns in (1, 3, 15, 17, 33, 4999):
            part = np.abs(x)[: 50000 // columns * columns].reshape(-1, columns)
            one = Loop(body=f"%2 = Add(%0, %1); %3 = {name}(%2)", yields=(3,))
            (got,) = native_of(one, part, np.zeros(columns, "f4"))
            assert got.tobytes() == wanted[: part.size].tobytes(), (name, columns)


def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    g = np.random.default_rng(3)
    op = Loop(
        body="%2 = Mul(%0, %1); %3 = Exp(%2); %4 = ReduceSum(%3) {axes=[0], keepdims=0}; "
        "%5 = ReduceMean(%2) {axes=[0], keepdims=0}",
        yields=(3, 4, 5),
    )
    ins = [g.standard_normal((1000, 1100)).astype("f4") for _ in range(2)]
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(native, "threads", lambda n=threads: n)
        results.append([a.tobytes() for a in native_of(op, *ins)])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("shape", [(1, 40000), (200, 100), (10000, 2), (20000, 1), (5, 6, 7, 130), (3000, 2100)])
def test_column_sums(shape: tuple[int, ...], dtype: str) -> None:
    """63 additions in the element type, the rest in double."""
    g = np.random.default_rng(4)
    x, v = g.standard_normal(shape).astype(dtype), g.standard_normal(shape[-1]).astype(dtype)
    axes = str(list(range(len(shape) - 1))).replace(" ", "")
    op = Loop(
        body=f"%2 = Sub(%0, %1); %3 = ReduceSum(%2) {{axes={axes}, keepdims=0}}; %4 = Mul(%2, %2); "
        f"%5 = ReduceMean(%4) {{axes={axes}}}",
        yields=(2, 3, 5),
    )
    out, total, mean = native_of(op, x, v)
    assert out.tobytes() == (x - v).tobytes()
    wide = (x - v).astype("f8").reshape(-1, shape[-1])
    bound = 64 * np.finfo(dtype).eps
    assert (np.abs(total - wide.sum(0)) <= bound * np.abs(wide).sum(0)).all()
    assert (np.abs(mean.reshape(-1) - (wide**2).mean(0)) <= bound * (wide**2).mean(0)).all()
    alone = native_of(op_class("ReduceSum")(axes=tuple(range(len(shape) - 1)), keepdims=0), x - v)
    assert alone[0].tobytes() == total.tobytes(), "a sum has the same bits alone"


def test_outputs_may_take_the_place_of_inputs() -> None:
    g = np.random.default_rng(5)
    op = Loop(body="%2 = Add(%0, %1); %3 = Mul(%0, %2); %4 = Tanh(%3)", yields=(3, 4))
    ins = [g.standard_normal((150, 333)).astype("f4") for _ in range(2)]
    wanted = native_of(op, *ins)
    for order in itertools.permutations(range(2)):
        given = [a.copy() for a in ins]
        run(applied(op, *given), given, [given[i] for i in order])
        assert [given[i].tobytes() for i in order] == [a.tobytes() for a in wanted]


def test_what_depends_on_columns_only_is_computed_once() -> None:
    op = op_class("ChannelsLastBatchNormApply")(epsilon=1e-5)
    g = np.random.default_rng(6)
    x, vectors = g.standard_normal((4, 9, 9, 64)).astype("f4"), [g.uniform(0.5, 1, 64).astype("f4") for _ in range(4)]
    found = plan_of(applied(op, x, *vectors))
    assert found.sizes == (324, 64)
    assert [str(e) for e in found.first.outputs] == ["div(%0, sqrt(add(%1, 9.999999747378752e-06)))"]
    np.testing.assert_allclose(native_of(op, x, *vectors)[0], numpy_of(op, x, *vectors)[0], rtol=1e-6, atol=1e-6)


def test_dimensions_are_merged() -> None:
    assert merged((4, 5, 6), [(4, 5, 6), (4, 5, 6)], last=False) == ((120,), [frozenset({0})] * 2)
    assert merged((4, 5, 6), [(4, 5, 6), (6,)], last=False)[0] == (20, 6)
    assert merged((4, 5, 6), [(4, 5, 6), (4, 1, 1)], last=False)[0] == (4, 30)
    assert merged((4, 1, 6), [(4, 1, 6), ()], last=False)[0] == (24,)
    assert merged((4, 5, 6), [(4, 5, 6)], last=True)[0] == (20, 6)
    assert merged((), [()], last=False)[0] == (1,)


def test_shapes_share_code() -> None:
    """Kernels are named by patterns, not by sizes."""
    op = Loop(body="%2 = Add(%0, %1); %3 = Relu(%2)", yields=(3,))
    nests = {
        plan_of(applied(op, np.zeros(s, "f4"), np.zeros(s[-1], "f4"))).nest.kernel()
        for s in ((300, 64), (9, 9, 256), (5000, 7))
    }
    assert len(nests) == 1


def test_loops_that_a_device_made_are_left_to_their_numerics() -> None:
    """Functions that have no vector code here."""
    op, x = Loop(body="%1 = Sin(%0); %2 = Neg(%1)", yields=(2,)), np.ones((200, 100), np.float32)
    assert not PROVIDER.accepts(applied(op, x))
    assert PROVIDER.accepts(applied(Loop(body=op.body.replace("Sin", "Tanh"), yields=(2,)), x))
