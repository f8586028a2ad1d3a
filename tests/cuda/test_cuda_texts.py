"""Kernels that are one Python text for every place: the processor's numbers and the emulated device's."""

from __future__ import annotations

from typing import Any

import cuda_cases
import numpy as np
import pytest

from recompute.errors import JobError
from recompute.language.types import TensorType
from recompute.runtime.cpu.device import jit, native
from recompute.runtime.cuda.code import python_kernels
from recompute.runtime.cuda.device.kernel import Buffer
from recompute.runtime.shared.mathematics import larger
from recompute.runtime.shared.texts import Absent, Fixed, Text, inline, instructions, kernel, lanes, on_processor

_OFFSET, _HALF = 3, np.float32(0.5)
_NEVER, _TABLE = False, np.array([[0, 0], [0.5, 2]], np.float32)


@inline
def _pair(a, b):
    return a // b, a % b


@kernel
def divided(x, y, by, begin, end):
    for i in range(begin, end):
        q, r = _pair(x[i], by)
        y[i, 0], y[i, 1] = q, r
        y[i, 2] = min(q, r) + max(0, -q) if i % 2 else abs(q) << 1
        y[i, 3] = (i - _OFFSET) // 2


@kernel
def spread(x, more, y, begin, end):
    t = y.dtype.type
    for r in range(begin, end):
        most = x[r, 0]
        for c in range(1, x.shape[1]):
            if x[r, c] > most:
                most = x[r, c]
        for c in lanes(1, x.shape[1]):
            y[r, c] = (x[r, c] - most) * t(_HALF)
        y[r, 0] = t(more[r]) if more.size else t(r)


@kernel(rows=True)
def placed(y, size, row, begin, end):
    base = 100 * row
    for i in range(begin, end):
        k = np.int64(size)  # it gets less
        while k > i:
            k -= 1
            if k == 2:
                break
        y[row, i] = base + 10 * i + k


@kernel
def extremes(x, y, begin, end):
    for r in range(begin, end):
        most = np.float32(0)
        for c in lanes(x.shape[1]):
            most = larger(most, abs(x[r, c]))
        y[r, 0] = most * _TABLE[1, r % 2] if not _NEVER else most
        if _NEVER and on_processor():
            y[r, 1] = 5


def both(text: Text, arrays: list[Any], **how: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The arrays after a kernel on the processor, and on the emulated device."""
    ours = [a.copy() if isinstance(a, np.ndarray) else a for a in arrays]
    native.Table([jit.call_of(text(*ours, **how))]).run()
    device = cuda_cases.device()
    held, buffers = [], []
    for a in arrays:
        if isinstance(a, np.ndarray):
            address, memory = device.allocate(max(a.nbytes, 1))
            held.append(memory)
            a, array = Buffer(address, TensorType.of(a)), a
            device.upload(a, array)
        buffers.append(a)
    launch = python_kernels.call_of(text(*buffers, **how))
    with device.current():
        device.prepare(launch)()
    theirs = [device.download(a) for a in buffers if isinstance(a, Buffer)]
    return [a for a in ours if isinstance(a, np.ndarray)], theirs


@cuda_cases.needs_device
@pytest.mark.skipif(bool(jit.unavailable()), reason="numba is not there")
class TestBoth:
    """The same numbers on both."""

    @pytest.mark.parametrize("dtype", [np.int64, np.int8])
    @pytest.mark.parametrize("by", [4, -4, Fixed(3)])
    def test_whole_numbers_divide_towards_minus_infinity(self, dtype: Any, by: Any) -> None:
        x = np.arange(-9, 10).astype(dtype)
        ours, theirs = both(divided, [x, np.zeros((19, 4), np.int64), by], work=19)
        np.testing.assert_array_equal(ours[1], theirs[1])
        np.testing.assert_array_equal(ours[1][:, 0], x // (by.value if isinstance(by, Fixed) else by))
        np.testing.assert_array_equal(ours[1][:, 1], x % (by.value if isinstance(by, Fixed) else by))

    @pytest.mark.parametrize("width", [1, 33, 2000])
    @pytest.mark.parametrize("more", [Absent(), np.ones(6, np.float32)])
    def test_lanes_divide_an_item(self, width: int, more: Any) -> None:
        x = np.random.default_rng(0).standard_normal((6, width), np.float32)
        ours, theirs = both(spread, [x, more, np.zeros_like(x)], work=6, lanes=width)
        np.testing.assert_array_equal(ours[-1], theirs[-1])

    def test_lanes_find_the_largest_of_a_row(self) -> None:
        x = np.random.default_rng(0).standard_normal((6, 100), np.float32)
        x[3, 40] = np.nan
        ours, theirs = both(extremes, [x, np.zeros((6, 2), np.float32)], work=6, lanes=32)
        np.testing.assert_array_equal(ours[1], theirs[1])
        np.testing.assert_array_equal(ours[1][:, 0], abs(x).max(axis=1) * np.tile(_TABLE[1], 3))

    def test_rows(self) -> None:
        ours, theirs = both(placed, [np.zeros((4, 6), np.int32), 7], work=24, per=6)
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[0][3].tolist() == [302, 312, 322, 333, 344, 355]


@inline
def _without(a):
    return [a]


@instructions(lambda types, a: a)
def bare(builder: Any, a: Any) -> Any:
    return a


def _branches(y, begin, end):
    for i in range(begin, end):
        if i > 2:
            k = 1
        else:
            k = 2
        y[i] = k


def _unknown(y, begin, end):
    for i in range(begin, end):
        y[i] = sum(y)


def _tried(y, begin, end):
    try:
        y[begin] = end
    finally:
        y[begin] = end


def _listed(y, begin, end):
    y[begin] = _without(end)


def _in_no_c(y, begin, end):
    y[begin] = bare(end)


def _ends_early(y, begin, end):
    for i in range(begin, end):
        for c in lanes(8):
            if y[c] > i:
                break


def _adds_up(y, begin, end):
    for i in range(begin, end):
        s = y[i]
        for c in lanes(8):
            s += y[c]
        y[i] = s


def _goes_on(y, begin, end):
    for i in range(begin, end):
        for k in range(8):
            k += y[i]
            y[k] = i


@inline(double=_without)
def either(a):
    return a


def _by_type(y, begin, end):
    y[begin] = either(end)


@inline(c="DEVICE int most(int x) { return warp_reduce(x, Larger()); }\n")
def most(x):
    return x


def _alone_in_a_warp(y, begin, end):
    for i in range(begin, end):
        for c in lanes(8):
            y[c] = most(i)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_alone_in_a_warp, "most is for all threads of an item, not where lanes have divided them"),
        (_ends_early, r"'lanes\(8\)' divides steps that depend on each other"),
        (_adds_up, "'s' would have a value for each lane"),
        (_goes_on, "'k' gets another value in its loop"),
        (_by_type, "either is another function for float64"),
        (_branches, "_branches, line 7: 'k' has no value in this block"),
        (_unknown, "'sum' is no function that kernels call"),
        (_tried, "is not translated to C"),
        (_listed, r"_without, line 3: '\[a\]' is not translated to C"),
        (_in_no_c, "bare has no text in C"),
    ],
)
def test_what_is_not_translated_is_refused(function: Any, words: str) -> None:
    y = Buffer(256, TensorType("i64", (8,)))
    with pytest.raises(JobError, match=words):
        python_kernels.call_of(kernel(function)(y, work=8))


def _widened(x, y, begin, end):
    for i in range(begin, end):
        s = x[i]
        s = s + 1.0
        y[i] = s


def _mixed(x, y, begin, end):
    for i in range(begin, end):
        y[i] = x[i] * i


@cuda_cases.needs_device
@pytest.mark.parametrize("function", [_widened, _mixed])
def test_other_types_than_numbas_do_not_compile(function: Any) -> None:
    """float32 and float64, or float32 and an integer, would be float64 there."""
    x = Buffer(256, TensorType("f32", (8,)))
    with pytest.raises(JobError, match="does not take"):
        cuda_cases.device().compile([python_kernels.call_of(kernel(function)(x, x, work=8)).kernel])


def test_sizes_of_64_bits() -> None:
    small, large = (
        python_kernels.call_of(spread(x, None, x, work=8))
        for x in (Buffer(256, TensorType("f32", (n, 1 << 16))) for n in (8, 1 << 16))
    )
    assert "typedef Whole<unsigned> Size" in small.kernel.text
    assert "typedef Whole<unsigned long long> Size" in large.kernel.text and large.kernel.name.endswith("_wide")
