"""Recurrent operators for CUDA, on the emulated device: sizes, optional operands and types that the samples lack."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from cuda_cases import Bound, opened, operator

import recompute as rc
from recompute.language.kernels import provider
from recompute.language.types import DTYPES, TensorType
from recompute.ops.recurrent.gru import GRU
from recompute.ops.recurrent.lstm import LSTM
from recompute.ops.recurrent.rnn import RNN
from recompute.ops.recurrent.shared import GRADIENTS, filled
from recompute.runtime.cuda.code import resident
from recompute.runtime.cuda.device.kernel import Buffer, Kernel, Launch, Product
from recompute.runtime.cuda.providers import cuda_tf32
from recompute.testing import Case, Draw, case_block

#: where the tests run
DEVICE: list[Any] = []
STEPS, BATCH, FEATURES = 5, 4, 3
OPS = [LSTM, GRU, lambda n, d: GRU(n, d, 1), RNN, lambda n, d: RNN(n, d, "Relu"), lambda n, d: RNN(n, d, "Sigmoid")]
DIRECTIONS = ("forward", "reverse", "bidirectional")


@pytest.fixture(autouse=True)
def device(cuda: Any) -> None:
    """Opens the place that all of a test runs on."""
    DEVICE[:] = [opened(cuda)]


def inputs(op: Any, optional: set[int], steps: int = STEPS, batch: int = BATCH) -> list[Any]:
    """Float64; those of the optional ones that are wanted."""
    draw = Draw(str(op))
    d, h, g = op.directions, op.hidden_size, op.gates * op.hidden_size
    shapes = [(steps, batch, FEATURES), (d, g, FEATURES), (d, g, h), (d, 2 * g), None, (d, batch, h), (d, batch, h)]
    shapes.append((d, 3 * h))
    found: list[Any] = []
    for i, shape in enumerate(shapes[: op.arity]):
        if i > 2 and i not in optional:
            found.append(None)
        elif shape is None:
            found.append(np.array([steps, 1, max(steps - 2, 1), 2, *range(batch)], np.int32)[:batch])
        else:
            found.append(draw(f"f64[{','.join(map(str, shape))}]"))
    return found


def computed(op: Any, arrays: list[Any], want: int | None = None) -> list[np.ndarray]:
    """NumPy's numerics."""
    types = [None if a is None else TensorType.of(a) for a in arrays]
    outs = [np.zeros(t.shape, t.numpy) for t in op.infer(*types)[:want]]
    room = [np.zeros(t.shape, t.numpy) for t in op.scratch(types, [TensorType.of(o) for o in outs])]
    op.compute(arrays, outs, room)
    return outs


def gradient(op: Any, arrays: list[Any], given: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """The gradient operator with its inputs; `given`: outputs into which something flows."""
    outs = computed(op, arrays)
    draw = Draw("grads")
    grads = [draw(f"f64[{','.join(map(str, o.shape))}]") for o in outs[: op.onnx_outputs]]
    grads = [g if i in given else None for i, g in enumerate(grads)]
    return GRADIENTS[op.name](**op.options()), [
        *filled(arrays, op.arity), outs[0], *outs[op.onnx_outputs :], *grads
    ]  # fmt: skip


def check(op: Any, arrays: list[Any], dtype: str = "f64", want: int | None = None) -> None:
    """Against float64 on the same numbers, and the same bits with threads the other way round."""
    eps = {"f64": 2.0**-44, "f32": 2.0**-17, "f16": 2.0**-6, "bf16": 2.0**-3}[dtype]
    rounded = [a.astype(DTYPES[dtype]) if a is not None and a.dtype == np.float64 else a for a in arrays]
    exact = computed(op, [a.astype(np.float64) if a is not None and a.dtype != np.int32 else a for a in rounded], want)
    case = Case(op, tuple(rounded), want=want)
    applied = operator(case)
    assert applied.kernel
    b = Bound(case, applied, provider(applied.kernel), DEVICE[0])
    both = []
    for poison, backwards in ((0xFF, False), (0x55, True)):
        if hasattr(DEVICE[0], "backwards"):
            DEVICE[0].backwards = backwards
        both.append(b.run(poison))
    for i, (a, again, e) in enumerate(zip(*both, exact, strict=True)):
        assert a.tobytes() == again.tobytes(), f"{op}: output {i} depends on the order of threads"
        assert np.all(abs(a.astype(np.float64) - e) <= eps * (1 + abs(e).max(initial=0))), f"{op}: output {i}"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("make", OPS)
def test_optional_operands(make: Any, direction: str) -> None:
    op = make(5, direction)
    for wanted in ((), (3,), (3, 4), (4, 5), (3, 4, 5, 6, 7), (5, 6), (7,), (4, 7)):
        arrays = inputs(op, set(wanted))
        check(op, arrays)
        check(op, arrays, want=1)
        for given in ((0,), (1,), tuple(range(op.onnx_outputs))):
            check(*gradient(op, arrays, given))
            if len(wanted) == 2:
                check(*gradient(op, arrays, given), want=1)


@pytest.mark.parametrize("make", [LSTM, GRU, lambda n, d: GRU(n, d, 1), RNN])
def test_types_and_sizes(make: Any) -> None:
    for dtype, (n, steps, batch) in itertools.product(("f32", "f16", "bf16"), ((40, 1, 3), (33, 4, 9))):
        op = make(n, "bidirectional")
        arrays = inputs(op, {3, 4, 5}, steps, batch)
        arrays[2] *= 0.2
        check(op, arrays, dtype)
        check(*gradient(op, arrays, (0, 1)), dtype)


def calls_of(op: Any, arrays: list[Any]) -> list[Any]:
    """What the operator is bound to."""
    case = Case(op, tuple(arrays))
    applied = operator(case)
    return list(Bound(case, applied, provider(applied.kernel), DEVICE[0]).calls)


RESIDENT = [LSTM, lambda n, d: GRU(n, d, 1), RNN]


@pytest.mark.parametrize("make", RESIDENT)
def test_small_products_are_part_of_one_kernel(make: Any) -> None:
    """A launch for all steps; products are for all inputs, and for the state before the first step."""
    op = make(36, "bidirectional")
    arrays = [a if a is None else a.astype(np.float32) for a in inputs(op, {3, 5, 6}, 4, 35)]
    check(op, arrays, "f32")
    check(*gradient(op, arrays, (0, 1)), "f32")
    calls = calls_of(op, arrays)
    assert sum(isinstance(c, Product) for c in calls) == 2
    assert sum(isinstance(c, Launch) and c.kernel.resident for c in calls) == 2
    arrays[4] = np.array([4, 1, *[3] * 33], np.int32)
    calls = calls_of(op, arrays)
    assert sum(isinstance(c, Product) for c in calls) == 2 * (1 + 4)
    assert not any(isinstance(c, Launch) and c.kernel.resident for c in calls)


@pytest.mark.parametrize("make", RESIDENT)
def test_a_kernel_of_all_steps_has_the_same_bits_on_any_device(make: Any, monkeypatch: Any) -> None:
    """All blocks at a time, fewer of them with several parts of the batch each, and a launch a step."""
    forward = make(40, "forward")
    given = inputs(forward, {3, 5}, 3, 13)
    for op, arrays in ((forward, given), gradient(forward, given, (0, 1))):
        case = Case(op, tuple(a if a is None else a.astype(np.float32) for a in arrays))
        applied = operator(case)
        found = []
        for processors in (64, 4, 2, 1):
            monkeypatch.setattr(DEVICE[0], "processors", processors)
            bound = Bound(case, applied, provider(applied.kernel), DEVICE[0])
            (launch,) = (c for c in bound.calls if isinstance(c, Launch) and c.kernel.resident)
            assert launch.grid[0] == 2
            launches = launch.within(processors)
            assert len(launches) == (3 if processors == 1 else 1)
            assert processors == 1 or math.prod(launches[0].grid) <= processors
            found.append([a.tobytes() for a in bound.run(0xFF)])
        assert found[1:] == found[:1] * 3


@pytest.mark.parametrize(
    ("make", "n", "batch", "units"),
    [(LSTM, 256, 128, 32), (LSTM, 257, 8, 16), (LSTM, 512, 64, 16), (LSTM, 513, 8, 0), (LSTM, 512, 128, None),
     (RESIDENT[1], 320, 64, 32), (RESIDENT[1], 321, 64, 16), (RESIDENT[1], 640, 32, 16),
     (RESIDENT[1], 641, 32, 0), (RNN, 1024, 64, 32)],
)  # fmt: skip
def test_weights_that_registers_hold(make: Any, n: int, batch: int, units: int | None) -> None:
    """0: they do not; None: the products are too large."""
    sizes = resident.sizes(make(n, "forward"), TensorType("f32", (2, batch, 3)), masked=False)
    assert (sizes.units if sizes else None) == (units or None)


def test_more_weights_leave_half_the_units_to_a_block(monkeypatch: Any) -> None:
    """Eight rows a part, which come to shared memory in halves; the second part is not whole."""
    monkeypatch.setattr(DEVICE[0], "processors", 64)
    op = LSTM(258, "forward")
    arrays = inputs(op, {3, 5, 6}, 2, 9)
    arrays[2] *= 0.1
    check(op, arrays, "f32")
    check(*gradient(op, arrays, (0, 1)), "f32")


def test_blocks_that_wait_for_ever_are_an_error(monkeypatch: Any) -> None:
    """A counter that nobody counts."""
    body = "    await_count(x, 1);\n    __syncthreads();"
    kernel = Kernel("waits", "unsigned* x, int begin, int end", body, threads=32, resident=True)
    if not hasattr(DEVICE[0], "backwards"):
        pytest.skip("a device would wait")
    at, _memory = DEVICE[0].allocate(4)
    x = Buffer(at, TensorType("i32", (1,)))
    with pytest.raises(rc.RecomputeError, match="wait for others that never come"):
        DEVICE[0].prepare(kernel.blocks(2, 2, args=(x, 0, 1)))()


def test_many_rows_are_added_in_parts() -> None:
    op = LSTM(2, "forward")
    check(*gradient(op, inputs(op, {3, 6, 7}, 6, 70), (0,)))


def test_products_in_tf32() -> None:
    for dtype in ("f32", "f64"):
        op = GRU(5, "bidirectional")
        arrays = [a if a is None else a.astype(DTYPES[dtype]) for a in inputs(op, {3, 5})]
        bound = case_block(Case(op, tuple(arrays)))[0].operators[0]
        assert cuda_tf32.CudaTf32().accepts(bound) == (dtype == "f32")
        if dtype == "f32":
            calls = Bound(Case(op, tuple(arrays)), bound, cuda_tf32.CudaTf32(), DEVICE[0]).calls
            assert {c.tf32 for c in calls if isinstance(c, Product)} == {True}
