"""Constants that are computed when a model is loaded have the same bits on every processor, or are left to kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from recompute.importer.fold import Known, fold
from recompute.importer.limits import Budget
from recompute.language import kernels
from recompute.language.types import DTYPES, dtype_to_onnx


def folded(op: str, *ins: Any, opset: int = 17, **attributes: Any) -> np.ndarray | None:
    """What a node of constants becomes; None: it stays in the step."""
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(ins)]
    node = onnx.helper.make_node(op, names, ["y"], **attributes)
    known = {n: Known(np.asarray(x), "folded") for n, x in zip(names, ins, strict=True) if n}
    done = fold(node, known, opset, Budget())
    return None if done is None else done["y"].array


def bits(x: np.ndarray | None) -> list[int]:
    assert x is not None
    return x.view(f"u{x.itemsize}").ravel().tolist()


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_the_larger_of_two_zeros(kind: str) -> None:
    """The last of equal ones; a bound only where x is beyond it.  17 elements: NumPy takes vectors for the first 16."""
    plus, minus, nan = (np.full(17, v, DTYPES[kind]) for v in (0.0, -0.0, np.nan))
    for op in ("Max", "Min"):
        assert bits(folded(op, plus, minus)) == bits(folded(op, plus, plus, minus)) == bits(minus)
        assert bits(folded(op, minus, plus)) == bits(plus)
        for pair in ((plus, nan), (nan, plus)):
            assert np.isnan(folded(op, *pair)).all()
    below, above = plus - 1, plus + 1
    assert bits(folded("Max", below, above)) == bits(above) and bits(folded("Min", below, above)) == bits(below)
    zero = plus[:1].reshape(())
    assert bits(folded("Relu", minus)) == bits(minus) and bits(folded("Relu", below)) == bits(plus)
    assert bits(folded("Clip", minus, zero, zero)) == bits(folded("Clip", minus, None, zero)) == bits(minus)
    assert bits(folded("Clip", above, None, zero)) == bits(folded("Clip", below, zero)) == bits(plus)


def test_bounds_as_attributes() -> None:
    x = np.array([-3.0, -0.0, 0.5, 9.0], "f4")
    assert bits(folded("Clip", x, opset=6, min=0.0, max=6.0)) == bits(np.array([0.0, -0.0, 0.5, 6.0], "f4"))


@pytest.mark.parametrize("to", ["i8", "u8", "i32", "u32", "i64", "u64"])
@pytest.mark.parametrize("kind", ["bf16", "f32", "f64"])
def test_numbers_that_an_integer_cannot_hold(to: str, kind: str) -> None:
    limits = np.iinfo(DTYPES[to])
    x = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, 2.75, -2.75, 2.0**63], DTYPES[kind])
    want = [limits.max, limits.min, 0, limits.max, limits.min, 2, max(-2, limits.min), min(2**63, limits.max)]
    done = folded("Cast", x, to=dtype_to_onnx(to))
    assert done is not None and done.dtype == DTYPES[to] and done.tolist() == want
    like = np.zeros(1, DTYPES[to])
    assert bits(folded("CastLike", x, like)) == bits(done)


def test_ranges_of_floats() -> None:
    """ONNX's formula, each operation rounded: start + i · step."""
    start, limit, step = (np.array(v, "f4") for v in (0.7, 9.3, 0.1))
    want = [np.float32(np.float32(0.7) + np.float32(np.float32(i) * np.float32(0.1))) for i in range(86)]
    assert bits(folded("Range", start, limit, step)) == bits(np.array(want, "f4"))
    assert folded("Range", limit, start, step).size == 0
    assert folded("Range", start, limit, start * 0) is None


@pytest.mark.parametrize(
    ("op", "x"),
    [("Exp", np.ones(3, "f4")), ("Exp", np.ones(3, DTYPES["bf16"])), ("HannWindow", np.array(9)),
     ("ReduceSum", np.ones(9, "f8"))],
)  # fmt: skip
def test_what_numpy_leaves_to_a_processor_is_computed_in_the_step(
    op: str, x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in 16 bits, and floats of whole numbers."""
    monkeypatch.setattr(kernels, "_by_numpy", [])
    assert folded(op, x) is not None and op in kernels.by_numpy()
    monkeypatch.setattr(kernels, "_portable", [True])
    assert folded(op, x) is None


def test_scattered_extremes_are_computed_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_portable", [True])
    ins = np.zeros(3, "f4"), np.array([0, 1]), np.ones(2, "f4")
    assert folded("ScatterElements", *ins, opset=18, reduction="max") is None
    assert folded("ScatterElements", *ins, opset=18, reduction="add") is not None
