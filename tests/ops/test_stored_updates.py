"""Updates that store in fewer bits: stochastic rounding to bfloat16, and moments of 8 bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import recompute as rc
from recompute.errors import TypeRuleError
from recompute.language.types import TensorType
from recompute.ops.optimizer.norm_updates import LambUpdate
from recompute.ops.optimizer.storage import BLOCK, ROW, blocks, borders, code_book, decoded, encoded, rounded
from recompute.ops.optimizer.updates import AdagradUpdate, AdamUpdate, MomentumUpdate, RMSPropUpdate, SGDUpdate
from recompute.ops.random.philox import words_from
from recompute.testing import case_block, cases

BF16 = np.dtype(ml_dtypes.bfloat16)
RULES = [SGDUpdate, MomentumUpdate, AdagradUpdate, RMSPropUpdate, AdamUpdate]


def published_map(*, signed: bool) -> np.ndarray:
    """The dynamic map as Dettmers et al. 2022 define it: 7 exponents, and fractions between .1 and 1."""
    found: list[float] = []
    for i in range(7):
        items = 2**i + 1 if signed else 2 ** (i + 1) + 1
        steps = np.linspace(0.1, 1, items)
        means = (steps[:-1] + steps[1:]) / 2
        found += (10.0 ** (-6 + i) * means).tolist()
        if signed:
            found += (-(10.0 ** (-6 + i)) * means).tolist()
    return np.array(sorted([*found, 0.0, 1.0]))


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_book_is_the_published_one(signed: bool) -> None:
    book = code_book(signed=signed)
    assert len(book) == 256 and (np.diff(book) > 0).all()
    np.testing.assert_allclose(book, published_map(signed=signed), rtol=1e-6)
    assert book[-1] == 1 and 0 in book
    ends = (-0.99296875, 5.5e-7) if signed else (0, 3.25e-7)  # what bitsandbytes prints for both maps
    assert book[0] == pytest.approx(ends[0]) and book[book > 0][0] == pytest.approx(ends[1])


@pytest.mark.parametrize("signed", [True, False])
def test_each_element_has_the_nearest_entry(signed: bool) -> None:
    x = np.random.default_rng(1).standard_normal(700).astype(np.float32)
    x = x if signed else x**2
    rows = np.full((blocks(700), ROW), 9, np.uint8)
    encoded(x, rows, signed=signed)
    back = np.empty(700, np.float32)
    decoded(rows, back, signed=signed)
    book = code_book(signed=signed).astype(np.float64)
    for b in range(3):
        part = x[b * BLOCK : (b + 1) * BLOCK].astype(np.float64)
        most = abs(part).max()
        codes = abs(part[:, None] / most - book).argmin(axis=1)
        nearest = book[codes if signed else np.maximum(codes, part > 0)] * most
        np.testing.assert_allclose(back[b * BLOCK : (b + 1) * BLOCK], nearest, rtol=1e-6)
    assert (rows[2, 700 - 512 : BLOCK] == 0).all()
    assert borders(signed=signed).shape == (255,)


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    x = np.array([1.0, 1e-12, 0.0, 1e-7], np.float32)
    rows, back = np.empty((1, ROW), np.uint8), np.empty(4, np.float32)
    encoded(x, rows, signed=False)
    decoded(rows, back, signed=False)
    assert back[0] == 1 and back[1] == back[3] == np.float32(3.25e-7) and back[2] == 0


def test_a_block_of_zeros_stays_zero_and_one_with_nan_becomes_nan() -> None:
    x = np.zeros(600, np.float32)
    x[300] = np.nan
    rows, back = np.zeros((3, ROW), np.uint8), np.empty(600, np.float32)
    encoded(x, rows, signed=True)
    decoded(rows, back, signed=True)
    assert (back[:256] == 0).all() and np.isnan(back[256:512]).all() and (back[512:] == 0).all()


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean of n roundings is within 5 standard deviations of x, and only the two neighbours come up."""
    x = np.array([1.0 + 0.3 * 2.0**-7, -3.1415927, 1e-30, 0.5, 300.77], np.float32)
    n = 4096
    found = np.empty((n, x.size), BF16)
    for step in range(n):
        noise = (words_from(11, np.array(step), 0, x.size) & np.uint64(0xFFFF)).astype(np.uint32)
        rounded(x, noise, found[step])
    wide = found.astype(np.float64)
    for i, v in enumerate(x.astype(np.float64)):
        seen = np.unique(wide[:, i])
        gap = np.ptp(seen)
        assert len(seen) == (1 if v == 0.5 else 2) and seen[0] <= v <= seen[-1]
        assert abs(wide[:, i].mean() - v) <= 5 * gap / 2 / np.sqrt(n)
    assert wide[:, 3].min() == wide[:, 3].max() == 0.5


def test_rounding_keeps_infinities_and_nan() -> None:
    x = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0], np.float32)
    out = np.empty(6, BF16)
    rounded(x, np.full(6, 0xFFFF, np.uint32), out)
    assert out[0] == np.inf and out[1] == -np.inf and np.isnan(out[2:4].astype(np.float32)).all()
    assert (out[4:] == 0).all() and np.signbit(out[5].astype(np.float32))


def test_what_nearest_rounding_would_lose_adds_up() -> None:
    """200 steps of 2⁻¹² from 1, where bfloat16 has steps of 2⁻⁷: nearest rounding stays at 1."""
    head = "input %g: bf16[4096] \n input %lr: f32[] \n param %w: bf16[4096] \n state %step: i64[]"
    text = f"program p {{{{ \n {head} \n {{}} }}}}"
    call = "optimize %w: bf16[4096] = SGDUpdate(%w, %g, %lr{}) {{{}}} \n optimize %step: i64[] = Increment(%step) \n"
    feed = {"g": np.full(4096, -1, BF16), "lr": np.array(2.0**-12, np.float32)}
    means = {}
    for name, more, attributes in (("nearest", "", ""), ("stochastic", ", %step", "stochastic=true, seed=3")):
        program = rc.Program(rc.parse(text.format(call.format(more, attributes))))
        program.data.update(w=np.ones(4096, BF16), step=np.zeros((), np.int64))
        executor = rc.Executor()
        for _ in range(200):
            executor.run(program, feed, [])
        means[name] = program.data["w"].astype(np.float64).mean()
    assert means["nearest"] == 1
    assert means["stochastic"] == pytest.approx(1 + 200 * 2.0**-12, abs=5 * 2.0**-7 * np.sqrt(200 / 4096) / 4)


@pytest.mark.parametrize("rule", RULES)
def test_kernels_have_the_bits_of_numpy(rule: Any) -> None:
    for case in cases(rule):
        if not case.op.stores:
            continue
        block, feed = case_block(case)
        found = []
        for providers in (("numpy",), None):
            program = rc.Program(block, {v.name: np.array(feed[v.name]) for v in block.state})
            rc.Executor(providers=providers).run(program, {}, [])
            found.append({n: np.array(a) for n, a in program.data.items()})
        for name, a in found[0].items():
            assert a.tobytes() == found[1][name].tobytes(), (case.op, name)
        if case.inputs[0].size:
            changed = found[0]["x0"].tobytes() != case.inputs[0].tobytes()
            skipped = case.op.unscale(case.inputs) == 0
            assert changed is not skipped


def test_a_part_of_a_parameter_has_the_words_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    w, g = (rng.standard_normal(1000).astype(BF16) for _ in range(2))
    given = np.array(0.01, np.float32), np.array(5)

    def run(op: SGDUpdate, part: slice) -> np.ndarray:
        new = w[part].copy()
        ins = (new, g[part], *given)
        types = [TensorType.of(x) for x in ins]
        room = [np.empty(t.shape, t.numpy) for t in op.scratch(types, op.infer(*types))]
        op.compute(ins, (new,), room)
        return new

    whole = run(SGDUpdate(stochastic=True, seed=9), slice(0, 1000))
    part = run(SGDUpdate(stochastic=True, seed=9, first=333), slice(333, 1000))
    assert part.tobytes() == whole[333:].tobytes()


def test_what_is_refused() -> None:
    half, wide, one = TensorType("bf16", (8,)), TensorType("f32", (8,)), TensorType("f32", ())
    step = TensorType("i64", ())
    with pytest.raises(TypeRuleError, match="for bfloat16 parameters"):
        SGDUpdate(stochastic=True).infer(wide, wide, one, step)
    with pytest.raises(TypeRuleError, match="step counter"):
        SGDUpdate(stochastic=True).infer(half, half, one)
    with pytest.raises(TypeRuleError, match="norms of whole parameters"):
        LambUpdate(stochastic=True).infer(half, half, half, half, one, step)
    with pytest.raises(TypeRuleError, match="Adam's moments"):
        MomentumUpdate(eight_bits=True).infer(wide, wide, TensorType("u8", (1, ROW)), one)
    with pytest.raises(TypeRuleError, match="its state must be"):
        AdamUpdate(eight_bits=True).infer(wide, wide, wide, wide, one, step)
