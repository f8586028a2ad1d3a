"""Convolutions by this project's own kernels against float64."""

from __future__ import annotations

from typing import Any

import pytest
from convolution_cases import CASES, KINDS, check

from recompute.runtime.cpu.convolution import weight
from recompute.runtime.cpu.providers import convolution

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
