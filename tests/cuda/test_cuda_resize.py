"""CUDA kernels that resize, on the emulated device: all modes, up and down, one axis and several."""

from __future__ import annotations

from typing import Any

import cuda_cases
import numpy as np
import pytest
from test_cuda_index import floats
from test_cuda_moves import launched, numbers, run

from recompute.ops.vision.resize import Resize, ResizeGrad

pytestmark = cuda_cases.needs_device

PLACES = (
    "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric", "tf_half_pixel_for_nn",
)  # fmt: skip
#: input and output
SHAPES = {
    "up": ((2, 3, 6, 5), (2, 3, 20, 23)),
    "down": ((1, 5, 19, 16), (1, 5, 8, 5)),
    "one": ((2, 3, 1, 1), (2, 3, 9, 7)),
    "to one": ((1, 2, 5, 9), (1, 2, 1, 3)),
    "last": ((7, 11), (7, 40)),
    "volume": ((1, 2, 3, 4, 5), (1, 2, 6, 5, 11)),
}


def both(fields: dict[str, Any], small: tuple[int, ...], large: tuple[int, ...], kind: str = "f32") -> None:
    """Resize, and its gradient."""
    run(Resize(shape=large, **fields), floats(kind, *small), units=64)
    run(ResizeGrad(shape=small, **fields), floats(kind, *large), units=64)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("place", PLACES)
def test_coordinates(place: str, mode: str) -> None:
    for small, large in (SHAPES[n] for n in (SHAPES if place == "half_pixel" else ("up", "to one"))):
        both({"mode": mode, "coordinate_transformation_mode": place}, small, large)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f64"])
def test_other_floats(kind: str) -> None:
    both({"mode": "linear"}, *SHAPES["up"], kind)
    both({"mode": "nearest"}, *SHAPES["up"], kind)


def test_weights() -> None:
    for mode in ("linear", "cubic"):
        both({"mode": mode, "antialias": 1}, *SHAPES["down"])
        both({"mode": mode, "exclude_outside": 1}, *SHAPES["up"])
        both({"mode": mode, "antialias": 1, "exclude_outside": 1}, *SHAPES["down"])
    both({"mode": "cubic", "cubic_coeff_a": -0.5, "scales": (1.0, 1.0, 3.4, 4.7)}, *SHAPES["up"])


@pytest.mark.parametrize("rule", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_nearest(rule: str) -> None:
    fields = {"nearest_mode": rule, "coordinate_transformation_mode": "asymmetric"}
    both({**fields, "scales": (1.0, 1.0, 2.0, 2.0)}, (2, 3, 6, 5), (2, 3, 12, 10))
    both(fields, *SHAPES["down"])
    for kind in ("u1", "i8"):
        run(Resize(shape=(2, 3, 7, 10), **fields), numbers("u8", 2, 3, 4, 5).astype(np.dtype(kind)), units=0)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_crops(mode: str) -> None:
    """Parts inside of the input and beyond both ends; forwards, a part that is turned round."""
    fields = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize"}
    for shapes in ("up", "down", "to one"):
        small, large = SHAPES[shapes]
        for roi in ((0, 0, 0.2, 0.1, 1, 1, 0.7, 0.6), (0, 0, -0.3, 0.4, 1, 1, 1.4, 1e9)):
            both({**fields, "roi": roi}, small, large)
            run(Resize(shape=large, extrapolation_value=2.5, roi=roi, **fields), floats("f16", *small), units=64)
        turned = Resize(shape=large, extrapolation_value=3.0, roi=(0, 0, 0.9, 0, 1, 1, 0.1, 1.2), **fields)
        run(turned, floats("f32", *small), units=64)
    if mode == "nearest":
        op = Resize(shape=(1, 2, 5, 7), extrapolation_value=7.0, roi=(0, 0, -0.5, 0, 1, 1, 1, 1.5), **fields)
        run(op, numbers("i64", 1, 2, 4, 5), units=0)


def test_one_launch_an_axis() -> None:
    found = run(Resize(shape=(1, 1, 8, 6), mode="linear"), floats("f16", 1, 1, 4, 3), units=64)
    assert launched(found) == ["along_f16_float_1x0x0_0x0x1", "along_float_f16_1x0x0_0x0x1"]


@pytest.mark.parametrize("rule", ["round_prefer_floor", "round_prefer_ceil"])
def test_ties_but_for_rounding(rule: str) -> None:
    both({"mode": "nearest", "nearest_mode": rule}, (1, 1, 1, 20), (1, 1, 1, 6))
