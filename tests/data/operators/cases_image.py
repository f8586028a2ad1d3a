"""Images and signals."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from spec import Const, Table, Uniform, const, floats
from torch import Tensor

SPECS = Table()
add = SPECS.add

# --------------------------------------------------------------------------------------
# Images


def resize(
    note: str, shape: tuple[int, ...], size: tuple[int, ...], mode: str, by_scale: bool = False, **options: Any
) -> None:
    """A Resize to `size` (of the spatial dimensions), given as sizes or as scales."""
    theirs = {"linear": ("linear", "bilinear", "trilinear")[len(size) - 1], "cubic": "bicubic", "nearest": "nearest"}[
        mode
    ]
    align = options.get("coordinate_transformation_mode") == "align_corners"
    scales = [b / a for a, b in zip(shape[2:], size, strict=True)]
    more = {} if mode == "nearest" else {"align_corners": align}
    if by_scale:
        tail: list[Any] = [None, floats(1, 1, *scales)]
        run = lambda x: F.interpolate(x, scale_factor=scales, mode=theirs, **more)  # noqa: E731
    else:
        tail = [None, None, const(*shape[:2], *size)]
        run = lambda x: F.interpolate(x, size, mode=theirs, **more)  # noqa: E731
    if mode == "nearest":
        options |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if mode == "cubic":
        options["cubic_coeff_a"] = -0.75
    add("Resize", note, [shape, *tail], run, mode=mode, **options)


P, ALIGN = (1, 2, 4, 5), {"coordinate_transformation_mode": "align_corners"}
resize("nearest, twice", P, (8, 10), "nearest", True)
resize("nearest, sizes", P, (7, 3), "nearest")
resize("linear, twice", P, (8, 10), "linear", True)
resize("linear, sizes", P, (7, 3), "linear")
resize("linear, to one", P, (1, 8), "linear")
resize("linear, align_corners", P, (7, 9), "linear", **ALIGN)
resize("linear, align_corners, smaller", P, (2, 3), "linear", **ALIGN)
resize("linear, scales 1.5", (1, 2, 4, 6), (6, 9), "linear", True)
resize("linear, 1d", (2, 3, 5), (9,), "linear")
resize("linear, 3d", (1, 2, 3, 2, 3), (5, 4, 2), "linear")
resize("cubic, twice", P, (8, 10), "cubic", True)
resize("cubic, sizes", P, (7, 3), "cubic")
resize("cubic, align_corners", P, (7, 9), "cubic", **ALIGN)
for mode in ("bilinear", "bicubic"):
    add(
        "Resize",
        f"{mode}, antialias",
        [(1, 2, 6, 8), None, None, const(1, 2, 3, 5)],
        lambda x, m=mode: F.interpolate(x, (3, 5), mode=m, antialias=True),
        mode="linear" if mode == "bilinear" else "cubic",
        antialias=1,
        exclude_outside=1,
        cubic_coeff_a=-0.5,
    )

for note, size in [("twice", (8, 10)), ("sizes", (7, 3))]:
    add(
        "Resize",
        f"nearest-exact, {note}",
        [P, None, None, const(1, 2, *size)],
        lambda x, s=size: F.interpolate(x, s, mode="nearest-exact"),
        mode="nearest",
        nearest_mode="round_prefer_ceil",
    )

GRID = Uniform((2, 3, 4, 2), -1.3, 1.3)
for mode, theirs in [("linear", "bilinear"), ("nearest", "nearest"), ("cubic", "bicubic")]:
    for padding in ("zeros", "border", "reflection"):
        for align in (0, 1):
            add("GridSample", f"{mode}, {padding}, align_corners {align}", [(2, 2, 4, 5), GRID],
                lambda x, g, m=theirs, p=padding, a=align: F.grid_sample(x, g, m, p, bool(a)),
                mode=mode, padding_mode=padding, align_corners=align)  # fmt: skip
add("GridSample", "volumes", [(1, 2, 3, 3, 4), Uniform((1, 2, 2, 3, 3), -1.2, 1.2)],
    lambda x, g: F.grid_sample(x, g, align_corners=False))  # fmt: skip
add("GridSample", "volumes, nearest", [(1, 2, 3, 3, 4), Uniform((1, 2, 2, 3, 3), -1.2, 1.2)],
    lambda x, g: F.grid_sample(x, g, "nearest", align_corners=True), mode="nearest", align_corners=1)  # fmt: skip
for align in (0, 1):
    add("AffineGrid", f"2d, align_corners {align}", [(2, 2, 3), const(2, 3, 4, 5)],
        lambda t, a=align: F.affine_grid(t, [2, 3, 4, 5], bool(a)), align_corners=align)  # fmt: skip
add("AffineGrid", "3d", [(1, 3, 4), const(1, 2, 2, 3, 2)], lambda t: F.affine_grid(t, [1, 2, 2, 3, 2], False))
add("Col2Im", "", [(1, 8, 12), const(4, 5), const(2, 2)], lambda x: F.fold(x, (4, 5), 2))
add("Col2Im", "strides, pads, dilations", [(2, 12, 9), const(5, 6), const(2, 3)],
    lambda x: F.fold(x, (5, 6), (2, 3), (2, 1), 1, 2), strides=[2, 2], pads=[1] * 4, dilations=[2, 1])  # fmt: skip

# --------------------------------------------------------------------------------------
# Signals: complex numbers are pairs of real ones


def pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous())


add("DFT", "real", [(2, 8, 1), None, Const(np.array(1))], lambda x: torch.view_as_real(torch.fft.fft(x[..., 0])))
add(
    "DFT",
    "one-sided",
    [(2, 8, 1), None, Const(np.array(1))],
    lambda x: torch.view_as_real(torch.fft.rfft(x[..., 0])),
    onesided=1,
)
add("DFT", "complex", [(2, 6, 2), None, Const(np.array(1))], lambda x: torch.view_as_real(torch.fft.fft(pairs(x))))
add(
    "DFT",
    "inverse",
    [(2, 6, 2), None, Const(np.array(1))],
    lambda x: torch.view_as_real(torch.fft.ifft(pairs(x))),
    inverse=1,
)
add("STFT", "window", [(2, 16, 1), Const(np.array(4)), Uniform((8,), 0.2, 1)],
    lambda x, w: torch.view_as_real(torch.stft(x[..., 0], 8, 4, 8, w, False, return_complex=True).transpose(1, 2)),
    onesided=1)  # fmt: skip
