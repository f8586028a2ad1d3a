"""Attention's kernels against the operators' own numerics in float64: windows, biases, shared heads, odd sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_cases import applied
from test_cpu_rows import native_results, numpy_results

import recompute as rc
from recompute.ops.attention.heads_last import MATRICES, heads_last_form
from recompute.ops.attention.tiled import TiledAttention
from recompute.ops.attention.tiled_grad import TiledAttentionGrad
from recompute.runtime.cpu.attention.items import Items
from recompute.runtime.cpu.device import jit, native
from recompute.runtime.cpu.families import ENOUGH
from recompute.runtime.cpu.kernels import attention
from recompute.runtime.cpu.providers.numba import Numba

pytestmark = pytest.mark.skipif(bool(jit.unavailable()), reason=jit.unavailable() or "there")

#: options, shapes of q, k, v and bias
CASES: dict[str, tuple[dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "whole panels and tiles": ({}, ((2, 128, 64), (2, 256, 64), (2, 256, 64))),
    "odd sizes": ({}, ((2, 197, 40), (2, 333, 40), (2, 333, 33))),
    "one query": ({}, ((16, 1, 64), (16, 77, 64), (16, 77, 64))),
    "one key": ({}, ((16, 77, 64), (16, 1, 64), (16, 1, 64))),
    "wide heads": ({"last": 0}, ((1, 70, 130), (1, 70, 130), (1, 70, 72))),
    "causal": ({"last": 0}, ((2, 3, 150, 16), (2, 3, 150, 16), (2, 3, 150, 16))),
    "causal, fewer keys": ({"last": -60}, ((2, 150, 16), (2, 90, 16), (2, 90, 16))),
    "a window": ({"first": -20, "last": 7}, ((2, 300, 8), (2, 290, 8), (2, 290, 8))),
    "a window behind": ({"first": 33}, ((2, 100, 8), (2, 120, 8), (2, 120, 8))),
    "a window without keys": ({"first": 500}, ((2, 100, 8), (2, 120, 8), (2, 120, 8))),
    "keys that all share": ({}, ((5, 140, 8), (1, 300, 8), (1, 300, 8))),
    "shared keys": ({"last": 0}, ((2, 2, 3, 90, 16), (2, 2, 1, 90, 16), (2, 2, 1, 90, 16))),
    "a bias": ({}, ((2, 3, 49, 32), (2, 3, 49, 32), (2, 3, 49, 32), (2, 3, 49, 49))),
    "a shared bias": ({}, ((20, 3, 49, 32), (20, 3, 49, 32), (20, 3, 49, 32), (3, 49, 49))),
    "a bias of all": ({"last": 3}, ((4, 70, 16), (4, 90, 16), (4, 90, 16), (70, 90))),
    "a bias and shared keys": ({}, ((2, 4, 70, 16), (2, 1, 90, 16), (2, 1, 90, 16), (4, 70, 90))),
    "a bias of keys": ({"first": -9}, ((2, 3, 70, 16), (2, 3, 90, 16), (2, 3, 90, 16), (2, 1, 1, 90))),
    "a vector": ({}, ((3, 70, 16), (3, 90, 16), (3, 90, 16), (90,))),
    "a bias of queries": ({"last": 3}, ((2, 70, 16), (2, 90, 16), (2, 90, 16), (2, 70, 1))),
    "a number": ({"last": 3}, ((2, 70, 16), (2, 90, 16), (2, 90, 16), (1, 1))),
    "blocks": ({"last": 0}, ((2, 1100, 8), (2, 1300, 8), (2, 1300, 8))),
    "a cap": ({"cap": 0.8}, ((2, 150, 24), (2, 140, 24), (2, 140, 24))),
    "a cap of large scores": ({"cap": 50.0, "scale": 30.0}, ((1, 90, 16), (1, 90, 16), (1, 90, 16))),
    "a cap, a window": ({"cap": 2.0, "first": -40, "last": 3}, ((2, 150, 16), (1, 170, 16), (1, 170, 16))),
    "a cap, a bias": ({"cap": 1.5, "last": 3}, ((2, 3, 70, 16), (2, 3, 90, 16), (2, 3, 90, 16), (3, 70, 90))),
    "a cap, a bias of keys": ({"cap": 1.5}, ((2, 70, 16), (2, 90, 16), (2, 90, 16), (1, 90))),
    "dropout": ({"ratio": 0.1, "seed": 3}, ((2, 128, 64), (2, 256, 64), (2, 256, 64))),
    "dropout, odd sizes": ({"ratio": 0.4, "seed": 2**63 + 5}, ((2, 97, 40), (2, 333, 40), (2, 333, 33))),
    "dropout, a window": ({"ratio": 0.3, "first": -50, "last": 9}, ((2, 300, 8), (2, 290, 8), (2, 290, 8))),
    "dropout, shared keys": ({"ratio": 0.3, "last": 0}, ((2, 3, 90, 16), (2, 1, 99, 16), (2, 1, 99, 16))),
    "dropout, a bias": ({"ratio": 0.2, "seed": 9}, ((4, 3, 49, 32), (4, 3, 49, 32), (4, 3, 49, 32), (3, 49, 49))),
    "dropout, a part": (
        {"ratio": 0.3, "seed": 1, "rows": (7, 5, 200), "at": (4, 2, 61)},
        ((2, 3, 75, 16), (2, 3, 77, 16), (2, 3, 77, 16)),
    ),
    "dropout, a cap, a bias": (
        {"ratio": 0.3, "cap": 1.5, "first": -60, "rows": (2, 4, 90), "at": (0, 1, 20)},
        ((2, 3, 70, 16), (2, 1, 90, 16), (2, 1, 90, 16), (3, 70, 90)),
    ),
    "dropout, blocks": ({"ratio": 0.5, "last": 0, "cap": 3.0}, ((2, 1100, 8), (2, 1300, 8), (2, 1300, 8))),
    "blocks, windows": ({"first": -700, "last": -300}, ((2, 1300, 8), (1, 1100, 8), (1, 1100, 8), (1, 1100))),
}


def arrays(name: str, dtype: Any = np.float32) -> tuple[dict[str, Any], list[np.ndarray]]:
    """A case's options and inputs."""
    options, shapes = CASES[name]
    g = np.random.default_rng(len(name))
    return {"scale": 0.3, **options}, [g.standard_normal(s).astype(dtype) for s in shapes]


def doubled(given: list[Any]) -> list[Any]:
    return [a.astype(np.float64) if a is not None and a.dtype == np.float32 else a for a in given]


def with_step(options: dict[str, Any], given: list[Any]) -> list[Any]:
    """The forward pass's inputs: with dropout also the step's number."""
    return [*given, *[None] * (4 - len(given)), np.array(-7)] if options.get("ratio") else given


def gradient_inputs(options: dict[str, Any], given: list[np.ndarray]) -> list[Any]:
    """The forward pass's inputs and results, and a gradient."""
    full = with_step(options, given)
    y, lse = (a.astype(np.float32) for a in numpy_results(TiledAttention(**options), doubled(full)))
    dy = np.random.default_rng(3).standard_normal(y.shape).astype(np.float32)
    return [*given, *[None] * (4 - len(given)), y, lse, dy, *full[4:]]


def close(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    """Within float32's rounding of the largest element of all."""
    largest = max(np.abs(b[np.isfinite(b) & (np.abs(b) < 1e6)]).max(initial=0) for b in want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=4e-6 * largest)


@pytest.mark.parametrize("name", CASES)
def test_the_forward_pass(name: str) -> None:
    options, given = arrays(name)
    op, full = TiledAttention(**options), with_step(options, given)
    close(native_results(op, full), numpy_results(op, doubled(full)))


@pytest.mark.parametrize("name", CASES)
def test_the_gradient(name: str) -> None:
    options, given = arrays(name)
    op, full = TiledAttentionGrad(**options), gradient_inputs(options, given)
    for want in (3, 4) if len(given) > 3 else (3,):
        close(native_results(op, full, want), numpy_results(op, doubled(full), want))


@pytest.mark.parametrize("name", [n for n in CASES if len(CASES[n][1][0]) > 2])
def test_heads_beside_each_other_give_the_same_bits(name: str) -> None:
    """All matrices, the first ones or the last ones: cases take turns."""
    options, given = arrays(name)
    full = gradient_inputs(options, given)
    ops = (TiledAttention(**options), with_step(options, given), 2), (TiledAttentionGrad(**options), full, 3)
    for op, inputs, want in ops:
        ins, outs = MATRICES[type(op)]
        some = ((ins, outs), (ins[:2], outs[:1]), (ins[2:], outs[1:]))[list(CASES).index(name) % 3]
        turned = [np.ascontiguousarray(a.swapaxes(-3, -2)) if i in some[0] else a for i, a in enumerate(inputs)]
        results = native_results(heads_last_form(op, *some), turned, want), native_results(op, inputs, want)
        for i, (a, b) in enumerate(zip(*results, strict=True)):
            assert np.array_equal(a.swapaxes(-3, -2) if i in some[1] else a, b, equal_nan=True)


def test_without_the_log_sum_exp() -> None:
    options, given = arrays("odd sizes")
    op = TiledAttention(**options)
    assert np.array_equal(native_results(op, given, 1)[0], native_results(op, given)[0])


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.999])
@pytest.mark.parametrize(("keys", "first"), [(300, None), (128, None), (300, -33)])
def test_dropout_leaves_out_the_elements_of_the_stream(ratio: float, keys: int, first: int | None) -> None:
    g = np.random.default_rng(2)
    q, k = (g.standard_normal(s).astype(np.float32) for s in ((2, 100, 8), (2, keys, 8)))
    v = np.broadcast_to(np.eye(keys, dtype=np.float32), (2, keys, keys))  # results are the weights
    whole = TiledAttention(scale=0.1, ratio=ratio, seed=2**40 + 1, first=first)
    (weights,) = native_results(whole, [q, k, v, None, np.array(5)], 1)
    u = np.random.Generator(np.random.Philox(key=[2**40 + 1, 5])).random(2 * 100 * keys, dtype=np.float32)
    hidden = np.arange(keys) < np.arange(100)[:, None] + (-keys if first is None else first)
    assert np.array_equal(weights != 0, (u.reshape(2, 100, keys) >= np.float32(ratio)) & ~hidden)
    part = replace(whole, rows=(2, 100), at=(1, 27), first=None if first is None else first + 27)
    (some,) = native_results(part, [q[1:, 27:90], k[1:], v[1:], None, np.array(5)], 1)
    assert np.array_equal(some != 0, weights[1:, 27:90] != 0)
    np.testing.assert_allclose(some, weights[1:, 27:90], rtol=1e-5)


@pytest.mark.parametrize("value", [-np.inf, np.finfo(np.float32).min, -1e30, -1e4, 3e38])
def test_biases_of_large_numbers(value: float) -> None:
    g = np.random.default_rng(5)
    q, k, v = (g.standard_normal((2, 40, 16)).astype(np.float32) for _ in range(3))
    bias = np.where(g.random((2, 40, 40)) < 0.5, 0, value).astype(np.float32)
    bias[0, 3] = value  # a query of which all keys have it
    op = TiledAttention(scale=0.3)
    got, want = native_results(op, [q, k, v, bias]), numpy_results(op, [q, k, v, bias])
    close(got, want)
    if value == -np.inf:
        assert not got[0][0, 3].any()
        assert got[1][0, 3] == -np.inf
    full = [q, k, v, bias, *want, v]
    grad = TiledAttentionGrad(scale=0.3)
    close(native_results(grad, full, 4), numpy_results(grad, full, 4))


def test_scores_up_to_large_numbers() -> None:
    g = np.random.default_rng(5)
    q, k, v = (g.standard_normal((2, 60, 16)).astype(np.float32) for _ in range(3))
    op = TiledAttention(scale=100.0)
    y, lse = native_results(op, [q, k, v])
    expected = numpy_results(op, doubled([q, k, v]))
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6)
    np.testing.assert_allclose(y, expected[0], atol=3e-3)  # scores of 1,000 are rounded to 6e-5


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_reaches_what_it_belongs_to(where: str) -> None:
    g = np.random.default_rng(5)
    given = {n: g.standard_normal((2, 60, 16)).astype(np.float32) for n in "qkv"}
    given[where][0, 7, 2] = np.nan
    got, want = (f(TiledAttention(scale=0.3), list(given.values())) for f in (native_results, numpy_results))
    assert np.array_equal(np.isnan(got[0]), np.isnan(want[0]))


def test_a_query_has_the_same_bits_among_others() -> None:
    options, (q, k, v) = arrays("odd sizes")
    op = TiledAttention(**options)
    whole, some = native_results(op, [q, k, v]), native_results(op, [q[:, 37:90], k, v])
    assert all(np.array_equal(a[:, 37:90], b) for a, b in zip(whole, some, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        *("a shared bias", "shared keys", "keys that all share", "blocks", "blocks, windows", "odd sizes"),
        *("dropout, shared keys", "dropout, a part", "dropout, a cap, a bias", "dropout, blocks"),
    ],
)
def test_the_bits_do_not_depend_on_the_number_of_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, given = arrays(name)
    full = gradient_inputs(options, given)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(native, "threads", lambda n=threads: n)
        results = native_results(TiledAttention(**options), with_step(options, given))
        results += native_results(TiledAttentionGrad(**options), full, 4 if len(given) > 3 else 3)
        found.append([a.tobytes() for a in results])
    assert found[0] == found[1] == found[2]


def test_which_operators_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(op: Any, *given: np.ndarray) -> bool:
        return Numba().accepts(applied(op, *given))

    q = np.zeros((ENOUGH // 64, 8), np.float32)
    assert takes(TiledAttention(), q, q[:8], q[:8])
    assert not takes(TiledAttention(), q, q[:7], q[:7])
    assert not takes(TiledAttention(), *[q.astype(np.float64)] * 3)
    assert not takes(TiledAttention(), *[q.astype(np.float16)] * 3)
    bias = np.zeros((1, 1), np.float64)
    assert not takes(TiledAttention(), q, q, q, bias)

    assert takes(TiledAttention(cap=50.0), q, q, q)
    assert not takes(TiledAttention(cap=1e-20), q, q, q)  # scores over the cap may be infinite
    assert not takes(TiledAttention(cap=1e38), q, q, q)
    step: Any = [None, np.array(1)]
    assert takes(TiledAttention(ratio=0.5, rows=(9999,), at=(3,)), q, q, q, *step)
    assert not takes(TiledAttention(ratio=1 - 1e-12), q, q, q, *step)  # 1 in float32
    assert not takes(TiledAttention(ratio=0.5), *[q.astype(np.float64)] * 3, *step)

    monkeypatch.setattr(attention, "_KNOWN", ("scale", "first"))
    assert takes(TiledAttention(scale=2.0, first=3), q, q, q)
    assert not takes(TiledAttention(last=3), q, q, q)  # with an attribute that the kernel does not know


@pytest.mark.parametrize(("queries", "keys", "blocks"), [(1700, 1200, 4), (100, 120, 1), (260, 120, 2)])
def test_runs_of_a_wave_write_to_different_places(queries: int, keys: int, blocks: int) -> None:
    panels = np.array([(r, min(64, queries - r), 0) for r in range(0, queries, 64)], np.int64)
    op = TiledAttention(last=100, first=-600)
    items = Items((2, 3), (2, 1), None, queries, keys, op.columns)
    assert (items.chains, items.length, items.blocks) == (2, 3, blocks)
    begun, seen = set(), set()
    for runs, wave in items.waves(panels, 0):
        by_run = []
        for start, stop in runs.tolist():
            written = set()
            for head, begin, end, low, high, fresh, first in wave[start:stop].tolist():
                places = [("keys", head // 3, low)] * (high > low) + [("queries", head, begin)] * (end > begin)
                flags = [fresh] * (high > low) + [first] * (end > begin)
                assert [bool(x) for x in flags] == [p not in begun for p in places]
                begun.update(places)
                written.update(places)
                seen.update((head, q, k) for q in range(begin, end) for k in range(low, high))
            by_run.append(written)
        assert sum(map(len, by_run)) == len(set().union(*by_run))
    for head, (p, (row, there, _)) in itertools.product(range(6), enumerate(panels.tolist())):
        low, high = op.columns(row, row + there, keys)
        assert all((head, p, k) in seen for k in range(low, high))


def test_what_all_heads_add_to_is_written_by_one_run() -> None:
    """A bias of one number. Keys and queries that see nothing become 0, shared keys once."""
    panels = np.array([(r, 64, 0) for r in range(0, 640, 64)], np.int64)
    op = TiledAttention(first=300)
    items = Items((2, 3), (2, 1), (1, 1), 640, 600, op.columns)
    assert (items.chains, items.length, items.blocks) == (1, 6, 1)
    ((runs, found),) = items.waves(panels, 0)
    pairs = [tuple(x) for x in found[slice(*runs[0])].tolist()]
    assert [(x[0], x[1:3], x[3:5]) for x in pairs] == [(h, (0, 10), (0, 600)) for h in range(6)]
    assert [x[5:] for x in pairs] == [(int(h % 3 == 0), 1) for h in range(6)]  # the first of those that share keys

    unseen = Items((2, 3), (2, 1), (1, 1), 640, 600, lambda *_: (0, 0))
    ((runs, found),) = unseen.waves(panels, 0)
    keys = [(h, 0, 0, 0, 600, 1, 0) for h in (0, 3)]
    assert sorted(map(tuple, found.tolist())) == sorted([*keys, *((h, 0, 10, 0, 0, 0, 1) for h in range(6))])


@pytest.mark.parametrize("bias", [(9, 1), (1, 1)], ids=["queries", "a number"])
def test_the_gradient_of_a_bias_that_is_added_up(bias: tuple[int, ...], any_size: None) -> None:
    """Over keys, or over all."""
    g = np.random.default_rng(5)
    given = [g.standard_normal(s).astype(np.float32) for s in ((2, 9, 8), (2, 9, 8), (2, 9, 8), bias)]
    options = {"scale": 0.3}
    full = gradient_inputs(options, given)
    op = TiledAttentionGrad(**options)
    close(native_results(op, full, 4), numpy_results(op, doubled(full), 4))


@pytest.mark.parametrize(
    ("heads", "inputs", "options"), [(1, "", "scale=0.2, last=0"), (2, ", _, %step", "cap=2.0, ratio=0.3, seed=4")]
)
def test_a_step_runs_on_it_in_the_planned_memory(heads: int, inputs: str, options: str) -> None:
    text = f"""program p {{
      input %x: f32[2,150,32]
      input %t: f32[2,{heads},150,32]
      param %w: f32[32,{32 * heads}]
      state %step: i64[]
      %h: f32[2,150,{32 * heads}] = MatMul(%x, %w)
      %i: f32[2,150,{heads},32] = Reshape(%h) {{shape=[2,150,{heads},32]}}
      %q: f32[2,{heads},150,32] = Transpose(%i) {{perm=[0,2,1,3]}}
      %y: f32[2,{heads},150,32], %lse: f32[2,{heads},150] = TiledAttention(%q, %q, %q{inputs}) {{{options}}}
      output %y
    }}"""
    losses = []
    for providers in (None, []):
        program = rc.Program(
            rc.verify(rc.parse(text)), {"w": np.eye(32, 32 * heads, dtype=np.float32), "step": np.array(5)}
        )
        loss = rc.losses.mse(program["y"], program["t"])
        rc.SGD(0.5).minimize(loss)
        executor = rc.Executor(providers=providers)
        g = np.random.default_rng(0)
        feed = {v.name: g.standard_normal(v.shape).astype(np.float32) for v in program.block.inputs}
        losses.append([float(executor.run(program, feed, [loss.name])[0]) for _ in range(3)])
        session = executor.session(program, [loss.name])
        kernels = {op.op.name: op.kernel for op in session.block.operators if "TiledAttention" in op.op.name}
        first, kernel = ("", "") if providers == [] else ("HeadsLast", "numba")
        assert kernels == {f"{first}TiledAttention": kernel, f"{first}TiledAttentionGrad": kernel}
        assert session.measured_peak_bytes == session.report.peak
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][2] < losses[0][0]
