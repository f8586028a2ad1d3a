"""Values that rest in few bits: where codes are made and read, what the step computes with them, and what it saves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import models, parse, show
from recompute.errors import UsageError
from recompute.language.builder import Builder
from recompute.language.ir import Block, Role, Value
from recompute.language.types import TensorType
from recompute.passes import Autodiff, Liveness
from recompute.passes.approximation.store import Stores, seed_of, step_counter, store, stored_bytes, why_not
from recompute.training.data import synthetic_batch

SMALL_BERT = {"seq": 64, "vocab": 100}

STEP = """\
program step {
  input %x: f32[64,32]
  input %far: f32[64,32]
  param %w: f32[64,32]
  state %step: i64[]
  %a: f32[64,32] = Tanh(%x)
  %b: f32[64,32] = Exp(%a)
  %c: f32[64,32] = Relu(%a)
  %v: f32[32,64] = Reshape(%b) {shape=[32,64]}
  %d: f32[64,32] = Add(%b, %c)
  %k: f32[64,32] = Neg(%x)
  %l: f32[32,64] = Reshape(%k) {shape=[32,64]}
  backward %e: f32[64,32] = Mul(%d, %a)
  backward %f: f32[64,32] = Add(%e, %a)
  backward %g: f32[32,64] = Exp(%v)
  backward %m: f32[64,32] = Exp(%k)
  backward %n: f32[32,64] = Exp(%l)
  optimize %step: i64[] = Increment(%step)
  output %f, %g, %m, %n
}
"""


def bert() -> tuple[rc.Program, str, dict[str, np.ndarray]]:
    """A small transformer's training step, its loss, and what it is fed."""
    program = rc.load(models.build("bert-tiny", batch=8, **SMALL_BERT))
    kind, _ = rc.losses.natural_loss(program)
    loss = program[kind] if kind in program else getattr(rc.losses, kind)(program)
    rc.optimizers.SGD(learning_rate=0.1).minimize(loss)
    feed = synthetic_batch(program, 0, {s.name: s for s in models.info("bert-tiny", **SMALL_BERT).inputs})
    return program, loss.name, feed


def everywhere(program: rc.Program, how: Any) -> rc.Program:
    """The program in which all that can rest so does."""
    made = program.clone()
    found = Stores(made.block)
    made.block = rc.verify(found.written({n: how for n in found.values if not found.why_not(n, how)}))
    return made


def lines(block: Block, part: str) -> list[str]:
    return [line.strip() for line in show(block).splitlines() if part in line]


def test_where_it_rests() -> None:
    """Codes before the last forward reader, which may write over the value; one copy for readers that are near."""
    block = parse(STEP)
    made = store(block, "a", 4)
    assert made is not None
    rc.verify(made)
    names = [next(op.writes()).name for op in made.operators]
    assert names == ["a", "b", "a.codes", "c", "v", "d", "k", "l", "a.back", "e", "f", "g", "m", "n", "step"]
    roles = {next(op.writes()).name: op.role for op in made.operators}
    assert (roles["a.codes"], roles["a.back"]) == (Role.FORWARD, Role.BACKWARD)
    assert lines(made, "%e:") == ["backward %e: f32[64,32] = Mul(%d, %a.back)"]
    assert parse(show(made)) == made and made == store(parse(STEP), "a", 4)
    assert f"seed={seed_of('a')}" in show(made)
    apart = store(block, "a", 8, apart=0)
    assert apart is not None and lines(rc.verify(apart), "%f:") == ["backward %f: f32[64,32] = Add(%e, %a.back_1)"]


@pytest.mark.parametrize(("how", "dtype"), [("bf16", "bf16"), ("f16", "f16"), ("f8", "f8e5m2")])
def test_element_types(how: str, dtype: str) -> None:
    made = store(parse(STEP), "a", how)
    assert made is not None and rc.verify(made).values()[f"a.{how}"].dtype == dtype
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    x[0, :3] = np.nan, 1e6, -1e6
    wild = parse(STEP.replace("Tanh(%x)", "Mul(%x, %far)"))
    made = store(wild, "a", how)
    assert made is not None
    program = rc.Program(made, {"w": x, "step": np.zeros((), np.int64)})
    (back,) = rc.Executor().run(program, {"x": x, "far": np.ones_like(x)}, ["a.back"])
    assert np.isnan(back[0, 0]) and (how == "bf16" or np.isinf(back[0, 1:3]).all()), "too large is never finite"
    np.testing.assert_allclose(back[1:], x[1:], rtol=0.13 if how == "f8" else 0.004, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "how", "why"),
    [
        ("w", 4, "'w' is kept from step to step"),
        ("f", 4, "'f' is an output of the step"),
        ("step", 4, "'step' is kept from step to step"),
        ("k", 4, "'k' shares its buffer with 'l', which is read after the forward pass, too"),
        ("x", 4, "nothing reads 'x' after the forward pass"),
        ("e", 4, "'e' is made after the forward pass"),
    ],
)
def test_what_cannot_rest(name: str, how: Any, why: str) -> None:
    assert why_not(parse(STEP), name, how) == why and store(parse(STEP), name, how) is None
    with pytest.raises(UsageError, match=why):
        Stores(parse(STEP)).written({name: how})


def test_a_view_that_alone_is_read_later_rests() -> None:
    made = store(parse(STEP), "v", 2)
    assert made is not None and lines(rc.verify(made), "%g:") == ["backward %g: f32[32,64] = Exp(%v.back)"]


@pytest.mark.parametrize("how", [9, 0, 3, True, "f4", "8", -4])
def test_bad_ways_are_refused(how: Any) -> None:
    for call in (lambda: store(parse(STEP), "a", how), lambda: stored_bytes(TensorType("f32", (9,)), how)):
        with pytest.raises(UsageError, match=r"values can be stored in 8, 4 or 2 bits or as bf16, f16, f8, not in"):
            call()


def test_wrong_requests() -> None:
    with pytest.raises(UsageError, match="there is no value 'aa' to store"):
        store(parse(STEP), "aa", 4)
    with pytest.raises(UsageError, match="before 'liveness'"):
        store(Liveness().run(parse(STEP)), "a", 4)
    small = parse(STEP.replace("64,32", "4,8").replace("32,64", "8,4"))
    assert "128 bytes: less than 4,096" in why_not(small, "a", 4)
    half = parse(STEP.replace("f32", "bf16"))
    assert "would not be smaller" in why_not(half, "a", "bf16") and not why_not(half, "a", 8)


def test_a_block_without_a_step_counter_gets_one() -> None:
    text = STEP.replace("  optimize %step: i64[] = Increment(%step)\n", "").replace("  state %step: i64[]\n", "")
    block, counter = step_counter(parse(text))
    assert block.state == (counter,) and lines(block, "Increment") == ["optimize %step: i64[] = Increment(%step)"]
    made = store(parse(text), "a", 8)
    assert made is not None and rc.verify(made).state == (counter,)


def layers(names: tuple[str, ...]) -> tuple[Block, dict[str, np.ndarray]]:
    """Two layers with a GELU, the gradients of their weights, and data; these values rest in 2 bits."""
    x, t = Value("x", TensorType("f32", (32, 40))), Value("t", TensorType("f32", (32, 20)))
    w1, w2 = Value("w1", TensorType("f32", (40, 64))), Value("w2", TensorType("f32", (64, 20)))
    b = Builder()
    h = b.Gelu(b.MatMul(x, w1))
    y = b.Sub(b.MatMul(h, w2), t)
    loss = b.ReduceMean(b.Mul(y, y), keepdims=0)
    called = {loss.name: "loss", h.name: "h"}
    block = Block("layers", inputs=(x, t), parameters=(w1, w2), constants=tuple(b.constants), outputs=("loss",))
    block = block.with_operators([o.renamed(called) for o in b.operators])
    block = Autodiff("loss").run(block)
    g = np.random.default_rng(0)
    data = {v.name: g.normal(size=v.shape).astype(np.float32) for v in (x, t, w1, w2)}
    for name in names:
        stored = store(block, name, 2)
        assert stored is not None, why_not(block, name, 2)
        block = stored
    return rc.verify(block), data


def test_gradients_are_unbiased() -> None:
    """What is linear in the stored value has the exact expectation; what does not read it, the same bits."""
    exact, data = layers(())
    rough, _ = layers(("h",))
    grads = [next(n for n in exact.values() if n.startswith(f"{w}") and n.endswith("grad")) for w in ("w1", "w2")]
    feed = {k: data[k] for k in ("x", "t")}
    weights = {k: data[k] for k in ("w1", "w2")}
    want = rc.Executor().run(rc.Program(exact, dict(weights)), feed, ["loss", *grads])
    program = rc.Program(rough, {**weights, "step": np.zeros((), np.int64)})
    executor, count, found = rc.Executor(), 400, []
    for _ in range(count):
        loss, first, second = executor.run(program, feed, ["loss", *grads])
        assert loss.tobytes() == want[0].tobytes() and first.tobytes() == want[1].tobytes()
        found.append(second.copy())
    assert int(program.data["step"]) == count
    made = np.array(found, np.float64)
    z = (made.mean(axis=0) - want[2]) / (made.std(axis=0) / np.sqrt(count))
    assert np.abs(z).max() < 5 and 0.8 < z.std() < 1.2
    assert 0 < np.linalg.norm(made[0] - want[2]) < np.linalg.norm(want[2])


def test_a_transformer_step() -> None:
    """The same first loss, gradients near the exact ones, a lower peak as predicted; the same bits on a second run."""
    program, loss, feed = bert()
    peaks, losses = {}, {}
    for how in (None, 8, 2):
        runs = []
        for _ in range(2 if how == 8 else 1):
            made = program.clone() if how is None else everywhere(program, how)
            executor = rc.Executor()
            runs.append([executor.run(made, feed, [loss])[0].tobytes() for _ in range(3)])
            session = executor.session(made, [loss])
            assert session.measured_peak_bytes == session.report.peak
        assert all(r == runs[0] for r in runs)
        peaks[how], losses[how] = session.report.arena, np.frombuffer(b"".join(runs[0]), np.float32)
    assert peaks[2] < peaks[8] < 0.55 * peaks[None]
    for how, found in losses.items():
        assert found[0] == losses[None][0]
        assert how is None or 0 < np.abs(found - losses[None]).max() < 5e-3, how
