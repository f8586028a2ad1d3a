"""Generated loops and reductions for CUDA on the emulated device: every path by shape, halves, the same bits."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import cuda_cases
import numpy as np
import pytest
from cuda_cases import Bound, bound, check, compare
from zoo_cases import network

import recompute as rc
from recompute.compiling.compiler import compile_step
from recompute.language.element import HALVES, evaluate
from recompute.language.formulas import formula
from recompute.language.op import Op, op_class
from recompute.language.types import DTYPES, TensorType
from recompute.ops.fused.loop import Loop, loops
from recompute.runtime import EmulatedCUDAPlace
from recompute.runtime.cuda.code import parts as loop_parts
from recompute.runtime.cuda.device.kernel import Buffer, Launch
from recompute.runtime.cuda.kernels import loops as kernels_loops
from recompute.runtime.cuda.kernels import reduce as kernels_reduce
from recompute.runtime.cuda.loops.postpone import postponed
from recompute.testing import Case, Draw, all_ops, cases

pytestmark = cuda_cases.needs_device


@functools.cache
def device() -> Any:
    return cuda_cases.device()


def checked(*given: Case, units: float = 64) -> list[list[Bound]]:
    """Every case against NumPy, kernels compiled together."""
    runs = [bound(c, device()) for c in given]
    device().compile(k for r in runs for b in r for k in b.kernels)
    for case, r in zip(given, runs, strict=True):
        assert r, f"{case.op} runs on the host"
        check(case, r, units=units)
    return runs


def values(case: Case) -> list[np.ndarray]:
    """The outputs of the case alone."""
    (one, *_) = bound(case, device())
    device().compile(one.kernels)
    return one.run(0xFF)


# -- element by element -----------------------------------------------------------------------------------------------

CHAIN = Loop(body="%3 = Mul(%0, %1); %4 = Add(%3, %2); %5 = Relu(%4)", yields=(5,))


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_shapes_of_operands(dtype: str) -> None:
    """Vectors that end within a row and that do not, scalars, operands of one, of rows, of columns, of both."""
    draw = Draw(dtype)
    full = ("1027", "3,5,49", "3,5,48", "3,5,12", "2,3,4,8", "2,3,4,7", "1,1,16", "1", "4096")
    others = (("", ""), ("5,1", ""), ("5,1", "3,1,48"), ("5,1", "3,1,12"), ("3,1,8", "2,1,4,1"), ("3,1,7", "2,3,1,1"),
              ("16", "1"), ("1", "1"), ("4096", "1"))  # fmt: skip
    checked(*(
        Case(CHAIN, tuple(draw(f"{dtype}[{s}]") for s in (whole, *some)))
        for whole, some in zip(full, others, strict=True)
    ))  # fmt: skip


def test_two_vectors_of_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for large ones."""
    monkeypatch.setattr(kernels_loops, "_TWICE", 1)
    kernels_loops.plan.cache_clear()
    draw = Draw()
    add = op_class("Add")()
    checked(*(Case(add, (draw(f"f32[{s}]"), draw(f"f32[{t}]"))) for s, t in (("5000", "5000"), ("3,7,33", "7,1"))))
    checked(Case(op_class("Exp")(), (draw("bf16[3000]"),)))
    kernels_loops.plan.cache_clear()


def test_wide_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beyond 2^31 elements."""
    for module in (kernels_loops, kernels_reduce):
        monkeypatch.setattr(module, "WIDE", 1)
    draw = Draw()
    summed = Loop(body="%2 = Mul(%0, %1); %3 = ReduceSum(%2) {axes=[0,1], keepdims=0}", yields=(2, 3))
    checked(
        Case(CHAIN, (draw("f32[3,5,14]"), draw("f32[5,1]"), draw("f32[3,1,14]"))),
        Case(summed, (draw("f32[6,5,40]"), draw("f32[5,1]"))),
        Case(op_class("ReduceL2")(axes=(0, 2), keepdims=0), (draw("f32[6,5,40]"),)),
        Case(op_class("ReduceMax")(axes=(1, 3), keepdims=0), (draw("f32[3,5,4,10]"),)),
    )


def test_buffers_between_vectors() -> None:
    """Addresses at which no vector may be read: the same bits."""
    draw = Draw()
    for op, ins in (
        (CHAIN, ("f32[6,16]", "f32[16]", "f32[6,1]")),
        (op_class("ReduceSum")(axes=(0,)), ("f32[60,16]",)),
        (op_class("ReduceSumSquare")(axes=(0,)), ("f32[60,16]",)),
        (op_class("ReduceSumSquare")(axes=(1,)), ("f32[6,160]",)),
    ):
        case = Case(op, tuple(draw(t) for t in ins))
        aligned = values(case)
        (b, *_) = bound(case, device())
        types = [v.type for v in (*b.op.inputs, *b.op.outputs)]
        start, memory = device().allocate(sum(t.nbytes + 68 for t in types) + 64)
        at, buffers = start + 4, []
        for t in types:
            buffers.append(Buffer(at, t))
            at += -(-t.nbytes // 64) * 64 + 64
        count = len(b.op.inputs)
        for buffer, a in zip(buffers, case.inputs, strict=False):
            device().upload(buffer, a)
        for call in cuda_cases.provider(b.op.kernel).bind(b.op, buffers[:count], buffers[count:], []):
            device().prepare(call)()
        assert [device().download(x).tobytes() for x in buffers[count:]] == [a.tobytes() for a in aligned]
        del memory


def test_divisors() -> None:
    """Quotients of all sizes."""
    draw = random.Random(1)
    for _ in range(20_000):
        d = draw.choice((draw.randrange(1, 70), draw.randrange(1, 1 << draw.randrange(1, 32)), 1 << draw.randrange(31)))
        n = draw.choice((draw.randrange(1 << 31), (1 << 31) - 1, min(d * draw.randrange(1, 99), (1 << 31) - 1)))
        by = loop_parts.divisor(d, wide=False)
        for m in (n, max(n - 1, 0)):
            product = (m * by.times >> 32) + m
            assert product < 1 << 32
            assert product >> by.shift == m // d, (m, d)


# -- halves -----------------------------------------------------------------------------------------------------------


def in_halves(case: Case, half: str) -> Case | None:
    """The case with its floats in halves; None where the operator does not take them, or no loop does."""

    def turned(i: int, a: np.ndarray | None) -> np.ndarray | None:
        if a is None or TensorType.of(a).dtype not in ("f32", "f64") or i in case.op.updates[1:]:
            return a if a is None or a.dtype != np.float64 else a.astype(np.float32)
        with np.errstate(over="ignore"):
            return a.astype(DTYPES[half])

    made = dataclasses.replace(case, inputs=tuple(turned(i, a) for i, a in enumerate(case.inputs)))
    try:
        op = cuda_cases.operator(made)
    except Exception:
        return None
    return made if loops(op, device=True) and any(v.dtype == half for v in (*op.reads(), *op.writes())) else None


@pytest.mark.parametrize("half", HALVES)
def test_halves_round_once(half: str) -> None:
    """Every operator computes halves in f32 and rounds its results: two units at most, where functions differ."""
    found = {}
    for cls in all_ops():
        for case in cases(cls):
            large = sum(a.size for a in case.inputs if a is not None) > 10_000
            if not large and cls is not Loop and (made := in_halves(case, half)) is not None:
                found.setdefault(cls.__name__, made)
    assert len(found) > 60
    if half == "f16":
        found = dict(list(found.items())[::4])
    runs = {name: bound(case, device())[:1] for name, case in found.items()}
    device().compile(k for r in runs.values() for b in r for k in b.kernels)
    for name, (b,) in runs.items():
        case = found[name]
        got = b.run(0xFF)
        exprs = formula(case.op, tuple(None if a is None else TensorType.of(a).dtype for a in case.inputs))
        if exprs is None:
            continue  # a column sum
        want = evaluate([x for x in exprs if x is not None], case.inputs)
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            units = 2 if TensorType.of(g).dtype in HALVES else 64
            compare(g, np.broadcast_to(w, g.shape), units, f"{name}, output {i}, in {half}")


@pytest.mark.parametrize("half", HALVES)
def test_loops_of_halves_have_their_operators_bits(half: str) -> None:
    """A member's result is rounded as if it had been in memory."""
    draw = Draw(half)
    x, y = draw(f"{half}[37,40]", -4, 4), draw(f"{half}[40]")
    body = '%2 = Mul(%0, %1); %3 = Sigmoid(%2); %4 = Sub(%3, %0); %5 = Cast(%4) {to="f32"}; %6 = Exp(%5)'
    fused = values(Case(Loop(body=body, yields=(4, 6)), (x, y)))
    ops: dict[str, Op] = {n: op_class(n)() for n in ("Mul", "Sigmoid", "Sub", "Exp")}
    (product,) = values(Case(ops["Mul"], (x, y)))
    (gate,) = values(Case(ops["Sigmoid"], (product,)))
    (rest,) = values(Case(ops["Sub"], (gate, x)))
    (wide,) = values(Case(op_class("Cast")(to="f32"), (rest,)))
    (last,) = values(Case(ops["Exp"], (wide,)))
    assert [a.tobytes() for a in fused] == [rest.tobytes(), last.tobytes()]


def test_updates_of_halves() -> None:
    """State in f32, the parameter in bf16; scalars from the device."""
    draw = Draw()
    w, g, m, v = (draw(f"{t}[33,70]", 0.5, 1) for t in ("bf16", "bf16", "f32", "f32"))
    rate, step = np.array(0.01, np.float32), np.array(3, np.int64)
    checked(Case(op_class("AdamUpdate")(), (w, g, m, v, rate, step)))
    checked(Case(op_class("MomentumUpdate")(momentum=0.9, weight_decay=1e-4), (w, g, m, rate)))
    large = tuple(draw("f32[40001]", 0.5, 1) for _ in range(4))
    checked(Case(op_class("AdamUpdate")(), (*large, rate, step)))  # several vectors of a thread, in turn


# -- column sums ------------------------------------------------------------------------------------------------------

SUMS = Loop(
    body="%2 = Mul(%0, %1); %3 = ReduceSum(%2) {axes=[0], keepdims=0}; %4 = ReduceMean(%0) {axes=[0]}; %5 = Neg(%2)",
    yields=(3, 5, 4),
)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_column_sums(dtype: str) -> None:
    """Few and many rows and columns, one chunk and several, vectors and none, beside full outputs; none at all."""
    draw = Draw(dtype)
    shapes = ((1, 1), (7, 3), (700, 1), (300, 17), (130, 64), (65, 200), (1, 300), (2, 12), (0, 5), (5, 0), (2000, 8))
    checked(*(Case(SUMS, (draw(f"{dtype}[{r},{c}]"), draw(f"{dtype}[{c}]"))) for r, c in shapes))


def test_column_sums_have_the_same_bits_in_every_loop() -> None:
    """Alone, beside others, with operands of other sizes: rows and columns say in which order rows are added."""
    draw = Draw()
    x, y, mask = draw("f32[900,40]", -9, 9), draw("f32[900,1]"), draw.bools("900,40")
    alone = values(Case(op_class("ReduceSum")(axes=(0,), keepdims=0), (x,)))[0]
    summed = "ReduceSum(%0) {axes=[0], keepdims=0}"
    one = Loop(body=f"%2 = {summed}; %3 = Mul(%0, %1)", yields=(3, 2))
    two = Loop(body=f'%2 = Cast(%1) {{to="f64"}}; %3 = {summed}; %4 = Exp(%2)', yields=(3, 4))
    assert values(Case(one, (x, y)))[1].tobytes() == alone.tobytes()
    assert values(Case(two, (x, mask)))[0].tobytes() == alone.tobytes()
    exact = x.astype(np.float64).sum(0)
    assert np.abs(alone - exact).max() <= 2**-22 * np.abs(x).sum(0).max() / 16


def test_rows_of_several_dimensions() -> None:
    """Operands that vary along some of them, with and without columns."""
    draw = Draw()
    rows = "%4 = Sub(%0, %1); %5 = Mul(%4, %2); %6 = Add(%5, %3); %7 = ReduceSum(%6) {axes=[0,1,2], keepdims=0}"
    for c in (12, 7):
        columns = f"%8 = Expand(%3) {{shape=[3,4,5,{c}]}}; %9 = Exp(%8); %10 = Mul(%9, %6)"
        types = (f"f32[3,4,5,{c}]", "f32[4,1,1]", f"f32[3,1,5,{c}]", f"f32[{c}]")
        checked(Case(Loop(body=f"{rows}; {columns}", yields=(10, 7)), tuple(draw(t) for t in types)))


# -- other reductions -------------------------------------------------------------------------------------------------

KINDS = ("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp",
         "ReduceProd", "ReduceMax", "ReduceMin")  # fmt: skip
SHAPES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("9,3", (1,)), ("7,50", (1,)), ("3,2100", (1,)), ("1,40000", (1,)), ("40,6,7", (0, 2)), ("5,6,48", (1,)),
    ("3,900,9", (1,)), ("2,3,4,5", (1, 3)), ("2,3,4,5", (0, 2)), ("600,31", (0,)), ("3,0", (1,)), ("0,3", (1,)),
    ("4,4", ()), ("1,1", (0,)), ("2,3000,2,3", (1, 3)),
)  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_reductions(name: str) -> None:
    """Along the innermost dimensions, others, both; long and short, to one and to many; of nothing."""
    draw = Draw(name)
    cls = op_class(name)
    product = name == "ReduceProd"
    every = name in ("ReduceSum", "ReduceMax", "ReduceLogSumExp")
    shapes = SHAPES if every else SHAPES[::3]
    for dtype in ("f32", "bf16") if every else ("f32",):
        near = (0.999, 1.001) if product else (0.5, 1.5)
        checked(*(
            Case(cls(axes=axes, keepdims=0), (draw(f"{dtype}[{s}]", *near),)) for s, axes in shapes
        ), units=2000 if product else 64)  # fmt: skip


def test_reductions_of_integers() -> None:
    """They wrap."""
    draw = Draw()
    for name in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL1", "ReduceMean"):
        for dtype, low in (("i8", -9), ("u8", 0), ("i64", -9)):
            checked(Case(op_class(name)(axes=(low // 9,)), (draw.ints(f"{dtype}[7,33]", low, 20),)))
    checked(*(Case(op_class(f"Reduce{n}")(axes=(1,)), (draw.bools("7,33"),)) for n in ("Max", "Min")))


def test_nan_and_infinity() -> None:
    """NaN wins; where it is, is found; rows of infinities have their logarithms."""
    x = Draw()("f32[6,70]")
    x[1, 3] = x[1, 9] = np.nan
    x[2, :] = -np.inf
    x[3, 5] = np.inf
    x[4, 60:] = x[4].max() + 1
    for axis in (0, 1):
        checked(*(Case(op_class(n)(axes=(axis,)), (x,)) for n in ("ReduceMax", "ReduceMin", "ReduceLogSumExp")))
        checked(*(
            Case(op_class(n)(axis=axis, select_last_index=last), (x,)) for n in ("ArgMax", "ArgMin") for last in (0, 1)
        ))  # fmt: skip


def test_where_extremes_are() -> None:
    """Ties, integers, halves, long rows."""
    draw = Draw()
    checked(*(
        Case(op_class(n)(axis=axis, select_last_index=last), (x,))
        for n in ("ArgMax", "ArgMin") for last in (0, 1) for axis in (0, 1)
        for x in (draw.ints("i32[40,50]", 0, 9), draw.ints("bf16[3,9000]", 0, 30))
    ))  # fmt: skip


# -- updates together -------------------------------------------------------------------------------------------------


def test_updates_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch they have the bits that they have in launches of their own."""
    place = EmulatedCUDAPlace()
    after, names = [], []
    for large in (1 << 19, 0):
        monkeypatch.setattr(kernels_loops, "_LARGE", large)
        program, loss, feed = network("lenet")
        step = compile_step(program, loss, rc.Adam(learning_rate=0.01), place=place).program.clone()
        executor = rc.Executor(place)
        for _ in range(2):
            executor.run(step, feed, [loss])
        session = executor.session(step, [loss])
        names.append([c.kernel.name.split("_")[0] for s in session.steps for c in s.calls if isinstance(c, Launch)])
        after.append({k: a.tobytes() for k, a in step.data.items()})
    assert after[0] == after[1]
    assert names[0].count("many") >= 1
    assert names[1].count("many") == 0
    assert len(names[0]) < len(names[1])


def test_updates_wait_for_nobody_who_needs_their_buffers() -> None:
    """Whoever writes what they read, or reads what they write, comes behind them."""
    draw = Draw()
    case = Case(op_class("MomentumUpdate")(), (*(draw("f32[40]") for _ in range(3)), np.array(0.5, np.float32)))
    (launch,) = bound(case, device())[0].calls
    assert isinstance(launch, Launch)
    other: Any = dataclasses.replace(launch, part=None)

    def order(*steps: tuple[str, Any, list[int], list[int]]) -> list[str]:
        used = {n: ([place(i) for i in r], [place(i) for i in w]) for n, _, r, w in steps}
        found = postponed(((n, (c,)) for n, c, _, _ in steps), lambda n: used[n])  # type: ignore[misc,arg-type,index]
        return [f"{n}{'' if c else '-'}" for n, c in found]

    def place(i: int) -> Buffer:
        return Buffer(64 * i, TensorType("f32", (16,)))

    first, second = ("a", launch, [1, 2], [1]), ("b", launch, [3, 4], [3])
    assert order(first, ("x", other, [6], [7]), second) == ["x", "a-", "b"]
    assert order(first, ("x", other, [6], [2]), second) == ["a", "x", "b"]
    assert order(first, ("x", other, [1], [6]), second) == ["a", "x", "b"]
    assert order(first, ("x", other, [2], [6]), second, ("y", other, [3], [6])) == ["x", "a-", "b", "y"]
    assert order(first, ("b", launch, [1, 4], [4])) == ["a", "b"]
