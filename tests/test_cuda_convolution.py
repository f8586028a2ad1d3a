"""Convolutions for CUDA, on the emulated device, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from convolution_cases import CASES, KINDS, applied, case, in_form, reference

import recompute as rc
from recompute.kernels import accepting
from recompute.runtime import CUDAPlace, EmulatedCUDAPlace
from recompute.runtime.cpu.convolved import convolved
from recompute.runtime.cuda import convolution_columns, convolution_products, emulator, kernels_convolution
from recompute.runtime.lowering import providers
from recompute.testing import Draw, case_block
from recompute.types import DTYPES

pytestmark = pytest.mark.skipif(not emulator.compiler(), reason="no C++ compiler")
columns_plans = (convolution_columns.ColumnsPlan, convolution_columns.ColumnsWeighPlan)
EPS = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-24, "f64": 2.0**-53}


def run(op: Any, arrays: list[np.ndarray], *, backwards: bool = False) -> np.ndarray:
    block, feed = case_block(Draw("").case(op, *arrays))
    assert accepting(providers(CUDAPlace()), block.operators[0])
    found = rc.Executor(EmulatedCUDAPlace(backwards=backwards)).run(rc.Program(block, {}), feed, list(block.outputs))
    return np.asarray(found[0])


def check(name: str, kind: str, *, last: bool = False, dtype: str = "f32") -> None:
    """Sums of n terms err by at most n + 3 roundings of the sum of absolute values; backwards gives the same bits."""
    op, arrays = case(name, kind)
    arrays = [a.astype(DTYPES[dtype]) for a in arrays]
    exact, size = reference(op, arrays), reference(op, [abs(a) for a in arrays])
    attributes, _, ws = CASES[name]
    terms = int(np.prod(ws[1:])) if "output" in kind else int(np.prod(ws)) // attributes.get("group", 1) // ws[1]
    if kind == "weight":
        terms = arrays[1].size // ws[0]
    if last:
        op, arrays = in_form(op, arrays)
    found = run(op, arrays)
    assert np.array_equal(found, run(op, arrays, backwards=True))
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


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(CASES))
def test_convolutions(name: str, kind: str, last: bool) -> None:
    check(name, kind, last=last)


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
        known = convolved(applied(op, arrays))
        assert known is not None
        assert isinstance(kernels_convolution.plan(known, "bf16"), columns_plans)
        check(name, kind, last=last, dtype="bf16")
    kernels_convolution.plan.cache_clear()
