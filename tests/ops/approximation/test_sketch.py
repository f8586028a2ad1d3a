"""Sketch: unbiased, as variable as its formula says, the same S everywhere, and the same results from all kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

import recompute as rc
from recompute.language.ir import Block
from recompute.language.types import TensorType
from recompute.ops.approximation.drawn import bits_of, choose
from recompute.ops.approximation.sketch import KINDS, Sketch
from recompute.ops.approximation.variance import batch_variance, sketch_variance
from recompute.ops.random.philox import stream
from recompute.runtime.cpu.device import native
from recompute.testing import Case, case_block, evaluate

DRAWS = 10_000


def applied(op: Sketch, x: np.ndarray, *steps: int) -> np.ndarray:
    """By the operator's own numerics; for several steps one after the other, in the same memory."""
    types = [TensorType.of(x), TensorType("i64")]
    (out,) = op.infer(*types)
    found = np.full((max(len(steps), 1), *out.shape), 77, x.dtype)
    scratch = [np.full(t.shape, 77, t.numpy) for t in op.scratch(types, [out])]
    for y, step in zip(found, steps or (0,), strict=True):
        op.compute([x, np.array(step)], [y], scratch)
    return found if len(steps) > 1 else found[0]


def matrix(op: Sketch, batch: int, step: int = 0) -> np.ndarray:
    """S, [B, rows]."""
    return applied(op, np.eye(batch), step).T


def by_kernel(op: Sketch, x: np.ndarray, step: int = 0) -> tuple[np.ndarray, Block]:
    """The native kernel's result, and the block that names the kernel."""
    block, feed = case_block(Case(op, (x, np.array(step))))
    lowered = rc.run_passes(block, rc.pipeline("choose-kernels{providers=[numba]}"))
    return evaluate(lowered, feed)[0], lowered


# -- statistics -------------------------------------------------------------------------------------------------------


def pair(batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of different norms, related, so that no term of a formula vanishes."""
    g = np.random.default_rng(batch)
    x = g.normal(size=(batch, 3)) * g.uniform(0.3, 2, (batch, 1))
    return x, x[:, :2] * 0.7 + g.normal(size=(batch, 2))


@pytest.mark.parametrize(
    ("kind", "batch", "rows"),
    [
        ("gaussian", 6, 4),
        ("rademacher", 6, 4),
        ("rows", 6, 4),
        ("dct", 3, 2),
        ("dft", 4, 2),
        *((k, b, r) for k in KINDS for b, r in ((11, 4), (16, 15), (33, 9))),
    ],
)
def test_the_mean_and_the_variance_are_those_of_the_formulas(kind: str, batch: int, rows: int) -> None:
    x, y = pair(batch)
    both, exact = np.concatenate([x, y], axis=1), x.T @ y
    s = applied(Sketch(rows, kind, seed=11), both, *range(DRAWS))
    found = np.swapaxes(s[:, :, :3], 1, 2) @ s[:, :, 3:]
    error = found.std(0) / np.sqrt(DRAWS)
    assert (np.abs(found.mean(0) - exact) < 4 * error + 1e-12).all()
    squares = ((found - exact) ** 2).sum((1, 2))
    wanted = sketch_variance(kind, rows, x, y)
    own = squares.std() / np.sqrt(DRAWS)
    assert abs(squares.mean() - wanted) < 4 * own
    assert own < 0.03 * wanted, "the limit says nothing"


@pytest.mark.parametrize("kind", ["rademacher", "rows", "dct", "dft"])
def test_the_variance_is_exact_where_all_sketches_can_be_listed(kind: str) -> None:
    """Over all signs and choices, built from explicit matrices: no sampling, so formulas hold to rounding."""
    batch, rows = (4, 2) if kind != "rademacher" else (4, 1)
    x, y = pair(batch)
    all_signs = 2 * (np.arange(16)[:, None] >> np.arange(4) & 1) - 1.0
    choices = [(i, j) for j in range(4) for i in range(j)]
    sketches = []
    if kind == "rademacher":
        sketches = [d[:, None] for d in all_signs]
    elif kind == "rows":
        sketches = [np.sqrt(2) * np.eye(4)[:, list(c)] for c in choices]
    else:
        sketches = [np.sqrt(2) * d[:, None] * basis(kind, 4)[list(c)].T for d in all_signs for c in choices]
    exact = x.T @ y
    found = [((x.T @ s @ s.T @ y - exact) ** 2).sum() for s in sketches]
    assert np.isclose(np.mean(found), sketch_variance(kind, rows, x, y), rtol=1e-12)


def basis(kind: str, size: int) -> np.ndarray:
    """The rows of the orthonormal transform, by its definition."""
    c, t = np.arange(size)[:, None], np.arange(size)
    if kind == "dct":
        found = np.sqrt(2 / size) * np.cos(np.pi * (2 * t + 1) * c / (2 * size))
        found[0] /= np.sqrt(2)
        return found
    angle = 2 * np.pi * ((c + 1) // 2) * t / size
    found = np.sqrt(2 / size) * np.where(c % 2 == 1, np.cos(angle), np.sin(angle))
    found[0] = 1 / np.sqrt(size)
    found[-1] = np.cos(np.pi * t) / np.sqrt(size)
    return found


def test_the_batch_has_the_variance_of_the_lemma() -> None:
    """That of a sum of B samples: B times the squared distances of the terms from their mean, over B - 1."""
    x, y = pair(9)
    terms = x[:, :, None] * y[:, None]
    wanted = 9 * terms.var(axis=0, ddof=1).sum()
    assert np.isclose(batch_variance(x, y), wanted, rtol=1e-12)
    assert np.isclose(batch_variance(x.reshape(3, 3, 3), y), wanted, rtol=1e-12)
    with pytest.raises(rc.errors.UsageError, match="one sample has no variance"):
        batch_variance(x[:1], y[:1])
    with pytest.raises(rc.errors.UsageError, match="of the same batch"):
        batch_variance(x, y[:4])


def test_variances_at_the_ends() -> None:
    x, y = pair(8)
    assert sketch_variance("rows", 8, x, y) == 0
    assert sketch_variance("dct", 8, x, y) == 0 == sketch_variance("dft", 8, x, y)
    assert sketch_variance("rows", 1, x[:1], y[:1]) == 0
    assert sketch_variance("rademacher", 1, x[:1], y[:1]) < 1e-12
    for bad in ({"rows": 0}, {"rows": 9}, {"kind": "sparse"}):
        with pytest.raises(rc.errors.UsageError, match="must be"):
            sketch_variance(**{"kind": "rows", "rows": 2, **bad}, x=x, y=y)  # type: ignore[arg-type]


# -- which S ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_s_for_both_factors_and_another_for_other_steps_and_seeds(kind: str) -> None:
    g = np.random.default_rng(0)
    x, dy = g.normal(size=(2, 20, 7)), g.normal(size=(40, 50))
    op = Sketch(9, kind, seed=3)
    s = matrix(op, 40, 5)
    np.testing.assert_allclose(applied(op, x, 5), s.T @ x.reshape(40, 7), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(applied(op, dy, 5), s.T @ dy, rtol=1e-12, atol=1e-12)
    assert applied(op, dy, 5).tobytes() == applied(op, dy, 5).tobytes()
    for other in (matrix(op, 40, 6), matrix(Sketch(9, kind, seed=4), 40, 5)):
        assert not np.allclose(other, s)


@pytest.mark.parametrize("kind", ["dct", "dft"])
@pytest.mark.parametrize("batch", [1, 2, 4, 5, 37, 64])
def test_fast_transforms_are_the_transforms(kind: str, batch: int) -> None:
    """S from the definition: signs, zeros, the basis, the coefficients that the stream chooses."""
    size, rows, step = max(4, 1 << (batch - 1).bit_length()), (batch + 1) // 2, np.array(2)
    keys = np.empty(size, np.float32)
    stream(6, step)(keys)
    chosen = np.sort(np.argsort(keys, kind="stable")[:rows])
    more = np.empty(8, np.float32)
    stream(6, step, -(-size // 8) * 8)(more)
    signs = 2 * bits_of(more).reshape(-1)[:batch] - 1
    want = np.sqrt(size / rows) * basis(kind, size)[chosen][:, :batch] * signs
    np.testing.assert_allclose(matrix(Sketch(rows, kind, seed=6), batch, 2).T, want, rtol=0, atol=1e-14)


def test_rows_are_the_least_numbers_in_ascending_order() -> None:
    x = np.arange(5000.0).reshape(2500, 2).astype(np.float32)
    keys = np.empty(2500, np.float32)
    stream(8, np.array(1))(keys)
    chosen = np.sort(np.argsort(keys, kind="stable")[:700])
    y = applied(Sketch(700, "rows", seed=8), x, 1)
    assert y.tobytes() == (x[chosen] * np.float32(np.sqrt(2500 / 700))).tobytes()


def test_equal_numbers_are_taken_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.array([3, 1, 2, 2, 0, 2, 9], np.float32) / 16
    monkeypatch.setattr(
        "recompute.ops.approximation.drawn.stream", lambda *_: lambda out: np.copyto(out, numbers[: out.size])
    )
    for count, want in ((1, [4]), (2, [1, 4]), (3, [1, 2, 4]), (4, [1, 2, 3, 4]), (7, list(range(7)))):
        chosen = np.empty(count, np.int64)
        choose(0, np.array(0), np.empty(7, np.float32), np.empty(7, np.float32), chosen)
        assert chosen.tolist() == want


def test_normal_numbers_and_signs_of_s() -> None:
    s = matrix(Sketch(400, "gaussian", seed=1), 500) * np.sqrt(400)
    assert abs(s.mean()) < 4 / np.sqrt(s.size) and abs((s**2).mean() - 1) < 4 * np.sqrt(2 / s.size)
    assert abs((s**4).mean() - 3) < 4 * np.sqrt(96 / s.size)
    neighbours = sliding_window_view(s, 2, axis=1).prod(axis=2).mean(), sliding_window_view(s, 2, axis=0).prod(2).mean()
    assert max(map(abs, neighbours)) < 5 / np.sqrt(s.size)
    signs = matrix(Sketch(400, "rademacher", seed=1), 500) * np.sqrt(400)
    np.testing.assert_allclose(abs(signs), 1, rtol=1e-6)
    assert abs(signs.mean()) < 4 / np.sqrt(signs.size)


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "native code runs here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("x", "rows"), [("f32[700,61]", 300), ("f64[5,205,17]", 41), ("f32[4096,16]", 9), ("f64[1030,33]", 1030)]
)
def test_native_kernels(kind: str, x: str, rows: int) -> None:
    """`rows`: the bits of the numerics; the others add in other orders."""
    t = TensorType.parse(x)
    array = np.random.default_rng(1).normal(size=t.shape).astype(t.numpy)
    op = Sketch(rows, kind, seed=2**62 + 5)
    got, lowered = by_kernel(op, array, -3)
    assert "using numba" in rc.show(lowered)
    again, want = by_kernel(op, array, -3)[0], applied(op, array, -3)
    assert got.tobytes() == again.tobytes()
    if kind == "rows":
        assert got.tobytes() == want.tobytes()
    eps = 2e-6 if t.dtype == "f32" else 1e-13
    np.testing.assert_allclose(got, want, rtol=eps, atol=eps * np.abs(want).max() * 2)


def test_infinite_rows_that_are_not_taken_change_nothing() -> None:
    x = np.random.default_rng(1).normal(size=(1000, 20)).astype(np.float32)
    op = Sketch(100, "rows", seed=5)
    taken = matrix(op, 1000).any(axis=1)
    wild = np.where(taken[:, None], x, np.float32(np.inf))
    assert by_kernel(op, wild)[0].tobytes() == by_kernel(op, x)[0].tobytes() == applied(op, x).tobytes()


SCRIPT = """
import hashlib, json, sys
import numpy as np
import recompute as rc
from recompute.ops.approximation.sketch import KINDS, Sketch
from recompute.testing import Case, case_block, evaluate
found = []
for kind in KINDS:
    for batch, n, rows in ((3000, 70, 700), (1111, 33, 1000)):
        x = np.random.default_rng(0).normal(size=(batch, n)).astype(np.float32)
        block, feed = case_block(Case(Sketch(rows, kind, seed=1), (x, np.array(4))))
        lowered = rc.run_passes(block, rc.pipeline("choose-kernels{providers=[numba]}"))
        found.append(hashlib.sha256(evaluate(lowered, feed)[0].tobytes()).hexdigest())
print(json.dumps(found))
"""


@pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "native code runs here")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor only")
def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    runs = []
    for threads in ("1", "2"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        runs.append(json.loads(done.stdout))
    assert runs[0] == runs[1] and len(set(runs[0])) == 10


def test_no_workspace_holds_s() -> None:
    """Planned workspaces of a large sketch stay below a part of S, as NumPy and as kernels have them."""
    x, step = TensorType("f32", (16384, 768)), TensorType("i64")
    for kind in KINDS:
        op = Sketch(3276, kind)
        (y,) = op.infer(x, step)
        whole = 4 * 16384 * 3276
        assert sum(t.nbytes for t in op.scratch([x, step], [y])) < whole / 15


def test_costs_by_hand() -> None:
    """32 rows of 8 numbers become 4: a product and its random numbers, a copy, a transform of 5 levels (log₂ 32)."""
    x, y = TensorType("f32", (32, 8)), TensorType("f32", (4, 8))
    every = 4 * (32 * 8 + 4 * 8)
    expected = {"gaussian": (2 * 32 * 4 * 8 + 20 * 32 * 4, every), "rows": (4 * 8 + 20 * 32, 2 * 4 * 4 * 8)}
    expected["rademacher"] = expected["gaussian"]
    expected["dct"] = expected["dft"] = (int(2.5 * 32 * 5) * 8 + 8 * 4 * 8 + 30 * 32, every)
    for kind in KINDS:
        cost = Sketch(4, kind).cost([x, TensorType("i64")], [y])
        assert (cost.flops, cost.bytes) == expected[kind], kind


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "x", "step", "why"),
    [
        ({"rows": 0}, "f32[8,3]", "i64[]", "rows must be in [1, 8], the rows of x, not 0"),
        ({"rows": -1}, "f32[8,3]", "i64[]", "rows must be in [1, 8], the rows of x, not -1"),
        ({"rows": 9}, "f32[2,4,3]", "i64[]", "rows must be in [1, 8], the rows of x, not 9"),
        ({"rows": 1}, "f32[0,3]", "i64[]", "rows must be in [1, 0]"),
        (
            {"rows": 2, "kind": "sparse"},
            "f32[8,3]",
            "i64[]",
            "kind must be one of gaussian, rademacher, rows, dct, dft",
        ),
        ({"rows": 2}, "i32[8,3]", "i64[]", "takes floats only"),
        ({"rows": 2}, "f32[8]", "i64[]", "a batch axis and an axis of features"),
        ({"rows": 2}, "f32[8,3]", "i32[]", "the step counter must be i64[]"),
        ({"rows": 2, "seed": -1}, "f32[8,3]", "i64[]", "the seed must be in"),
        ({"rows": 2}, f"f32[{(1 << 31) + 1},0]", "i64[]", "more than 2³¹ rows"),
    ],
)
def test_what_is_refused(options: dict[str, Any], x: str, step: str, why: str) -> None:
    with pytest.raises(rc.errors.TypeRuleError) as e:
        Sketch(**options).infer(TensorType.parse(x), TensorType.parse(step))
    assert why in str(e.value) and "\n" not in str(e.value)
