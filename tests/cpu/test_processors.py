"""Which kernels are faster on which family of processors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from convolution_cases import case, in_form
from kernel_cases import applied

from recompute.language import kernels
from recompute.language.kernels import PROVIDERS, accepting
from recompute.ops.linear.products import MatMul
from recompute.runtime.cpu import PREFERRED, processors, register_all
from recompute.runtime.cpu.processors import Processor, convolution_class, nearest, product_class
from recompute.runtime.cpu.providers import onednn
from recompute.runtime.shared.convolved import convolved

register_all()
NAMES = tuple(n for n in PREFERRED if n in PROVIDERS)
there = pytest.mark.skipif(bool(onednn.unavailable()), reason=onednn.unavailable() or "there")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Ratios of this processor, none at first; what was chosen before is forgotten."""
    ratios: dict[str, float] = {}
    monkeypatch.setattr(processors, "processor", lambda: Processor("here", "", ratios))
    monkeypatch.setattr(kernels, "_answers", {})
    yield ratios


def test_the_nearest_family() -> None:
    """Itself, then the same vectors, then the same vendor."""
    known = ["amd-avx2", "intel-avx512"]
    found = {n: nearest(n, known) for n in ("amd-avx2", "intel-avx2", "amd-avx512", "intel-sse", "aarch64")}
    assert found == {"amd-avx2": "amd-avx2", "intel-avx2": "amd-avx2", "amd-avx512": "intel-avx512",
                     "intel-sse": "intel-avx512", "aarch64": "amd-avx2"}  # fmt: skip
    assert nearest("amd-avx2", []) == ""


def test_files() -> None:
    """Every family's file says where it was measured, and holds shares of classes."""
    assert {"amd-avx2", "intel-avx512"} <= set(processors.families())
    kinds = ("output ", "input ", "weight ", "product", "thin product", "long product", "deep product")
    for name in processors.families():
        found = processors.read(name)
        assert found.about
        assert all(c.startswith(kinds) and 0 < ratio < 100 for c, ratio in found.ratios.items())
    assert processors.processor().family in processors.families()


def test_classes() -> None:
    """Of convolutions by kind, form and channels; of products by what lies transposed and their form."""
    wanted = {
        ("3x3", "output"): "output spatial narrow",
        ("1x1", "input"): "input pointwise narrow",
        ("1x1 stride", "weight"): "weight pointwise strided narrow",
        ("depthwise", "weight"): "weight depthwise",
    }
    for (name, kind), text in wanted.items():
        c = convolved(applied(*_form(name, kind)))
        assert c is not None
        assert convolution_class(c) == text
    assert product_class(512, 512, 512, ta=False, tb=True) == "product nt"
    assert product_class(512, 512, 4, ta=True, tb=False) == "thin product tn"
    assert product_class(256, 30000, 256, ta=False, tb=True) == "long product nt"
    assert product_class(256, 256, 30000, ta=False, tb=False) == "deep product nn"


def _form(name: str, kind: str) -> tuple:
    op, arrays = in_form(*case(name, kind))
    return op, *arrays


@there
@pytest.mark.parametrize("kind", ["output", "input", "weight"])
def test_convolutions_go_where_they_are_faster(kind: str, table: dict[str, float]) -> None:
    """To oneDNN where nothing is known, to our kernels where the table says so, and they are among the chosen ones."""
    bound = applied(*_form("3x3", kind))
    assert accepting(NAMES, bound) == "onednn"
    table[f"{kind} spatial narrow"] = 0.5
    kernels._answers.clear()
    assert accepting(NAMES, bound) == "convolution"
    assert accepting(("onednn",), bound) == "onednn"
    table[f"{kind} spatial narrow"] = 1.5
    kernels._answers.clear()
    assert accepting(NAMES, bound) == "onednn"


@there
@pytest.mark.skipif("blas" not in PROVIDERS, reason="NumPy's BLAS cannot be called")
def test_products_go_where_they_are_faster(table: dict[str, float]) -> None:
    x = np.ones((64, 64), np.float32)
    bound = applied(MatMul(transA=1), x, x)
    assert accepting(NAMES, bound) == "onednn"
    table["product tn"] = 0.5
    kernels._answers.clear()
    assert accepting(NAMES, bound) == "blas"
    other = applied(MatMul(), x, x)
    assert accepting(NAMES, other) == "onednn"
    assert onednn._routine(64, 64, 64, True, False) is None
    assert onednn._routine(64, 64, 64, False, False) is not None
