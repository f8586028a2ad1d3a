"""Convolutions by this project's own kernels against float64."""

from __future__ import annotations

import pytest
from convolution_cases import CASES, KINDS, check

from recompute.runtime.cpu import convolution

pytestmark = pytest.mark.skipif(bool(convolution.unavailable()), reason=convolution.unavailable() or "there")
PROVIDER = convolution.ConvolutionProvider()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(CASES))
def test_convolutions(name: str, kind: str) -> None:
    check(PROVIDER, name, kind)
