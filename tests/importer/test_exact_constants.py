"""Constants that are computed before a step, and weights that are drawn, have the same bits on every processor, or are
left to kernels."""

from __future__ import annotations

import hashlib
import math
from decimal import Context, Decimal, localcontext
from typing import Any

import numpy as np
import onnx
import pytest

from recompute import parse
from recompute.importer.fold import Known, fold
from recompute.importer.limits import Budget
from recompute.language import draws, kernels
from recompute.language.types import DTYPES, dtype_to_onnx
from recompute.models.common import Init
from recompute.ops.contrib import more
from recompute.passes.matching.known import Known as Contents
from recompute.passes.patterns.find_stable import find_stable


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


def test_a_mask_of_half_precision_is_infinite(recwarn: pytest.WarningsRecorder) -> None:
    y = folded("Cast", np.float32(-1e9), to=onnx.TensorProto.FLOAT16)
    assert y is not None and y == -np.inf and not recwarn.list


def test_bounds_as_attributes() -> None:
    x = np.array([-3.0, -0.0, 0.5, 9.0], "f4")
    assert bits(folded("Clip", x, opset=6, min=0.0, max=6.0)) == bits(np.array([0.0, -0.0, 0.5, 6.0], "f4"))
    for stray in ({"max": 6.0}, {"note": 1}):  # the operands are the bounds from opset 11 on
        y = folded("Clip", x, np.float32(-1), np.float32(1), opset=13, **stray)
        assert y is None or y.tolist() == [-1.0, 0.0, 0.5, 1.0]


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


@pytest.mark.parametrize("name", ["Exp", "Sqrt", "Max"])
def test_passes_know_what_all_processors_compute_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes numbers, such as attention's scale, from constants that are computed in the step."""
    block = parse(f"""program known {{
  const %x: f32[] = [-0.0]
  %y: f32[] = {name}(%x{", %x" if name == "Max" else ""})
  output %y
}}""")
    value = block.operators[-1].outputs[0]
    assert math.copysign(1, Contents(block, {}).number(value) or 0) == 1
    monkeypatch.setattr(kernels, "_portable", [True])
    assert (value in Contents(block, {})) == (name != "Exp")


def test_a_logarithm_of_a_pattern_is_rounded_once() -> None:
    """glibc's log(95.97) is not; 2ˣ + 95.97ʸ."""
    powers = parse("""program powers {
  input %x: f64[3]
  input %y: f64[3]
  const %p: f64[] = [2.0]
  const %q: f64[] = [95.97]
  %px: f64[3] = Pow(%p, %x)
  %qy: f64[3] = Pow(%q, %y)
  %sum: f64[3] = Add(%px, %qy)
  %z: f64[3] = Log(%sum)
  output %z
}""")
    with localcontext(Context(prec=3)):  # a thread's own
        block = find_stable(powers)
    numbers = [float(c.numpy().reshape(())) for c in block.constants]
    assert float(Decimal.from_float(95.97).ln()) in numbers, block


def test_buckets_of_positions_need_no_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """At distance 16 of 8 · 16^(k / 8) the last bit of one would decide."""
    apart = np.arange(-300, 300)
    want, log = more._bucket(apart, 32, 128, both=True), np.log
    assert want[apart.tolist().index(-16)] == 10 and want[apart.tolist().index(-15)] == 9
    for way in (0, 9):
        monkeypatch.setattr(np, "log", lambda x, way=way: np.nextafter(log(x), np.float32(way)))
        assert (more._bucket(apart, 32, 128, both=True) == want).all()


def test_draws_are_rounded_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform ones as NumPy gives them without fused instructions; the digest of normal ones is every machine's."""
    assert (draws.uniform(draws.generator(3, "w"), 0.3, (99,)) == draws.generator(3, "w").uniform(-0.3, 0.3, 99)).all()
    assert (draws.normal(draws.generator(3, "w"), (9,)) == draws.generator(3, "w").standard_normal(9)).all()
    monkeypatch.setattr(kernels, "_portable", [True])
    x = draws.normal(draws.generator(3, "w"), (100, 500))
    assert abs(x.mean()) < 0.02 and abs(x.var() - 1) < 0.02 and abs((x**4).mean() - 3) < 0.15
    assert abs((abs(x) > 2).mean() - 0.0455) < 0.004
    scaled = Init("normal", 0.5).draw((100, 500), seed=3, name="w")
    assert (scaled == x.astype("f4") * np.float32(0.5)).all(), "the zoo's"
    assert hashlib.sha256(x.tobytes()).hexdigest()[:16] == "5692421d84e2978e"
