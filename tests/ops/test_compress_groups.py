"""Values in groups of 8, 4 or 2 bits: unbiased, exact where they are equal, never finite where they were not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_random import WORD, cipher

import recompute as rc
from recompute.errors import TypeRuleError
from recompute.language.kernels import accepting
from recompute.language.op import op_class
from recompute.language.types import TensorType
from recompute.ops.random.philox import byte_stream
from recompute.runtime.cpu.device import jit
from recompute.testing import Case, case_block

STEP = TensorType("i64", ())


def own(op: Any, *inputs: np.ndarray) -> list[np.ndarray]:
    """What an operator's own numerics make."""
    types = [TensorType.of(a) for a in inputs]
    made = op.infer(*types)
    outs = [np.empty(t.shape, t.numpy) for t in made]
    op.compute(list(inputs), outs, [np.empty(t.shape, t.numpy) for t in op.scratch(types, made)])
    return outs


def there_and_back(x: np.ndarray, bits: int, group: int = 64, step: int = 0, seed: int = 1) -> np.ndarray:
    """x as it comes back."""
    codes = own(op_class("CompressGroups")(bits=bits, group=group, seed=seed), x, np.array(step))
    back = op_class("DecompressGroups")(bits=bits, group=group, shape=x.shape, dtype=TensorType.of(x).dtype)
    return own(back, *codes)[0]


def test_bytes_of_the_stream() -> None:
    """A block's words, the lowest byte first, as the cipher gives them."""
    found = np.empty(32 * 300, np.uint8)
    byte_stream(2**63 + 3, np.array(-2), 5)(found)
    want = [w for b in range(5, 305) for w in cipher(2**63 + 3, (-2) & WORD, b + 1)]
    assert found.tobytes() == np.array(want, "<u8").tobytes()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_unbiased(bits: int) -> None:
    """The mean over 4,000 steps is within its own error of x: 5 standard errors over 256 elements."""
    x = np.random.default_rng(bits).normal(size=256).astype(np.float32)
    count = 4000
    found = np.array([there_and_back(x, bits, step=s) for s in range(count)], np.float64)
    groups = x.reshape(-1, 64)
    scale = np.repeat(np.ptp(groups, axis=1) / (2**bits - 1), 64)
    assert (np.abs(found - x) <= scale * 1.001).all()
    where = ((x.reshape(-1, 64) - groups.min(axis=1)[:, None]).reshape(-1) / scale) % 1
    error = scale * np.sqrt(np.maximum(where * (1 - where), 25 / count) / count)
    z = (found.mean(axis=0) - x) / error
    assert np.abs(z).max() < 5 and abs(z.mean()) < 5 / np.sqrt(x.size)
    np.testing.assert_allclose(found.var(axis=0) / scale**2, where * (1 - where), atol=5 * 0.5 / np.sqrt(count))


def test_rounding_is_nearly_independent() -> None:
    """Elements 16 apart share a random byte, the upper one of the one and the lower one of the other."""
    x = np.full(64, 0.5, np.float32)
    x[[0, 63]] = 0, 1
    up = np.array([there_and_back(x, 2, step=s) for s in range(4000)])[:, 1:63]
    up = (up > 0.5).astype(np.float64) - 0.5
    correlation = up.T @ up / len(up) / 0.25 - np.eye(62)
    assert np.abs(correlation).max() < 5 / np.sqrt(len(up))


def test_the_ends_of_a_group_and_equal_elements_are_exact() -> None:
    g = np.random.default_rng(3)
    for dtype in (np.float32, np.float64, np.float16):
        x = g.normal(size=200).astype(dtype)
        x[64:128] = 0.1
        for bits in (8, 4, 2):
            y = there_and_back(x, bits)
            assert y.dtype == dtype and (y[64:128] == x[64:128]).all()
            for part in (slice(0, 64), slice(128, 192), slice(192, 200)):
                i, j = np.argmin(x[part]), np.argmax(x[part])
                assert y[part][i] == x[part][i]
                np.testing.assert_allclose(y[part][j], x[part][j], rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_its_group_nan(bad: float) -> None:
    x = np.random.default_rng(0).normal(size=192).astype(np.float32)
    x[70] = bad
    y = there_and_back(x, 8)
    assert np.isnan(y[64:128]).all() and np.isfinite(y[:64]).all() and np.isfinite(y[128:]).all()


def test_small_and_large_numbers() -> None:
    """A spread beyond the largest float is no finite number; a tiny one is rounded, without a bias, to a tiny step."""
    huge = np.array([-3e38, 3e38, 0, 1], np.float32)
    assert np.isnan(there_and_back(huge, 8)).all()
    tiny = np.linspace(0, 1e-34, 64, dtype=np.float32)
    found = np.array([there_and_back(tiny, 8, step=s) for s in range(2000)], np.float64)
    assert (np.abs(found - tiny) < 2.0**-110).all()
    assert np.abs(found.mean(axis=0) - tiny).max() < 2.0**-110 * 5 * 0.5 / np.sqrt(2000)


def test_steps_and_seeds_differ_and_repeat() -> None:
    x = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    first, again = (there_and_back(x, 4, step=3, seed=9) for _ in range(2))
    assert first.tobytes() == again.tobytes()
    for step, seed in ((4, 9), (3, 10)):
        assert 0.3 < (there_and_back(x, 4, step=step, seed=seed) == first).mean() < 0.8


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_native_code_gives_the_same_bits(bits: int, dtype: str) -> None:
    if why := jit.unavailable():
        pytest.skip(why)
    g = np.random.default_rng(0)
    for size, group in ((1 << 15, 256), (20003, 64), (50001, 8192), (50007, 32), (40001, 1056)):
        x = g.normal(size=size).astype(dtype)
        x[[100, 9000, 15000]] = np.nan, np.inf, -np.inf
        x[3000 : 3000 + group] = 2.5
        op = op_class("CompressGroups")(bits=bits, group=group, seed=2**63 + 5, first=64)
        want = own(op, x, np.array(-3))
        back = op_class("DecompressGroups")(bits=bits, group=group, shape=x.shape, dtype=TensorType.of(x).dtype)
        for rule, given, wanted in ((op, (x, np.array(-3)), want), (back, want, own(back, *want))):
            block, feed = case_block(Case(rule, tuple(given)))
            assert accepting(("numba",), block.operators[0]) == "numba"
            found = rc.Executor(schedule=False).run(rc.Program(block, {}), feed, list(block.outputs))
            for a, b in zip(found, wanted, strict=True):
                assert a.tobytes() == b.tobytes(), (rule, size)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"bits": 9}, "bits must be 8, 4 or 2, not 9"),
        ({"bits": 0}, "bits must be 8, 4 or 2, not 0"),
        ({"bits": 3}, "bits must be 8, 4 or 2, not 3"),
        ({"bits": 4, "group": 100}, "group must be a multiple of 32 up to 8192, not 100"),
        ({"bits": 4, "group": 0}, "group must be a multiple of 32 up to 8192, not 0"),
        ({"bits": 4, "group": 8224}, "group must be a multiple of 32 up to 8192, not 8224"),
        ({"bits": 4, "first": 16}, "the first element's number must be a multiple of 32, not 16"),
        ({"bits": 4, "seed": -1}, "the seed must be in"),
    ],
)
def test_bad_values_are_refused(options: dict[str, int], why: str) -> None:
    x = TensorType("f32", (4, 100))
    with pytest.raises(TypeRuleError, match=why.replace("[", r"\[")):
        op_class("CompressGroups")(**options).infer(x, STEP)


def test_types_that_do_not_fit_are_refused() -> None:
    rule = op_class("CompressGroups")(bits=4, group=32)
    with pytest.raises(TypeRuleError, match="takes floats only"):
        rule.infer(TensorType("i64", (4, 100)), STEP)
    codes, ranges = rule.infer(TensorType("f32", (4, 100)), STEP)
    assert (str(codes), str(ranges)) == ("u8[200]", "f32[13,2]")
    back = op_class("DecompressGroups")
    with pytest.raises(TypeRuleError, match=r"f32\[4,101\] in 4 bits and groups of 32 needs u8\[202\] and f32\[13,2\]"):
        back(bits=4, group=32, shape=(4, 101), dtype="f32").infer(codes, ranges)
    with pytest.raises(TypeRuleError, match=r"makes floats, not i32\[4, 100\]"):
        back(bits=4, group=32, shape=(4, 100), dtype="i32").infer(codes, ranges)
    with pytest.raises(TypeRuleError, match="makes floats, not f32"):
        back(bits=4, group=32, shape=(-4, -100), dtype="f32").infer(codes, ranges)


def test_slices_of_whole_groups_are_the_whole() -> None:
    """A factor where the inner axes are whole groups; none where they are not (tests/language run such slices)."""
    rule = op_class("CompressGroups")(bits=4, group=32)
    for shape, count in (((6, 2, 32), 1), ((1, 6, 64), 1), ((6, 33), 0), ((40,), 0)):
        x = TensorType("f32", shape)
        codes = rule.infer(x, STEP)
        assert len(rule.axis_factors((x, STEP), codes)) == count
        back = op_class("DecompressGroups")(bits=4, group=32, shape=shape, dtype="f32")
        assert len(back.axis_factors(codes, (x,))) == count
