"""The processor's CTC kernels against the operators' own numerics, in corners; what those allocate; errors."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from kernel_cases import applied

from recompute.errors import JobError
from recompute.language.op import Op
from recompute.ops.loss.ctc import CTCLoss, CTCLossGrad
from recompute.runtime.cpu.device import jit, native
from recompute.runtime.cpu.providers.numba import Numba

needs_numba = pytest.mark.skipif(bool(jit.unavailable()), reason=jit.unavailable() or "numba is here")


def by_kernel(op: Op, *inputs: np.ndarray | None) -> np.ndarray:
    """What the kernel makes, in buffers of NaN."""
    op_, provider = applied(op, *inputs), Numba()
    outs = [np.full(v.shape, np.nan, v.type.numpy) for v in op_.writes()]
    scratch = [np.frombuffer(b"\xff" * t.nbytes, t.numpy).reshape(t.shape).copy() for t in provider.scratch(op_)]
    table = native.Table(provider.bind(op_, inputs, outs, scratch))
    table.run()
    table.check()
    return outs[0]


def by_numpy(op: Op, *inputs: np.ndarray | None) -> tuple[np.ndarray, int]:
    """What the operator's numerics make, and the most bytes that they allocate meanwhile."""
    op_ = applied(op, *inputs)
    outs = [np.full(v.shape, np.nan, v.type.numpy) for v in op_.writes()]
    scratch = [np.empty(t.shape, t.numpy) for t in op_.workspace()]
    tracemalloc.start()
    with np.errstate(all="ignore"):
        op.compute(list(inputs), outs, scratch)  # type: ignore[arg-type]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return outs[0], most


def log_probabilities(steps: int, n: int, classes: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(steps, n, classes)) * scale
    x -= x.max(2, keepdims=True)
    return x - np.log(np.exp(x).sum(2, keepdims=True))


def corners() -> Iterator[tuple[str, np.ndarray, list[list[int]], list[int] | None]]:
    yield "one step, one entry", log_probabilities(1, 2, 3), [[1], [-100]], None
    yield "no steps", log_probabilities(4, 3, 3), [[1, 2], [-100, 2], [2, 2]], [0, 0, 4]
    yield "labels longer than the steps", log_probabilities(2, 2, 3), [[1, 2, 1, 2], [1, 1, -100, -100]], None
    yield "ends in the middle", log_probabilities(9, 2, 4), [[1, -100, 3], [3, 3, 3]], [7, 5]
    yield "far apart", log_probabilities(30, 2, 5, 300.0), [[1, 1, 4], [2, 3, -100]], None
    masked = log_probabilities(8, 3, 4)
    masked[:, :, 3] = masked[2, 1, 0] = -np.inf
    yield "classes of probability 0", masked, [[1, 2], [3, -100], [-100, -100]], None
    broken = log_probabilities(5, 3, 4)
    broken[2, 1, 1], broken[1, 2, 0] = np.nan, np.inf
    yield "not numbers", broken, [[1, 2], [1, -100], [2, -100]], None


@needs_numba
@pytest.mark.parametrize("case", list(corners()), ids=lambda case: case[0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_corners(case: tuple, dtype: type[np.floating], any_size: None) -> None:
    _, x, labels, lengths = case
    x, y = x.astype(dtype), np.array(labels, np.int32 if dtype is np.float32 else np.int64)
    ends = None if lengths is None else np.array(lengths)
    dloss = np.arange(1, len(y) + 1).astype(dtype)
    rtol = 2e-5 if dtype is np.float32 else 1e-12
    for zero in (False, True):
        op = CTCLoss(zero_infinity=zero)
        np.testing.assert_allclose(by_kernel(op, x, y, ends), by_numpy(op, x, y, ends)[0], rtol=rtol)
    got, want = (f(CTCLossGrad(), x, y, ends, dloss) for f in (by_kernel, lambda *a: by_numpy(*a)[0]))
    np.testing.assert_allclose(got, want, rtol=1e-2 if dtype is np.float32 else 1e-9, atol=rtol)


@needs_numba
def test_long_sequences_in_float32() -> None:
    """2,000 steps: as near to float64 as sums of that size are in float32."""
    x, y = log_probabilities(2000, 1, 20), np.random.default_rng(1).integers(1, 20, (1, 150))
    exact = by_kernel(CTCLossGrad(), x, y, None, np.ones(1))
    single = x.astype(np.float32)
    loss, low = by_kernel(CTCLoss(), single, y), by_kernel(CTCLossGrad(), single, y, None, np.ones(1, np.float32))
    np.testing.assert_allclose(loss, by_kernel(CTCLoss(), x, y), rtol=1e-5)
    np.testing.assert_allclose(low, exact, atol=0.03)


@pytest.mark.parametrize("op", [CTCLoss(), CTCLossGrad()], ids=lambda op: op.name)
def test_numerics_allocate_little(op: Op) -> None:
    """Nothing like the scores (2 MB here) beside what `scratch` says."""
    x, y = log_probabilities(40, 16, 800).astype("f4"), np.full((16, 6), 3)
    more = [None, np.ones(16, "f4")] if isinstance(op, CTCLossGrad) else []
    assert by_numpy(op, x, y, *more)[1] < x.nbytes // 20


@needs_numba
@pytest.mark.parametrize(
    ("label", "length", "error"),
    [(9, 4, "label 9 is outside the 5"), (-3, 4, "label -3 is outside"), (0, 4, "label 0 is the blank: .* -100"),
     (1, 9, "length 9 is outside of the 4 steps"), (1, -1, "length -1 is outside")],
)  # fmt: skip
def test_labels_and_lengths_that_cannot_be(label: int, length: int, error: str, any_size: None) -> None:
    x, y = log_probabilities(4, 2, 5).astype("f4"), np.array([[1, 2], [label, 1]])
    for op, more in ((CTCLoss(), []), (CTCLossGrad(), [np.ones(2, "f4")])):
        with pytest.raises(JobError, match=error):
            by_kernel(op, x, y, np.array([4, length]), *more)


@needs_numba
def test_large_ones_have_a_kernel() -> None:
    for steps, taken in ((100, True), (2, False)):
        x, y = np.zeros((steps, 8, 5), np.float32), np.ones((8, 10), np.int64)
        assert Numba().accepts(applied(CTCLoss(), x, y)) is taken
        assert Numba().accepts(applied(CTCLossGrad(), x, y, None, np.ones(8, np.float32))) is taken
