"""CUDA kernels that move elements with indices of 64 bits, which only huge tensors take: made to, here."""

from __future__ import annotations

import cuda_cases
import numpy as np
import pytest
from test_cuda_index import floats, indices
from test_cuda_moves import launched, numbers, run

from recompute.ops.approximation.slopes import SlopeCodes
from recompute.ops.convolution.fold import Col2Im, Im2Col
from recompute.ops.indexing.gather import Gather, GatherGrad
from recompute.ops.indexing.scatter import ScatterND
from recompute.ops.indexing.select import Trilu
from recompute.ops.loss.ctc import CTCLoss
from recompute.ops.pooling.average import AveragePool, AveragePoolGrad
from recompute.ops.pooling.windows import MaxPool
from recompute.ops.random.draws import Dropout
from recompute.ops.shape.join import Concat, Split
from recompute.ops.shape.pad import Pad
from recompute.ops.shape.reshape import Transpose
from recompute.ops.shape.slice import Slice
from recompute.ops.vision.resize import Resize, ResizeGrad
from recompute.runtime.cuda.code import python_kernels, sorting, strided
from recompute.runtime.cuda.kernels import transpose as kernels_transpose

pytestmark = cuda_cases.needs_device


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor counts as huge."""
    for module in (kernels_transpose, python_kernels, sorting, strided):
        monkeypatch.setattr(module, "WIDE", 1)


def test_moves() -> None:
    assert launched(run(Transpose((0, 2, 1)), numbers("f32", 3, 40, 33))) == ["transpose_32_1_wide"]
    assert launched(run(Transpose((1, 0, 2)), numbers("f16", 3, 40, 16))) == ["gather_c_c_c_128_wide"]
    parts = [numbers("f32", 5, n) for n in (3, 8, 1)]
    assert launched(run(Concat(1), *parts)) == ["copy_4_pieces_wide"]
    run(Split((3, 8, 1), 1), numbers("f32", 5, 12))
    run(Slice((1, -1), (9, -20), (0, 1), (2, -3)), numbers("f32", 11, 40))
    run(Pad((1, 2, 0, 3)), numbers("f64", 7, 9))
    run(Trilu(2), numbers("f32", 3, 9, 17))


def test_numbers() -> None:
    run(Gather(1), numbers("f32", 3, 20, 12), indices(20, 31))
    run(GatherGrad((3, 20, 12), 1), indices(20, 100), floats("f32", 3, 100, 12), units=64)
    run(ScatterND(), numbers("f32", 30, 5), indices(30, 40, 1), numbers("f32", 40, 5, seed=1))


def test_kernels_of_python() -> None:
    """Sizes of 64 bits."""
    x = floats("f32", 6, 11)
    assert launched(run(Dropout(ratio=0.3, seed=7), x, np.array(3), units=0))[0].endswith("_wide")
    run(SlopeCodes(bounds=(-0.5, 0.5)), x, units=0)
    run(CTCLoss(), floats("f32", 7, 2, 5), indices(4, 2, 3) % 4 + 1, None, units=256)


def test_windows() -> None:
    x, fields = floats("f32", 2, 5, 9, 11), {"kernel_shape": (3, 3), "strides": (2, 1), "pads": (1, 1, 1, 1)}
    run(MaxPool(**fields), x, units=0)
    run(AveragePool(**fields), x, units=16)
    run(AveragePoolGrad(shape=(9, 11), **fields), floats("f32", 2, 5, 5, 11), units=16)
    run(Im2Col((9, 11), (3, 2)), x)
    run(Col2Im((9, 11), (3, 2)), floats("f32", 2, 30, 70), units=64)
    run(Resize(shape=(2, 5, 20, 13), mode="linear"), x, units=64)
    run(ResizeGrad(shape=(2, 5, 4, 3), mode="linear"), x, units=64)
    run(Resize(shape=(2, 5, 20, 13)), np.ascontiguousarray(x))
