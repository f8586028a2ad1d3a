"""Convolutions for CUDA, on the emulated device, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from convolution_cases import CASES, KINDS, applied, case, in_form, reference
from cuda_cases import Bound, opened

from recompute.language import kernels
from recompute.language.types import DTYPES
from recompute.runtime.cuda.convolution import columns as convolution_columns
from recompute.runtime.cuda.convolution import products as convolution_products
from recompute.runtime.cuda.convolution import text as convolution_text
from recompute.runtime.cuda.convolution import weigh_text
from recompute.runtime.cuda.device.kernel import Buffer, Product
from recompute.runtime.cuda.kernels import convolution as kernels_convolution
from recompute.runtime.cuda.providers import cuda_tf32
from recompute.runtime.shared.convolved import convolved
from recompute.testing import Case, case_block

#: where the tests run
DEVICE: list[Any] = []
columns_plans = (convolution_columns.ColumnsPlan, convolution_columns.ColumnsWeighPlan)
EPS = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-24, "f64": 2.0**-53}


@pytest.fixture(autouse=True)
def device(cuda: Any) -> None:
    """Opens the place that all of a test runs on."""
    DEVICE[:] = [opened(cuda)]


def run(op: Any, arrays: list[np.ndarray], by: str = "", *, again: bool = False) -> np.ndarray:
    """What our own kernels give, or those of the provider `by`; `again`: from other rubbish, the last threads first."""
    case = Case(op, tuple(arrays))
    bound = case_block(case)[0].operators[0]
    by = by or kernels.accepting(("cuda",), bound)
    assert kernels.provider(by).accepts(bound)
    if hasattr(DEVICE[0], "backwards"):
        DEVICE[0].backwards = again
    return Bound(case, bound, kernels.provider(by), DEVICE[0]).run(0x55 if again else 0xFF)[0]


def check(name: str, kind: str, *, last: bool = False, dtype: str = "f32", by: str = "") -> None:
    """Sums of n terms err by at most n + 3 roundings of the sum of absolute values; the bits are the same again."""
    op, arrays = case(name, kind)
    arrays = [a.astype(DTYPES[dtype]) for a in arrays]
    exact, size = reference(op, arrays), reference(op, [abs(a) for a in arrays])
    attributes, _, ws = CASES[name]
    terms = int(np.prod(ws[1:])) if "output" in kind else int(np.prod(ws)) // attributes.get("group", 1) // ws[1]
    if kind == "weight":
        terms = arrays[1].size // ws[0]
    if last:
        op, arrays = in_form(op, arrays)
    found = run(op, arrays, by)
    assert np.array_equal(found, run(op, arrays, by, again=True))
    if last and kind != "weight":
        found = np.moveaxis(found, -1, 1)
    added = EPS["f32" if dtype in ("f16", "bf16") else dtype]
    assert np.all(abs(found.astype(np.float64) - exact) <= ((terms + 3) * added + 2 * EPS[dtype]) * size)


@pytest.mark.parametrize("kind", KINDS)
def test_pointwise_groups_and_many_images(kind: str, monkeypatch: Any) -> None:
    cases = {
        "1x1 groups": ({"group": 2}, (7, 6, 3, 2), (8, 3, 1, 1)),
        "1x1 one image": ({}, (1, 6, 3, 4), (8, 6, 1, 1)),
    }
    monkeypatch.setattr(convolution_products, "ENOUGH", 6)  # three parts
    kernels_convolution.plan.cache_clear()
    for name, found in cases.items():
        monkeypatch.setitem(CASES, name, found)
        for last in (False, True):
            check(name, kind, last=last)


@pytest.mark.parametrize("kind", ["output bias", "input", "weight"])
@pytest.mark.parametrize("name", list(CASES))
def test_convolutions(name: str, kind: str) -> None:
    check(name, kind)


@pytest.mark.parametrize("kind", ["output bias", "input", "weight"])
@pytest.mark.parametrize("name", ["3x3", "3x3 stride", "7x7 image", "uneven", "groups", "depthwise", "depthwise stride",
                                  "depth multiplier", "one axis", "three axes"])  # fmt: skip
def test_channels_last(name: str, kind: str) -> None:
    check(name, kind, last=True)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", ["3x3 odd stride", "left over", "depthwise line"])
def test_without_a_bias_and_with_one(name: str, last: bool) -> None:
    check(name, "output", last=last)
    check(name, "transpose bias", last=last)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["3x3", "3x3 odd stride", "1x1 stride", "groups", "three axes", "big step", "depthwise"]
)
def test_halves(name: str, kind: str, last: bool) -> None:
    check(name, kind, last=last, dtype="f16")
    check(name, kind, last=last, dtype="bf16")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["output bias", "input", "weight"])
def test_halves_one_image_at_a_time(kind: str, last: bool, monkeypatch: Any) -> None:
    cases = {
        "stride": ({"pads": (1, 1, 1, 1), "strides": (2, 2)}, (3, 32, 8, 16), (32, 32, 3, 3)),
        "even": ({"pads": (1, 1, 1, 1)}, (3, 64, 4, 6), (48, 32, 3, 3)),
    }
    cases["even"][0]["group"] = 2
    monkeypatch.setattr(convolution_columns, "_SOME", 1)
    kernels_convolution.plan.cache_clear()
    for name, found in cases.items():
        monkeypatch.setitem(CASES, name, found)
        op, arrays = case(name, kind)
        op, arrays = in_form(op, arrays) if last else (op, arrays)
        known = convolved(applied(op, *arrays))
        assert known is not None
        for dtype in ("bf16", "f32"):
            assert isinstance(kernels_convolution.plan(known, dtype, tf32=True), columns_plans)
            check(name, kind, last=last, dtype=dtype, by=cuda_tf32.CudaTf32.name if dtype == "f32" else "")
    kernels_convolution.plan.cache_clear()


@pytest.mark.parametrize("kind", ["output bias", "input", "weight"])
def test_few_terms_many_elements(kind: str, monkeypatch: Any) -> None:
    """Sums in one part, written by fours; and as if 32 bits were not enough for elements."""
    monkeypatch.setitem(CASES, "few", ({"pads": (1, 1, 1, 1)}, (2, 8, 6, 8), (20, 8, 3, 3)))
    monkeypatch.setitem(CASES, "few depthwise", ({"pads": (1, 1, 1, 1), "group": 8}, (2, 8, 6, 8), (8, 1, 3, 3)))
    for last in (False, True):
        check("few", kind, last=last)
        check("few depthwise", kind, last=last)
    for module in (convolution_text, weigh_text):
        monkeypatch.setattr(module, "sum_kind", lambda *sizes: "long long")
    convolution_text.gather.cache_clear()
    weigh_text.weigh.cache_clear()
    for last in (False, True):
        check("few", kind, last=last)
    convolution_text.gather.cache_clear()
    weigh_text.weigh.cache_clear()


def test_tf32_is_for_what_cublas_multiplies() -> None:
    by = cuda_tf32.CudaTf32()
    for name, kind, wanted in (("3x3", "output", True), ("1x1", "weight", True), ("depthwise", "input", False),
                               ("small groups", "output", False)):  # fmt: skip
        op, arrays = case(name, kind)
        bound = applied(op, *arrays)
        assert by.accepts(bound) == wanted
        assert not by.accepts(applied(op, *(a.astype(np.float64) for a in arrays)))
        if wanted:
            calls = by.bind(bound, *_handed(bound, by))
            assert all(c.tf32 for c in calls if isinstance(c, Product))
            assert any(isinstance(c, Product) for c in calls)


def _handed(op: Any, by: Any) -> list[list[Buffer]]:
    parts = [v.type for v in op.inputs], [v.type for v in op.outputs], by.scratch(op)
    return [[Buffer(1 << 20, t) for t in part] for part in parts]
