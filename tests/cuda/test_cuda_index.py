"""CUDA kernels that take, add up and put by number, on the emulated device."""

from __future__ import annotations

from typing import Any

import cuda_cases
import numpy as np
import pytest
from test_cuda_moves import device, launched, numbers, run

from recompute import Executor, Program
from recompute.errors import JobError
from recompute.language.types import TensorType
from recompute.ops.communication.row_sums import RowSums
from recompute.ops.indexing.gather import Gather, GatherGrad
from recompute.ops.indexing.scatter import (
    GatherElements,
    GatherElementsGrad,
    GatherND,
    GatherNDGrad,
    ScatterElements,
    ScatterND,
)
from recompute.runtime import EmulatedCUDAPlace
from recompute.runtime.shared.trouble import INDEX_OUTSIDE
from recompute.testing import Case, case_block

pytestmark = cuda_cases.needs_device


def floats(kind: str, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(TensorType(kind, shape).numpy)


def indices(size: int, *shape: int, seed: int = 0, kind: Any = np.int64) -> np.ndarray:
    """Some of them count from the end."""
    return np.random.default_rng(seed).integers(-size, size, shape).astype(kind)


@pytest.mark.parametrize("kind", ["u8", "f16", "f32", "f64"])
def test_gather(kind: str) -> None:
    run(Gather(), numbers(kind, 50, 96), indices(50, 7, 9))
    run(Gather(), numbers(kind, 50, 33), indices(50, 40, kind=np.int32))
    run(Gather(1), numbers(kind, 3, 20, 12), indices(20, 31))
    run(Gather(-1), numbers(kind, 30, 20), indices(20, 4))


#: rows of the table, columns, tokens: one pass of the sort and more, runs over many chunks, odd rows, several tiles
TABLES = {
    "vocabulary": (3000, 48, 700),
    "types": (2, 20, 2100),
    "positions": (300, 64, 1200),
    "one": (1, 7, 300),
    "huge": (70_000, 4, 90),
    "odd": (40, 9, 1500),
    "few": (40, 130, 5),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "f64"])
def test_gather_gradient(name: str, kind: str) -> None:
    size, columns, tokens = TABLES[name]
    run(GatherGrad((size, columns)), indices(size, tokens), floats(kind, tokens, columns), units=64)


def test_gather_gradient_along_other_axes() -> None:
    run(GatherGrad((3, 20, 12), 1), indices(20, 100, kind=np.int32), floats("f32", 3, 100, 12), units=64)
    run(GatherGrad((3, 20, 5), 1), indices(20, 10, 7), floats("f32", 3, 10, 7, 5), units=64)
    run(GatherGrad((90, 4), 1), indices(4, 70), floats("f32", 90, 70), units=64)


def test_tokens_that_are_all_alike() -> None:
    found = run(GatherGrad((5, 32)), np.full(2000, 3), floats("f32", 2000, 32), units=64)
    names = ["Fill", "row_numbers_longlong_int", "digit_counts", "placed_by_digit_first", "chunk_sums_f32_4"]
    assert launched(found) == [*names, "joined_sums_f32"]
    once = np.arange(0, 640, 2)
    run(GatherGrad((640, 8)), once[::-1].copy(), floats("f32", 320, 8), units=64)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements(axis: int) -> None:
    shape = (9, 20, 11)
    taken = tuple(35 if i == axis else n - i for i, n in enumerate(shape))
    at = indices(shape[axis], *taken, kind=np.int32 if axis else np.int64)
    run(GatherElements(axis), floats("f32", *shape), at)
    run(GatherElementsGrad(shape, axis), at, floats("f32", *taken), units=64)
    for how in ("none", "add", "mul", "max", "min"):
        run(ScatterElements(axis, how), floats("f32", *shape), at, floats("f32", *taken, seed=1))


@pytest.mark.parametrize("batch", [0, 1])
def test_coordinates(batch: int) -> None:
    shape = (6, 9, 5, 12)
    low = indices(5, 6, 70, 2) if batch else indices(6, 7, 60, 2)
    run(GatherND(batch), floats("f32", *shape), low)
    rows = shape[batch + 2 :]
    run(GatherNDGrad(shape, batch), low, floats("f32", *low.shape[:2], *rows), units=64)
    if not batch:
        for how in ("none", "add", "mul", "max", "min"):
            run(ScatterND(how), floats("f32", *shape), low, floats("f32", *low.shape[:2], *rows, seed=1))
        run(ScatterND("add"), np.arange(12), np.array([[3], [3], [-1]]), np.array([5, 6, 7]))
        run(ScatterND(), numbers("u8", 30, 5), indices(30, 40, 1), numbers("u8", 40, 5, seed=1))


def test_a_session_says_which_trouble_there_was() -> None:
    block, feed = case_block(Case(Gather(), (floats("f32", 6, 4), np.array([6]))))
    program = Program(block, {})
    executor = Executor(EmulatedCUDAPlace())
    with pytest.raises(JobError, match=r"^index 6 is outside an axis of 6 rows, in\n    %y0: f32\[1,4\] = Gather"):
        executor.run(program, feed, list(block.outputs))
    good = executor.run(program, {**feed, "x1": np.array([5])}, list(block.outputs))[0]
    np.testing.assert_array_equal(good[0], feed["x0"][5])


def skipping(index: int) -> list[tuple[Any, tuple, tuple]]:
    """Operators, their inputs with an index that is out of range, and others that give the same without it."""
    at, elements = np.array([0, index, 2]), np.array([[0, index, 2, 1], [0, 1, 2, 3]])
    good, fits = np.array([0, 1, 2]), np.array([[0, 1, 2, 1], [0, 1, 2, 3]])
    x, dy, put = floats("f32", 6, 4), floats("f32", 3, 4), floats("f32", 2, 4)
    none, low, keep = dy.copy(), put.copy(), put.copy()
    none[1], low[0, 1], keep[0, 1] = 0, -np.inf, 0
    return [
        (GatherGrad((6, 4)), (at, dy), (good, none)),
        (GatherNDGrad((6, 4)), (at[:, None], dy), (good[:, None], none)),
        (GatherElementsGrad((6, 4)), (elements, put), (fits, keep)),
        (ScatterND("add"), (x, at[:, None], dy), (x, good[:, None], none)),
        (ScatterND(), (x, at[:, None], dy), (x, at[::2, None], dy[::2])),
        (ScatterElements(), (x, elements, put), (x, fits, put)),  # the place has another update, which comes later
        (ScatterElements(reduction="max"), (x, elements, put), (x, fits, low)),
    ]


@pytest.mark.parametrize("index", [6, -7])
def test_an_index_out_of_range_is_skipped_and_reported(index: int) -> None:
    given = device()
    for op, inputs, others in skipping(index):
        found = cuda_cases.bound(Case(op, inputs), given)[0].run(0x55)[0]
        assert given.download(given.status).tolist() == [INDEX_OUTSIDE, index, 6]
        given.upload(given.status, np.zeros(3, np.int64))
        np.testing.assert_array_equal(found, cuda_cases.reference(Case(op, others))[0], err_msg=op.name)


@pytest.mark.parametrize("index", [6, -7])
def test_nothing_is_taken_for_an_index_out_of_range(index: int) -> None:
    at, x, given = np.array([0, index, 2]), floats("f32", 6, 4), device()
    for op, indices_ in ((Gather(), at), (GatherND(), at[:, None]), (GatherElements(), np.tile(at[:, None], (1, 4)))):
        found = cuda_cases.bound(Case(op, (x, indices_)), given)[0].run(0x55)[0]
        assert given.download(given.status).tolist() == [INDEX_OUTSIDE, index, 6]
        given.upload(given.status, np.zeros(3, np.int64))
        np.testing.assert_array_equal(found, [x[0], np.zeros(4), x[2]])


def test_a_part_of_256_rows() -> None:
    """Its last row and what lies in another rank's part are apart where they are sorted, though their last eight bits
    are alike."""
    rows = np.tile([255, 511, 0, 255], 6)
    run(RowSums((512, 2), 2, 0, 512), rows, floats("f32", 24, 2), units=8)
