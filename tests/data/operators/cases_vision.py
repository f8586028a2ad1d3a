"""Operators that torchvision has and PyTorch has not: regions of interest, deformable convolutions."""

from __future__ import annotations

from typing import Any

import torch
from spec import Table, Uniform, exact
from torch import Tensor
from torchvision import ops

SPECS = Table()
add = SPECS.add
X = (2, 3, 7, 8)
REGIONS = exact([[0.3, 0.6, 6.2, 5.1], [2.0, 1.0, 5.0, 6.0], [-1.4, 2.2, 9.7, 8.3], [3.1, 3.2, 3.6, 3.9]])
WHICH = exact([0, 1, 1, 0])


def align(note: str, scale: float = 1.0, ratio: int = 2, size: tuple[int, int] = (2, 3), **options: Any) -> None:
    """A RoiAlign by averages; `half_pixel` is ONNX's default."""
    aligned = options.get("coordinate_transformation_mode", "half_pixel") == "half_pixel"

    def run(x: Tensor, regions: Tensor, which: Tensor) -> Tensor:
        rows = torch.cat([which[:, None].to(x.dtype), regions], 1)
        return ops.roi_align(x, rows, size, scale, ratio if ratio else -1, aligned)

    add("RoiAlign", note, [X, REGIONS, WHICH], run, fixed=(1,), output_height=size[0], output_width=size[1],
        sampling_ratio=ratio, spatial_scale=scale, **options)  # fmt: skip


align("two samples")
align("adaptive", ratio=0)
align("half scale", 0.5, 3)
align("output_half_pixel", coordinate_transformation_mode="output_half_pixel")
align("output_half_pixel, adaptive, scale", 0.75, 0, (3, 2), coordinate_transformation_mode="output_half_pixel")
PARTS = exact([[0, 0, 1, 5, 6], [1, 2, 0, 7, 4], [1, 3, 3, 3, 3], [0, 1, 2, 12, 10]]).astype("float32")
for scale in (1.0, 0.5):
    add("MaxRoiPool", f"scale {scale}", [X, PARTS], lambda x, r, s=scale: ops.roi_pool(x, r, (2, 3), s), fixed=(1,),
        pooled_shape=[2, 3], spatial_scale=scale)  # fmt: skip


def deform(note: str, shapes: list[tuple[int, ...]], groups: int = 1, **options: Any) -> None:
    """A DeformConv; shapes: image, kernel, offsets, bias or (), mask or ()."""
    more = {"stride": options.get("strides", [1, 1]), "dilation": options.get("dilations", [1, 1])}
    more["padding"] = options.get("pads", [0, 0])[:2]
    given = [s for s in shapes[3:] if s]

    def run(x: Tensor, w: Tensor, offset: Tensor, *rest: Tensor) -> Tensor:
        parts = list(rest)
        bias = parts.pop(0) if len(shapes) > 3 and shapes[3] else None
        return ops.deform_conv2d(x, offset, w, bias, mask=parts[0] if parts else None, **more)

    inputs: list[Any] = [shapes[0], shapes[1], Uniform(shapes[2], -1.3, 1.3)]
    inputs += [s if s else None for s in shapes[3:]] if given else []
    add("DeformConv", note, inputs, run, offset_group=groups, **options)


deform("plain", [(2, 2, 5, 6), (3, 2, 3, 3), (2, 18, 3, 4)])
deform("bias, pads", [(1, 2, 4, 5), (3, 2, 3, 3), (1, 18, 4, 5), (3,)], pads=[1, 1, 1, 1])
deform("mask, strides", [(2, 2, 5, 6), (3, 2, 2, 3), (2, 12, 2, 2), (3,), (2, 6, 2, 2)], strides=[2, 2])
deform("mask without bias, dilations", [(1, 2, 6, 6), (2, 2, 2, 2), (1, 8, 4, 4), (), (1, 4, 4, 4)], dilations=[2, 2])
deform("groups", [(1, 4, 4, 4), (4, 2, 2, 2), (1, 8, 3, 3)], group=2)
deform("two groups of offsets", [(1, 4, 4, 4), (2, 4, 2, 2), (1, 16, 3, 3), (), (1, 8, 3, 3)], 2)
