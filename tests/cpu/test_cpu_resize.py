"""Kernels of nearest resizing against the operators' own numerics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import applied
from test_cpu_pooling import PROVIDER, run

from recompute.language.op import op_class
from recompute.ops.vision.resize import Resize, ResizeGrad
from recompute.ops.vision.resize_maps import NEAREST, coordinates, nearest
from recompute.runtime.cpu.device import jit
from recompute.runtime.shared.kernels import resize
from recompute.testing import cases

pytestmark = pytest.mark.skipif(bool(jit.unavailable()), reason=jit.unavailable() or "there")

#: shapes before and after
SIZES = [
    ((2, 3, 4, 5), (2, 3, 8, 10)),
    ((2, 4, 5, 3), (2, 8, 10, 3)),  # channels last
    ((2, 3, 7, 6), (2, 3, 3, 2)),  # smaller: some are not read
    ((2, 3, 4, 5), (2, 3, 12, 7)),
    ((1, 1, 3, 1), (1, 1, 7, 1)),
    ((3, 5), (3, 9)),
    ((5, 3), (9, 4)),
]


def check(op: Any, array: np.ndarray) -> None:
    """The same bits as the operator itself."""
    o = applied(op, array)
    assert PROVIDER.accepts(o)
    (found,), (wanted,) = run(o, array), run(o, array, own=True)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("mode", NEAREST)
@pytest.mark.parametrize(("before", "after"), SIZES)
def test_sizes(before: tuple[int, ...], after: tuple[int, ...], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resize, "ENOUGH", 0)
    g = np.random.default_rng(0)
    for coordinate in ("asymmetric", "half_pixel", "align_corners"):
        fields = {"nearest_mode": mode, "coordinate_transformation_mode": coordinate}
        for kind in (np.float32, np.uint8, np.float16):
            check(Resize(shape=after, **fields), (g.standard_normal(before) * 9).astype(kind))
        whole = g.integers(-9, 9, after)  # sums of whole numbers are exact in any order
        for kind in (np.float32, np.float64):
            check(ResizeGrad(shape=before, **fields), whole.astype(kind))


@pytest.mark.parametrize("name", ["Resize", "ResizeGrad"])
def test_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resize, "ENOUGH", 0)
    checked = 0
    for case in cases(op_class(name)):
        if PROVIDER.accepts(applied(case.op, *case.inputs)):
            check(case.op, case.inputs[0])
            checked += 1
    assert checked >= 2


@pytest.mark.parametrize("shape", [(4, 32, 16, 16), (4, 16, 16, 32)])
def test_doubling_has_the_same_bits(shape: tuple[int, ...]) -> None:
    """Large enough by itself; the gradient's four terms are added in the same order."""
    doubled = tuple(n * 2 if n == 16 else n for n in shape)
    g = np.random.default_rng(0)
    fields = {"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    check(Resize(shape=doubled, **fields), g.standard_normal(shape).astype(np.float32))
    check(ResizeGrad(shape=shape, **fields), g.standard_normal(doubled).astype(np.float32))


def test_others_are_left_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((2, 3, 4, 5), np.float32)
    assert not PROVIDER.accepts(applied(Resize(shape=(2, 3, 8, 10)), x))  # small
    monkeypatch.setattr(resize, "ENOUGH", 0)
    assert not PROVIDER.accepts(applied(Resize(shape=(2, 3, 8, 10), mode="linear"), x))
    assert not PROVIDER.accepts(applied(Resize(shape=(2, 6, 8, 10)), x))
    assert not PROVIDER.accepts(applied(Resize(shape=(2, 6, 4, 10)), x))
    back = ResizeGrad(
        shape=(2, 3, 4, 5), scales=(1.0, 1.0, -2.0, 2.0), coordinate_transformation_mode="half_pixel_symmetric"
    )
    assert not PROVIDER.accepts(applied(back, np.zeros((2, 3, 8, 10), np.float32)))


def test_ties_but_for_rounding() -> None:
    """(4 + 0.5) / 0.3 - 0.5 is 14.5, also where 0.3 is a float32; numbers of ONNX Runtime 1.32 (and of its #28291)."""
    for rule, want in (("round_prefer_ceil", [1, 5, 8, 11, 15, 18]), ("round_prefer_floor", [1, 4, 8, 11, 14, 18])):
        at = coordinates("half_pixel", 20, 6, (6 / 20, 0.0, 1.0), np.float32)
        assert nearest(rule, at, 20).tolist() == want
