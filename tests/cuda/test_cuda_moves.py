"""CUDA kernels that move elements, on the emulated device: shapes that take every path, all sizes of elements."""

from __future__ import annotations

import functools
from typing import Any

import cuda_cases
import numpy as np
import pytest

from recompute.language.op import Op
from recompute.language.types import TensorType
from recompute.ops.shape.join import Concat, Split, Tile
from recompute.ops.shape.pad import Pad, PadGrad
from recompute.ops.shape.reshape import Fill as Filled
from recompute.ops.shape.reshape import Reshape, Transpose
from recompute.ops.shape.slice import Slice, SliceGrad
from recompute.runtime.cuda.device.kernel import Copy, Fill, Launch
from recompute.runtime.cuda.expanded import Expanded
from recompute.runtime.cuda.providers.cuda import family_of
from recompute.testing import Case

pytestmark = cuda_cases.needs_device

#: element types of 1, 2, 4 and 8 bytes
KINDS = ("u8", "f16", "f32", "f64")


@functools.cache
def device() -> Any:
    return cuda_cases.device()


def numbers(kind: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Elements that differ, as far as their type lets them."""
    t = TensorType(kind, shape)
    drawn = np.random.default_rng(seed).integers(0, 1 << 16, shape)
    return (drawn % 251 if kind == "u8" else drawn / 64).astype(t.numpy)


def run(
    op: Op, *inputs: np.ndarray | None, want: int | None = None, units: float | None = None, expanded: bool = False
) -> list[cuda_cases.Bound]:
    """Checks an operator by a family of its own, or as it is `expanded`; its bindings."""
    case = Case(op, inputs, want)
    family = family_of(cuda_cases.operator(case))
    assert family is not None and isinstance(family, Expanded) is expanded
    found = cuda_cases.bound(case, device())
    cuda_cases.check(case, found, units=units)
    return found


def launched(found: list[cuda_cases.Bound]) -> list[str]:
    """Names of the calls."""
    return [c.kernel.name if isinstance(c, Launch) else type(c).__name__ for c in found[0].calls]


# -- transposes -------------------------------------------------------------------------------------------------------

TRANSPOSES = {
    "matrix": ((67, 101), (1, 0)),
    "aligned": ((64, 128), (1, 0)),
    "heads": ((2, 9, 3, 16), (0, 2, 1, 3)),
    "keys": ((2, 3, 33, 20), (0, 1, 3, 2)),
    "images": ((2, 3, 9, 11), (0, 2, 3, 1)),
    "pixels": ((2, 9, 11, 40), (0, 3, 1, 2)),
    "narrow": ((3, 300), (1, 0)),
    "ones": ((40, 1, 35), (2, 1, 0)),
    "apart": ((3, 4, 17, 5, 10), (4, 1, 2, 0, 3)),
    "stays": ((2, 3, 4), (0, 1, 2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRANSPOSES)
def test_transpose(name: str, kind: str) -> None:
    shape, perm = TRANSPOSES[name]
    run(Transpose(perm), numbers(kind, *shape))


def test_tiles_and_rows_are_told_apart() -> None:
    def names(name: str) -> list[str]:
        shape, perm = TRANSPOSES[name]
        return launched(run(Transpose(perm), numbers("f32", *shape)))

    assert names("keys") == ["transpose_32_1"]
    assert names("heads") == ["gather_c_c_c_c_128"]
    assert names("stays") == ["Copy"]


# -- joining and cutting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_concat_and_split(kind: str) -> None:
    sizes = (5, 1, 0, 16, 7)
    for axis, rest in ((0, (3, 4)), (1, (3, 4)), (2, (2, 3)), (1, (6, 64))):
        shapes = [(*rest[:axis], n, *rest[axis:]) for n in sizes]
        run(Concat(axis), *(numbers(kind, *s, seed=i) for i, s in enumerate(shapes)))
        run(Split(sizes, axis), numbers(kind, *rest[:axis], sum(sizes), *rest[axis:]))


def test_many_parts_take_few_launches() -> None:
    parts = [numbers("f32", 3, 1 + i % 3, seed=i) for i in range(70)]
    assert launched(run(Concat(1), *parts)) == ["copy_32_pieces"] * 3
    whole = [numbers("f32", 1200 + i, 3, seed=i) for i in range(4)]
    assert launched(run(Concat(0), *whole)) == ["copy_4_pieces"]


SLICES = {
    "rows": ((2,), (9,), (0,), None),
    "columns": ((3,), (21,), (1,), None),
    "aligned": ((4,), (36,), (1,), None),
    "box": ((1, 2, 3), (9, 30, 6), (0, 1, 2), None),
    "steps": ((9, -1, 1), (-20, -60, 99), (0, 1, 2), (-2, -3, 2)),
    "one": ((4, 5), (5, 6), (1, 2), None),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SLICES)
def test_slice_and_its_gradient(name: str, kind: str) -> None:
    starts, ends, axes, steps = SLICES[name]
    shape = (11, 40, 8)
    op = Slice(starts, ends, axes, steps)
    run(op, numbers(kind, *shape))
    part = op.infer(TensorType(kind, shape))[0].shape
    run(SliceGrad(starts, ends, axes, steps, shape=shape), numbers(kind, *part))


@pytest.mark.parametrize("kind", KINDS)
def test_padding(kind: str) -> None:
    x = numbers(kind, 3, 5, 8, 12)
    run(Pad((0, 0, 1, 1, 0, 0, 2, 2), value=3.0), x)
    run(Pad((0, 4, 0, 0, 0, 4, 0, 0)), x)
    run(Pad((1, -1, 0, -3, -1, 2, 0, 4), value=1.5), x)
    for mode in ("reflect", "edge", "wrap"):
        run(Pad((0, 3, 0, 7, 1, 0, 0, 5), mode), x)


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_padding_undone(mode: str) -> None:
    for shape, pads in (
        ((3, 5, 8, 12), (0, 3, 0, 7, 1, 0, 0, 5)),
        ((2, 1, 4), (1, 3, 0, 2, 4, 0)),
        ((5, 2), (9, 5, 14, 1)),
        ((40, 33), (0, 1, 0, 1)),
    ):
        dy = Pad(pads, mode).infer(TensorType("f32", shape))[0].shape
        for kind in ("f32", "f64", "f16") if shape == (5, 2) else ("f32",):
            run(PadGrad(pads, mode), numbers(kind, *dy), units=64, expanded=True)


@pytest.mark.parametrize("kind", KINDS)
def test_repeating_and_filling(kind: str) -> None:
    run(Tile((2, 1, 3)), numbers(kind, 3, 5, 16))
    run(Tile((1, 300)), numbers(kind, 2, 7))
    for value in (0.0, 1.0, 2.5):
        found = run(Filled(kind, (1300, 3), value))
        assert isinstance(found[0].calls[0], Fill if not value or kind == "u8" else Launch)
    found = run(Reshape((40, 3)), numbers(kind, 30, 4))
    assert isinstance(found[0].calls[0], Copy)
