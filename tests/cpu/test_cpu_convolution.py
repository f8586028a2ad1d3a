"""Convolutions by this project's own kernels against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from convolution_cases import CASES, KINDS, check

from recompute.ops.convolution.numerics import Geometry
from recompute.ops.window import Window
from recompute.runtime.cpu.convolution import depthwise, weight
from recompute.runtime.cpu.providers import convolution
from recompute.runtime.shared.convolved import Convolved

pytestmark = pytest.mark.skipif(bool(convolution.unavailable()), reason=convolution.unavailable() or "there")
PROVIDER = convolution.ConvolutionProvider()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(CASES))
def test_convolutions(name: str, kind: str) -> None:
    check(PROVIDER, name, kind)


@pytest.mark.parametrize("kind", ["output bias", "input", "weight"])
@pytest.mark.parametrize("name", list(CASES))
def test_blocks_of_a_few_rows(name: str, kind: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(convolution, "_BLOCK", 4096)
    monkeypatch.setattr(convolution, "_SPAN", 4096)
    monkeypatch.setattr(convolution, "_SUMMED_BLOCK", 4096)
    monkeypatch.setattr(weight, "_BLOCK", 4096)
    convolution._plan.cache_clear()
    try:
        check(PROVIDER, name, kind)
    finally:
        convolution._plan.cache_clear()


@pytest.mark.parametrize("name", ["3x3", "3x3 stride", "7x7 image", "uneven", "three axes"])
def test_panels_of_several_blocks_of_terms(name: str, monkeypatch: Any) -> None:
    """A gradient's panels hold more pixels than a sum has terms, and blocks end in the middle of them."""
    monkeypatch.setattr(weight, "TERMS", 5)
    monkeypatch.setattr(weight, "_PANELS", (1 << 12, 1 << 12))
    convolution._plan.cache_clear()
    weight._program.cache_clear()
    try:
        check(PROVIDER, name, "weight")
    finally:
        convolution._plan.cache_clear()
        weight._program.cache_clear()


def test_gradients_of_groups_whose_channels_are_spread(monkeypatch: Any) -> None:
    """256 channels of output are copied, so that pixels are not 1 KiB apart; the last group has panels of its own."""
    case = ({"group": 2, "pads": (1, 1, 1, 1)}, (2, 6, 5, 5), (256, 3, 3, 3))
    monkeypatch.setitem(CASES, "groups, 256 channels", case)
    check(PROVIDER, "groups, 256 channels", "weight")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "size, kernel, s, d, pads",
    [(9, 3, 1, 1, (1, 1)), (11, 4, 2, 3, (2, 0)), (13, 5, 4, 2, (3, 3)), (5, 3, 6, 4, (9, 2)), (7, 2, 1, 9, (5, 6))],
)
def test_what_a_depthwise_result_reads(
    size: int, kernel: int, s: int, d: int, pads: tuple[int, int], backward: bool
) -> None:
    """Tap k of output o reads input o·s - b + k·d (ONNX's Conv); the gradient is the same pairs seen from the input."""
    out = (size + sum(pads) - (kernel - 1) * d - 1) // s + 1
    w = Window((size,), (out,), (kernel,), (s,), (d,), pads[:1])
    pairs = [(o, k, o * s - pads[0] + k * d) for o in range(out) for k in range(kernel)]
    pairs = [(o, k, i) for o, k, i in pairs if 0 <= i < size]
    seen = sorted((i, k, o) for o, k, i in pairs) if backward else pairs
    r = depthwise.reach(w, 0, backward=backward)
    found = [
        (p, int(k) + q * r.steps[0], int(at) + q * r.steps[1])
        for p, ((k, at), n) in enumerate(zip(r.first, r.count, strict=True))
        for q in range(n)
    ]
    assert found == seen


@pytest.mark.parametrize("kind", ["output", "input", "weight"])
@pytest.mark.parametrize("shape", [(40_000,), (40_000, 1)])
def test_tables_of_a_long_filter_are_small(shape: tuple[int, ...], kind: str) -> None:
    """A filter of 256 taps over 40,000 samples has five million pairs of tap and source, of which none is listed."""
    kernel = (256, 1)[: len(shape)]
    out = (shape[0] - 255, 1)[: len(shape)]
    ones, zeros = (1,) * len(shape), (0,) * len(shape)
    window = Window(shape, out, kernel, ones, ones, zeros)
    c = Convolved(kind, Geometry(2, 1, 1, 1, window), last=True, bias=False)
    plan = depthwise.DepthWeight(c) if kind == "weight" else depthwise.DepthSums(c)
    tables = [a for a in plan.rows(backward=kind == "input") if isinstance(a, np.ndarray)]
    assert sum(a.nbytes for a in tables) <= 3 * 8 * 40_000 + 100
