"""Convolutions in all their forms, as the kernels' tests apply them."""

from __future__ import annotations

from typing import Any

import numpy as np
from kernel_cases import applied

from recompute.language.ir import Operator
from recompute.language.layouts import to_last
from recompute.language.types import TensorType
from recompute.ops.channels_last import channels_last_form
from recompute.ops.convolution.conv import Conv, ConvGradInput, ConvGradWeight
from recompute.ops.convolution.transposed import ConvTranspose
from recompute.runtime.cpu.device import native

#: attributes, x [n, c, spatial...], w [m, c / group, kernel...]
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "3x3": ({"pads": (1, 1, 1, 1)}, (2, 32, 14, 14), (48, 32, 3, 3)),
    "3x3 stride": ({"pads": (1, 1, 1, 1), "strides": (2, 2)}, (2, 32, 14, 14), (32, 32, 3, 3)),
    "3x3 odd stride": ({"pads": (1, 1, 1, 1), "strides": (2, 3)}, (1, 16, 13, 17), (32, 16, 3, 3)),
    "1x1": ({}, (2, 64, 7, 9), (32, 64, 1, 1)),
    "1x1 many": ({}, (2, 128, 7, 9), (32, 128, 1, 1)),
    "1x1 stride": ({"strides": (2, 2)}, (2, 32, 14, 14), (64, 32, 1, 1)),
    "7x7 image": ({"pads": (3, 3, 3, 3), "strides": (2, 2)}, (1, 3, 30, 30), (64, 3, 7, 7)),
    "uneven": ({"pads": (0, 1, 2, 0), "dilations": (2, 1)}, (2, 5, 9, 8), (7, 5, 3, 2)),
    "left over": ({"strides": (3, 2)}, (1, 8, 12, 10), (16, 8, 2, 3)),
    "big step": ({"strides": (4, 3)}, (1, 16, 13, 11), (16, 16, 2, 2)),
    "groups": ({"group": 4, "pads": (1, 1, 1, 1)}, (2, 64, 9, 9), (32, 16, 3, 3)),
    "small groups": ({"group": 3}, (2, 6, 5, 5), (9, 2, 2, 2)),
    "depthwise": ({"group": 40, "pads": (1, 1, 1, 1)}, (2, 40, 9, 9), (40, 1, 3, 3)),
    "depthwise stride": (
        {"group": 32, "pads": (1, 1, 1, 1), "strides": (2, 2)},
        (2, 32, 11, 11),
        (32, 1, 3, 3),
    ),
    "depthwise volume": (
        {"group": 70, "pads": (1, 0, 2, 0, 1, 1), "strides": (2, 1, 3), "dilations": (1, 2, 1)},
        (2, 70, 4, 5, 7),
        (70, 1, 2, 2, 3),
    ),
    "depthwise line": ({"group": 3, "pads": (4, 0)}, (2, 3, 5), (3, 1, 4)),
    "depth multiplier": ({"group": 8, "pads": (2, 2, 2, 2), "dilations": (2, 2)}, (1, 8, 9, 9), (16, 1, 3, 3)),
    "one axis": ({"pads": (2, 1), "dilations": (2,)}, (2, 16, 20), (24, 16, 3)),
    "three axes": ({"pads": (1, 0, 1, 1, 0, 1), "strides": (1, 2, 1)}, (2, 8, 4, 6, 5), (16, 8, 3, 2, 3)),
    "many": ({"pads": (1, 1, 1, 1)}, (2, 256, 7, 7), (256, 256, 3, 3)),
    "3x3 many pixels": ({"pads": (1, 1, 1, 1)}, (2, 128, 16, 16), (128, 128, 3, 3)),
    "wide": ({"pads": (1, 1, 1, 1)}, (1, 160, 7, 7), (96, 160, 3, 3)),
}
KINDS = ("output", "output bias", "input", "weight", "transpose bias")


def case(name: str, kind: str) -> tuple[Any, list[np.ndarray]]:
    """The operator in ONNX's layout with its inputs, float32."""
    attributes, xs, ws = CASES[name]
    conv = Conv(**attributes)
    f32 = "f32"
    ys = conv.infer(TensorType(f32, xs), TensorType(f32, ws))[0].shape
    rng = np.random.default_rng(3)
    x, w, y = (rng.standard_normal(s, np.float32) for s in (xs, ws, ys))
    fields = conv.options()
    if kind == "output":
        return conv, [x, w]
    if kind == "output bias":
        return conv, [x, w, rng.standard_normal(ws[0], np.float32)]
    if kind == "weight":
        return ConvGradWeight(kernel=ws[2:], **fields), [x, y]
    if kind == "input":
        return ConvGradInput(shape=xs[2:], **fields), [w, y]
    transpose = ConvTranspose(**fields)
    return transpose, [y, w, rng.standard_normal(ws[1] * conv.group, np.float32)]


def run(provider: Any, op: Operator, arrays: list[np.ndarray]) -> np.ndarray:
    """What the kernel gives, between buffers that say so when something else is written."""
    guard = 64
    raw = np.full(op.outputs[0].size + 2 * guard, np.nan, np.float32)  # type: ignore[union-attr]
    out = raw[guard:-guard].reshape(op.outputs[0].shape)  # type: ignore[union-attr]
    spare, ends = [], []
    for t in provider.scratch(op):
        whole = np.full(t.nbytes + 2 * guard, 255, np.uint8)
        start = -whole.ctypes.data % 64
        spare.append(whole[start : start + t.nbytes].view(t.numpy).reshape(t.shape))
        ends.append(whole[start + t.nbytes :])
    table = native.Table(provider.bind(op, arrays, [out], spare))
    table.run()
    table.check()
    first = out.copy()
    table.run()
    assert np.array_equal(first, out)
    assert np.isnan(raw[:guard]).all()
    assert np.isnan(raw[-guard:]).all()
    assert all((e == 255).all() for e in ends)
    return first


def in_form(op: Any, arrays: list[np.ndarray]) -> tuple[Any, list[np.ndarray]]:
    """The channels-last form with its inputs."""
    form = channels_last_form(op)
    assert form is not None
    turned = [
        np.ascontiguousarray(a.transpose(to_last(a.ndim))) if i in form.activations else a for i, a in enumerate(arrays)
    ]
    return form, turned


def check(provider: Any, name: str, kind: str, *, last: bool = True, ulps: float = 1.0, mixed: bool = False) -> None:
    """Against float64: n products in any order err by at most (n + 3) ε times the sum of their absolute values.

    `mixed`: of the largest of these sums, where elements are added to others before they are multiplied.
    """
    op, arrays = case(name, kind)
    exact, size = reference(op, arrays), reference(op, [abs(a) for a in arrays])
    size = size.max() if mixed else size
    attributes, _, ws = CASES[name]
    terms = int(np.prod(ws[1:])) if "output" in kind else int(np.prod(ws)) // attributes.get("group", 1) // ws[1]
    if kind == "weight":
        terms = arrays[1].size // ws[0]
    if last:
        op, arrays = in_form(op, arrays)
    bound = applied(op, *arrays)
    assert provider.accepts(bound)
    found = run(provider, bound, arrays)
    if last and kind != "weight":
        found = np.moveaxis(found, -1, 1)
    assert np.all(abs(found - exact) <= ulps * (terms + 3) * np.finfo(np.float32).eps * size)


def reference(op: Any, arrays: list[np.ndarray]) -> np.ndarray:
    """The operator's own numerics in float64."""
    wide = [a.astype(np.float64) for a in arrays]
    bound = applied(op, *wide)
    out = np.empty(bound.outputs[0].shape)  # type: ignore[union-attr]
    op.compute(wide, [out], [np.empty(t.shape, t.numpy) for t in bound.workspace()])
    return out
