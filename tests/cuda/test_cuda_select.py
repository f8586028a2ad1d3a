"""CUDA kernels whose elements find their own source, on the emulated device."""

from __future__ import annotations

import cuda_cases
import numpy as np
import pytest
from test_cuda_index import floats
from test_cuda_moves import KINDS, launched, numbers, run

import recompute as rc
from recompute.language.program import Program
from recompute.language.samples import Case
from recompute.language.types import TensorType
from recompute.ops.convolution.fold import Col2Im, Im2Col
from recompute.ops.elementwise.bitcast import BitCast
from recompute.ops.indexing.select import Eye, OneHot, ReverseSequence, Trilu
from recompute.testing import case_block

pytestmark = cuda_cases.needs_device


@pytest.mark.parametrize("kind", KINDS)
def test_triangles_and_diagonals(kind: str) -> None:
    for k in (0, 7, -3, 90):
        run(Trilu(k), numbers(kind, 2, 3, 41, 37))
        run(Trilu(k, 0), numbers(kind, 41, 37))
        run(Eye(kind, (41, 37), k))


@pytest.mark.parametrize("kind", KINDS)
def test_one_hot(kind: str) -> None:
    for axis in (0, 1, -1):
        for index in (np.int64, np.int32, np.float32):
            at = np.random.default_rng(0).integers(-40, 40, (9, 21)).astype(index)
            run(OneHot(30, axis, 2.0, 5.0, kind), at)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_turned_round(kind: str) -> None:
    lengths = np.array([0, 1, 17, 9, 16])
    run(ReverseSequence(), numbers(kind, 17, 5, 33), lengths)
    run(ReverseSequence(0, 1), numbers(kind, 5, 17, 3, 4), lengths)


def test_bits() -> None:
    assert launched(run(BitCast("i32"), floats("f32", 40, 30))) == ["Copy"]


@pytest.mark.parametrize(
    "op",
    [
        Im2Col((13, 15), (3, 3), pads=(1, 1, 1, 1)),
        Im2Col((13, 15), (2, 3), strides=(2, 3), pads=(1, 0, 0, 1), dilations=(3, 2)),
        Im2Col((90,), (4,), strides=(2,)),
        Im2Col((5, 6, 7), (2, 1, 3), strides=(1, 2, 1)),
    ],
)
def test_columns(op: Im2Col) -> None:
    image = (2, 5, *op.image)
    for kind in ("f32", "f64", "i32"):
        x = floats(kind, *image) if kind != "i32" else numbers("f32", *image).astype(np.int32)
        run(op, x)
        columns = op.infer(TensorType(kind, image))[0].shape
        run(Col2Im(**vars(op)), x.reshape(-1).repeat(20)[: int(np.prod(columns))].reshape(columns), units=64)


@pytest.mark.parametrize("op", [Im2Col((2,) * 4, (1,) * 4), Col2Im((2,) * 4, (1,) * 4)])
def test_windows_of_four_axes(op: Im2Col | Col2Im) -> None:
    """What no kernel takes is computed otherwise."""
    x = floats("f32", *((1, 3, 2, 2, 2, 2) if isinstance(op, Im2Col) else (1, 3, 16)))
    block, feed = case_block(Case(op, (x,), want=1))
    places = [rc.Executor(place).run(Program(block), feed, list(block.outputs))[0] for place in ("cpu", "emulated")]
    assert np.array_equal(*places)
