"""Convolutions with 3x3 windows by Winograd's algorithm against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from convolution_cases import CASES, case, check, in_form, run
from kernel_cases import applied

from recompute.runtime.cpu.convolution import winograd, winograd_weight
from recompute.runtime.cpu.providers import convolution
from recompute.runtime.shared.convolved import convolved

pytestmark = pytest.mark.skipif(bool(convolution.unavailable()), reason=convolution.unavailable() or "there")
PROVIDER = convolution.ConvolutionProvider()

#: pads (rows and columns before, behind), x [n, c, h, w], w [m, c, 3, 3]
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "even": ((1, 1, 1, 1), (2, 32, 14, 14), (48, 32, 3, 3)),
    "odd": ((1, 1, 1, 1), (3, 16, 7, 9), (16, 16, 3, 3)),
    "no padding": ((0, 0, 0, 0), (1, 24, 9, 8), (16, 24, 3, 3)),
    "more padding": ((2, 2, 2, 2), (1, 16, 5, 6), (40, 16, 3, 3)),
    "padding of one side": ((0, 2, 1, 0), (2, 16, 6, 5), (16, 16, 3, 3)),
    "padding larger than the window": ((4, 0, 0, 5), (1, 16, 4, 4), (16, 16, 3, 3)),
    "one result": ((0, 0, 0, 0), (1, 16, 3, 3), (16, 16, 3, 3)),
    "lanes left over": ((1, 1, 1, 1), (1, 53, 6, 6), (69, 53, 3, 3)),
    "sums of several blocks": ((1, 1, 1, 1), (1, 300, 5, 5), (56, 300, 3, 3)),
    "many tiles": ((1, 1, 1, 1), (1, 16, 48, 40), (16, 16, 3, 3)),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """All shapes are computed by the algorithm, however small; the cases of `SHAPES` are there."""
    monkeypatch.setattr(winograd, "ENOUGH", 1)
    for name, (pads, x, w) in SHAPES.items():
        monkeypatch.setitem(CASES, name, ({"pads": pads}, x, w))
    convolution._plan.cache_clear()
    yield monkeypatch
    convolution._plan.cache_clear()


def _bound(name: str, kind: str) -> tuple[Any, list[np.ndarray]]:
    form, arrays = in_form(*case(name, kind))
    return applied(form, *arrays), arrays


@pytest.mark.parametrize("kind", ["output", "output bias", "input", "weight", "transpose bias"])
@pytest.mark.parametrize("name", SHAPES)
def test_against_the_definition(name: str, kind: str, taken: Any) -> None:
    check(PROVIDER, name, kind, ulps=2.0, mixed=True)
    plan = convolution._planned(_bound(name, kind)[0])[1]
    assert isinstance(plan, winograd_weight.WinogradWeight if kind == "weight" else winograd.Winograd)


@pytest.mark.parametrize("kind", ["output bias", "input", "weight"])
@pytest.mark.parametrize("name", ["lanes left over", "sums of several blocks"])
def test_blocks_of_channels_do_not_change_the_bits(name: str, kind: str, taken: Any) -> None:
    op, arrays = _bound(name, kind)
    before = run(PROVIDER, op, arrays)
    taken.setattr(winograd, "_FACTORS", 4096)
    taken.setattr(winograd, "_GROUP", 5)
    taken.setattr(winograd_weight, "_SUMS", 4096)
    convolution._plan.cache_clear()
    plan = convolution._planned(op)[1]
    assert isinstance(plan, (winograd.Winograd, winograd_weight.WinogradWeight))
    assert plan.block < (plan.channels if isinstance(plan, winograd_weight.WinogradWeight) else plan.width)
    assert np.array_equal(run(PROVIDER, op, arrays), before)


@pytest.mark.parametrize("name", ["even", "odd", "sums of several blocks"])
def test_a_gradient_of_several_chunks_of_tiles(name: str, taken: Any) -> None:
    taken.setattr(winograd_weight, "_FACTORS", (1 << 15, 1 << 15))
    taken.setattr(winograd_weight, "TERMS", 3)
    winograd_weight._program.cache_clear()
    try:
        check(PROVIDER, name, "weight", ulps=2.0, mixed=True)
        plan = convolution._planned(_bound(name, "weight")[0])[1]
        assert plan.chunk < plan.tiling.count
    finally:
        winograd_weight._program.cache_clear()


@pytest.mark.parametrize("name", ["3x3 stride", "7x7 image", "groups", "depthwise", "uneven", "one axis", "three axes"])
def test_other_windows_are_not_taken(name: str, taken: Any) -> None:
    for kind in ("output", "input", "weight"):
        c = convolved(_bound(name, kind)[0])
        assert c is not None
        assert not winograd.suits(c)


def test_few_tiles_are_not_worth_it() -> None:
    c = convolved(_bound("many", "output")[0])
    assert c is not None
    assert winograd.tiling(c).count == 2 * 4 * 4
    assert not winograd.suits(c)
