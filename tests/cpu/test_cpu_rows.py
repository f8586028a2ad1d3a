"""Kernels of the providers "rows" and "numba" against the operators' own numerics, which are the reference."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kernel_cases import applied, native_provider

from recompute.errors import JobError
from recompute.language.op import Op, op_class
from recompute.language.types import TensorType
from recompute.runtime.cpu import families
from recompute.runtime.cpu.device import jit, native
from recompute.runtime.shared.mathematics import exp, log, sigmoid, tanh
from recompute.testing import all_ops, cases

pytestmark = pytest.mark.skipif(bool(jit.unavailable()), reason=jit.unavailable())

#: the families whose operators this file checks; pooling has a file of its own
MINE = ("loss", "ctc", "copy", "index", "reduce", "random", "recurrent", "transpose")


def filled(t: TensorType, byte: int = 0xFF) -> np.ndarray:
    """A buffer whose bytes are all the same: NaN for floats."""
    raw = np.full(t.nbytes, byte if t.dtype != "bool" else 0, np.uint8)
    return raw.view(t.numpy).reshape(t.shape)


def native_results(
    op: Op, inputs: Sequence[np.ndarray | None], want: int | None = None, shared: int | None = None
) -> list[np.ndarray]:
    """What the kernel makes; with `shared`, in that input's memory."""
    applied_op = applied(op, *inputs, want=want)
    provider = native_provider(applied_op)
    assert provider is not None
    ins = [None if a is None else a.copy() for a in inputs]
    outs: list[Any] = [filled(v.type) for v in applied_op.writes()]
    if shared is not None:
        outs[op.inplace_output] = ins[shared]
    scratch = [filled(t, 0xFF) for t in provider.scratch(applied_op)]
    table = native.Table(provider.bind(applied_op, ins, outs, scratch))
    table.run()
    table.check()
    for i, (a, before) in enumerate(zip(ins, inputs, strict=True)):
        assert i == shared or a is None or a.tobytes() == before.tobytes(), f"input {i} was changed"  # type: ignore[union-attr]
    return outs


def numpy_results(op: Op, inputs: Sequence[np.ndarray | None], want: int | None = None) -> list[np.ndarray]:
    """What the operator's own numerics make."""
    applied_op = applied(op, *inputs, want=want)
    outs = [filled(v.type) for v in applied_op.writes()]
    scratch = [filled(t) for t in applied_op.workspace()]
    with np.errstate(all="ignore"):
        op.compute(list(inputs), outs, scratch)  # type: ignore[arg-type]
    return outs


def doubled(inputs: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """The inputs with float64 for float32."""
    return [a.astype(np.float64) if a is not None and a.dtype == np.float32 else a for a in inputs]


def added(n: int) -> float:
    """Roundings that one sum over n elements goes through at worst: blocks of 2048 in four lanes, then float64."""
    return min(n, 2048) / 4 + 4


#: inputs in float64, results → by how many roundings each result may be wrong, times its size
Bound = Callable[[list[Any], list[np.ndarray]], list[Any]]


@dataclass(frozen=True)
class Big:
    """An application large enough for the kernels; `bound` None: the same bits as on NumPy."""

    op: Op
    inputs: tuple[np.ndarray | None, ...]
    bound: Bound | None = None
    want: int | None = None

    def __str__(self) -> str:
        shapes = "-".join("x".join(map(str, a.shape)) for a in self.inputs if a is not None)
        return f"{self.op.name}-{shapes}"


G = np.random.default_rng(5)


def draw(*shape: int) -> np.ndarray:
    return G.standard_normal(shape).astype(np.float32)


def make(name: str, *args: Any, **options: Any) -> Op:
    return op_class(name)(*args, **options)


def softmax_bound(ins: list[Any], outs: list[np.ndarray]) -> list[Any]:
    """The exponent is wrong by its own rounding, the sum by its."""
    span = np.ptp(ins[0], axis=-1, keepdims=True)
    return [(span + 4 + added(ins[0].shape[-1])) * outs[0]]


def softmax_grad_bound(ins: list[Any], outs: list[np.ndarray]) -> list[Any]:
    y, dy = ins
    sums = added(y.shape[-1]) * np.sum(abs(y * dy), axis=-1, keepdims=True)
    return [abs(y) * (3 * (abs(dy) + abs(sums)) + sums)]


def log_softmax_bound(ins: list[Any], outs: list[np.ndarray]) -> list[Any]:
    return [np.ptp(ins[0], axis=-1, keepdims=True) * 2 + added(ins[0].shape[-1]) + 3 * abs(outs[0])]


def log_softmax_grad_bound(ins: list[Any], outs: list[np.ndarray]) -> list[Any]:
    y, dy = ins
    sums = np.sum(abs(dy), axis=-1, keepdims=True)
    return [abs(dy) + np.exp(y) * sums * (added(y.shape[-1]) + 4 + abs(y))]


def layer_bound(ins: list[Any], outs: list[np.ndarray]) -> list[Any]:
    """Mean and variance are wrong by their sums' roundings, relative to the elements' size."""
    x, scale = ins[0], ins[1]
    n = added(x.shape[-1])
    size = np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    inverse = outs[-1]
    bias = ins[2] if len(ins) > 2 else 0.0
    y = abs(outs[0]) + (size * inverse * n + abs(x) * inverse * (n + 4)) * abs(scale) + abs(bias)
    return [y, *([size * n] if len(outs) > 2 else []), inverse * (2 * n + 4) * np.maximum(1, (size * inverse) ** 2)]


def norm_grad_bound(ins: list[Any], outs: list[np.ndarray]) -> list[Any]:
    """Two means over a row, then a few roundings; sums over the rows for scale and bias."""
    x, scale, mean, inverse, dy = ins
    rows = x.shape[0]
    normal = abs((x - (0 if mean is None else mean[:, None])) * inverse[:, None])
    g = abs(dy * scale)
    n = added(x.shape[1])
    means = np.mean(g, axis=1, keepdims=True) * n + normal * np.mean(g * normal, axis=1, keepdims=True) * (n + 6)
    sums = min(64, rows) + 4
    return [inverse[:, None] * (4 * g + means), sums * np.sum(abs(dy) * normal, axis=0), sums * np.sum(abs(dy), axis=0)]


def loss_bound(ins: list[Any], outs: list[np.ndarray]) -> list[Any]:
    """Each label's number is wrong by its log-softmax's roundings; a sum of them by no more, in proportion."""
    each = log_softmax_bound(ins, [outs[-1]])[0]
    return [each.max() * max(1.0, abs(outs[0]).max()), each]


def loss_grad_bound(ins: list[Any], outs: list[np.ndarray]) -> list[Any]:
    return [abs(outs[0]) * (8 + abs(ins[0]))]


def sum_bound(axes: tuple[int, ...], rows: int = 2048) -> Bound:
    """Roundings of sums over columns are those of a block of 64 rows."""

    def bound(ins: list[Any], outs: list[np.ndarray]) -> list[Any]:
        total = np.sum(abs(ins[0]), axis=axes, keepdims=True)
        return [(added(rows) if rows > 64 else 68) * total]

    return bound


LABELS = G.integers(0, 301, 200)
LABELS[7] = 3
PROBABLE = np.exp(draw(130, 257))
PROBABLE /= PROBABLE.sum(axis=1, keepdims=True)
X4 = draw(4, 9, 33, 21)
BIG = [
    Big(make("Softmax"), (draw(130, 257) * 3,), softmax_bound),
    Big(make("Softmax"), (draw(5, 5003),), softmax_bound),
    Big(make("SoftmaxGrad"), (PROBABLE, draw(130, 257)), softmax_grad_bound),
    Big(make("LogSoftmax", axis=1), (draw(130, 257, 1),),
        lambda i, o: log_softmax_bound([i[0][..., 0]], [o[0][..., 0]])),
    Big(make("LogSoftmaxGrad"), (np.log(PROBABLE), draw(130, 257)), log_softmax_grad_bound),
    Big(make("LayerNormalization"), (draw(130, 257) + 1, draw(257), draw(257)), layer_bound),
    Big(make("LayerNormalization"), (draw(130, 257), draw(257)), layer_bound),
    Big(make("RMSNormalization"), (draw(130, 257), draw(257)), layer_bound),
    Big(make("NormGrad", view=(200, 1, 101, 1)), (draw(200, 101), draw(101), draw(200), draw(200) ** 2, draw(200, 101)),
        norm_grad_bound),
    Big(make("NormGrad", view=(200, 1, 101, 1)), (draw(200, 101), draw(101), None, draw(200) ** 2, draw(200, 101)),
        norm_grad_bound),
    Big(make("SoftmaxCrossEntropyLoss"), (draw(200, 301), LABELS), loss_bound),
    Big(make("SoftmaxCrossEntropyLoss", "sum", 3), (draw(200, 301), LABELS, abs(draw(301))), loss_bound),
    Big(make("SoftmaxCrossEntropyGrad", "mean", 3),
        (np.log(PROBABLE), LABELS[:130] % 257, None, np.array(1.5, np.float32)), loss_grad_bound),
    Big(make("Concat", axis=1), (X4, draw(4, 2, 33, 21), X4)),
    Big(make("Concat", axis=-1), (X4, draw(4, 9, 33, 2))),
    Big(make("Split", (4, 17), -1), (X4,)),
    Big(make("Slice", (-1, 3), (-900, 20), (2, 3), (-2, 1)), (X4,)),
    Big(make("SliceGrad", (70, 2), (-900, 20), (1, 2), (-2, 3), shape=(11, 80, 21)), (draw(11, 36, 6),)),
    Big(make("Pad", (0, 1, 2, -1, 3, 0, 0, 1), value=1.5), (X4,)),
    Big(make("Expand", (4, 9, 33, 21)), (draw(9, 1, 21),)),
    Big(make("Tile", (2, 1, 3, 1)), (X4,)),
    Big(make("Transpose", (1, 0)), (draw(203, 333),)),
    Big(make("Transpose", (0, 2, 3, 1)), (X4,)),
    Big(make("Transpose", (1, 3, 0, 2)), (X4,)),
    Big(make("Fill", "i64", (33, 1001), 7.0), ()),
    Big(make("Reshape", (21, 33, 36)), (X4,)),
    Big(make("Gather"), (draw(500, 70), G.integers(-500, 500, (7, 61)))),
    Big(make("Gather", axis=1), (draw(3, 50, 70), G.integers(-50, 50, 120).astype(np.int32))),
    Big(make("GatherGrad", (500, 70)), (G.integers(-50, 50, (7, 61)), draw(7, 61, 70))),
    Big(make("GatherGrad", (3, 90, 70), 1), (G.integers(-50, 50, 120), draw(3, 120, 70))),
    Big(make("GatherElements", 1), (draw(64, 100, 8), G.integers(-100, 100, (64, 50, 8)))),
    Big(make("GatherElementsGrad", (64, 100, 8), 1), (G.integers(-100, 100, (64, 50, 8)), draw(64, 50, 8))),
    Big(make("ReduceSum", (1,)), (draw(70, 2503),), sum_bound((1,))),
    Big(make("ReduceSum", (0,)), (draw(2503, 70),), sum_bound((0,), 64)),
    Big(make("ReduceMean", (1,)), (draw(5, 300, 70),), lambda i, o: [68 * np.mean(abs(i[0]), axis=1, keepdims=True)]),
    Big(make("ReduceSum", (1,)), (draw(5, 60, 70),), sum_bound((1,), 64)),
    Big(make("ReduceSum", (0, 2, 3)), (X4,), sum_bound((0, 2, 3))),
    Big(make("ReduceSumSquare"), (draw(100003),), lambda i, o: [added(100003) * abs(o[0])]),
    Big(make("ReduceMax", (1,)), (draw(70, 2503),)),
    Big(make("Dropout", 0.3, 2**63 + 5), (draw(33, 1001), np.array(7))),
    Big(make("Dropout", 0.5, 3), (draw(33, 1001), np.array(2**40)), want=1),
    Big(make("RandomUniform", (33, 1001), "f32", -2.5, 3.0, 5), (np.array(9),)),
    Big(make("Bernoulli", "bool", 5), (abs(draw(33, 1001)) % 1, np.array(9))),
    Big(make("ReduceMin", (1,)), (draw(5, 300, 70),)),
]  # fmt: skip


@pytest.mark.parametrize("case", BIG, ids=str)
def test_kernel_agrees(case: Big, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 within derived bounds of float64; the same bits for one thread and two, and in place."""
    reference = numpy_results(case.op, doubled(case.inputs), case.want)
    monkeypatch.setattr(native, "threads", lambda: 1)
    alone = native_results(case.op, case.inputs, case.want)
    if case.bound is None:
        expected = numpy_results(case.op, case.inputs, case.want)
        assert [a.tobytes() for a in alone] == [e.tobytes() for e in expected]
    else:
        eps = 2.0**-24
        bounds = case.bound(doubled(case.inputs), reference)
        for i, (a, r, bound) in enumerate(zip(alone, reference, bounds, strict=False)):
            allowed = np.broadcast_to(np.reshape(bound, r.shape) if np.size(bound) == r.size else bound, r.shape)
            part = abs(a - r) / (eps * (allowed + 2 * abs(r)) + 1e-38)
            assert not part.max() > 1, f"output {i} is off by {part.max()} bounds"
    monkeypatch.setattr(native, "threads", lambda: 2)
    assert [a.tobytes() for a in native_results(case.op, case.inputs, case.want)] == [a.tobytes() for a in alone]
    for k in case.op.inplace:
        source = case.inputs[k] if k < len(case.inputs) else None
        if source is not None and TensorType.of(source) == TensorType.of(alone[case.op.inplace_output]):
            again = native_results(case.op, case.inputs, case.want, shared=k)
            assert [a.tobytes() for a in again] == [a.tobytes() for a in alone], f"in place of input {k}"


def operators() -> list[str]:
    table = families.FAMILIES.table() if not jit.unavailable() else {}
    rows = [c.__name__ for c in all_ops() if c.row_formula is not Op.row_formula]
    return sorted([*rows, *(n for n, f in table.items() if type(f).__module__.rpartition(".kernels.")[2] in MINE)])


@pytest.mark.parametrize("name", operators())
def test_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators' own samples, small and odd, in float32 and float64."""
    for module in [families, *(sys.modules[type(f).__module__] for f in families.FAMILIES.table().values())]:
        monkeypatch.setattr(module, "ENOUGH", 0, raising=False)
    for case in cases(op_class(name)):
        op = applied(case.op, *case.inputs, want=case.want)
        if native_provider(op) is None or any(v.size == 0 for v in (*op.reads(), *op.writes())):
            continue
        got = native_results(case.op, case.inputs, case.want)
        for g, e in zip(got, numpy_results(case.op, case.inputs, case.want), strict=True):
            eps = float(np.finfo(g.dtype).eps) if g.dtype.kind == "f" else 0.0
            np.testing.assert_allclose(g, e, rtol=100 * eps, atol=100 * eps, err_msg=str(case.op))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_sequences(name: str, direction: str) -> None:
    """Whole sequences and their gradients in float32, with initial states: near NumPy's in float64."""
    steps, batch, features, n = 7, 5, 9, 500
    d, g, last = 1 + (direction == "bidirectional"), 4 if name == "LSTM" else 3, ((1,) if name == "GRU" else ())
    state = [draw(d, batch, n)] * (2 if name == "LSTM" else 1)
    weights = [draw(d, g * n, features) * 0.1, draw(d, g * n, n) * 0.03, draw(d, 2 * g * n) * 0.1]
    inputs = [draw(steps, batch, features), *weights, None, *state]
    op, exact = make(name, n, direction, *last), []
    for want in (None, 1):
        got, exact = native_results(op, inputs, want), numpy_results(op, doubled(inputs), want)
        for a, e in zip(got, exact, strict=True):
            np.testing.assert_allclose(a, e, rtol=0, atol=2e-6 * (1 + abs(e).max()))
    outs = [a.astype(np.float32) for a in numpy_results(op, doubled(inputs))]
    onnx = 3 if name == "LSTM" else 2
    absent = [None] if name == "LSTM" else []
    given = [*inputs, *absent, outs[0], *outs[onnx:], *(draw(*o.shape) for o in outs[:onnx])]
    grad = make(f"{name}Grad", n, direction, *last)
    for a, e in zip(native_results(grad, given, 5), numpy_results(grad, doubled(given), 5), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=1e-5 * (1 + abs(e).max()))


def test_what_is_out_of_range_is_an_error() -> None:
    labels = LABELS.copy()
    for label in (301, -1, 10**6):
        labels[-1] = label
        for weights in ((), (draw(301),)):
            with pytest.raises(JobError, match=f"^label {label} is outside the 301 classes"):
                native_results(make("SoftmaxCrossEntropyLoss"), (draw(200, 301), labels, *weights))
    for index in (50, -51, 10**6):
        with pytest.raises(JobError, match=f"^index {index} is outside an axis of 50 rows"):
            native_results(make("Gather"), (draw(50, 70), np.full(1000, index)))


def test_not_a_number_stays() -> None:
    """A NaN spoils its own row, and is the largest and the smallest."""
    x = draw(130, 257)
    x[5, 7] = np.nan
    x[6] = -np.inf
    y = native_results(make("Softmax"), (x,))[0]
    assert np.isnan(y[5:7]).all() and np.isfinite(np.delete(y, [5, 6], axis=0)).all()
    assert np.isnan(native_results(make("ReduceMax", (1,)), (x,))[0][5]).all()
    assert np.isnan(native_results(make("ReduceMin", (0,)), (x,))[0][0, 7])


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], float, float]] = {
    "exp": (np.exp, -104.0, 90.0),
    "log": (np.log, 0.0, 3e38),
    "tanh": (np.tanh, -20.0, 20.0),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), -87.0, 90.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    """Within 2 units in the last place, from the smallest normal numbers to the largest."""
    function, low, high = FUNCTIONS[name]
    x = np.arange(0, 2**32, 50021, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([x, np.linspace(low, high, 40001, dtype=np.float32)])
    x = np.append(x[(x >= low) & (x <= high)], np.float32(np.nan))
    y = np.empty_like(x)
    kernel = jit.kernel(_BODIES[name])
    native.Table([kernel.call(x, y, work=x.size)]).run()
    with np.errstate(all="ignore"):
        exact = function(x.astype(np.float64))
        rounded = exact.astype(np.float32)
        unit = np.spacing(abs(rounded)).astype(np.float64)
        error = abs(y - exact)
    tiny = np.finfo(np.float32).tiny  # smaller ones count as 0 in native code
    normal = np.isfinite(rounded) & (abs(rounded) >= tiny) & (abs(x) >= tiny)
    assert (error[normal] <= 2 * unit[normal]).all()
    extreme = np.isinf(rounded) & ((abs(x) >= tiny) | (x == 0))
    assert normal.any() and (y[extreme] == rounded[extreme]).all()
    assert np.isnan(y[-1])


def _exp(x, y, begin, end):  # type: ignore[no-untyped-def]
    for i in range(begin, end):
        y[i] = exp(x[i])


def _log(x, y, begin, end):  # type: ignore[no-untyped-def]
    for i in range(begin, end):
        y[i] = log(x[i])


def _tanh(x, y, begin, end):  # type: ignore[no-untyped-def]
    for i in range(begin, end):
        y[i] = tanh(x[i])


def _sigmoid(x, y, begin, end):  # type: ignore[no-untyped-def]
    for i in range(begin, end):
        y[i] = sigmoid(x[i])


_BODIES = {"exp": _exp, "log": _log, "tanh": _tanh, "sigmoid": _sigmoid}


def test_a_cached_kernel_needs_no_numba() -> None:
    """A second process loads the object code: nothing of numba is imported, no symbol of its runtime is wanted."""
    code = (
        "import sys, numpy as np, recompute\n"
        "from recompute.runtime.cpu.device import native\nfrom recompute.runtime.cpu.kernels import reduce as k\n"
        "x, y = np.ones((1, 3, 4), np.float32), np.zeros(3, np.float32)\n"
        "native.Table([k.row_extremes.call(x, y, 0, work=3)]).run()\n"
        "print(y.sum(), 'numba' in sys.modules)"
    )
    for _ in range(2):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["3.0", "False"]
