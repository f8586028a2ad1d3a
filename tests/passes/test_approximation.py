"""Approximations that a user permits: what they replace, what they save, and that nothing else changes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import models
from recompute.analysis.gradient_error import gradient_errors
from recompute.compiling.compiler import compile_step
from recompute.data.batches import synthetic_batch
from recompute.errors import UsageError
from recompute.language.ir import Block, Role
from recompute.passes import RecomputePlan
from recompute.passes.approximation.approximate import Approximate
from recompute.passes.approximation.base import parse_permissions
from recompute.passes.approximation.choices import best, parse_choice, step_of
from recompute.passes.approximation.step import Step

LOSSY = {"Sketch", "SlopeCodes", "CompressGroups"}
NETWORK = ("bert-tiny", {"seq": 64, "vocab": 100, "layers": 1})
BATCH = 16


def loaded(dropout: float = 0.1) -> tuple[rc.Program, Any]:
    program = rc.load(models.build(NETWORK[0], batch=BATCH, dropout=dropout, **NETWORK[1]))
    return program, rc.losses.cross_entropy(program["logits"])


@functools.cache
def feed() -> dict[str, np.ndarray]:
    program, _ = loaded()
    specs = {s.name: s for s in models.info(NETWORK[0], **NETWORK[1]).inputs}
    return synthetic_batch(program, 0, specs)


def trained(optimizer: Any, steps: int = 3) -> tuple[rc.Program, list[float], int]:
    """The program after some steps, its losses, and the peak, which was predicted."""
    program, loss = loaded()
    optimizer.minimize(loss)
    executor = rc.Executor()
    losses = [float(executor.run(program, feed(), [loss])[0]) for _ in range(steps)]
    session = executor.session(program, (loss.name,))
    assert session.measured_peak_bytes == session.report.peak
    return program, losses, session.report.peak


def lossy(block: Block) -> set[str]:
    return LOSSY & {o.op.name for o in block.operators}


@functools.cache
def exact() -> tuple[rc.Program, list[float], int]:
    return trained(rc.SGD(0.1))


@pytest.mark.parametrize(
    ("allowed", "operators", "share"),
    [
        ("sketch:0.2", {"Sketch"}, 0.97),
        ("sketch:64:dct", {"Sketch"}, 0.95),
        ("bits:4", {"SlopeCodes"}, 0.9),
        ("store:8", {"CompressGroups"}, 0.74),
        ("store:bf16", set(), 0.85),
        ("sketch:0.2,bits:2,store:8", LOSSY, 0.65),
    ],
)
def test_wherever_they_save_memory(allowed: str, operators: set[str], share: float) -> None:
    """The first loss has the bits of the exact step, the peak is lower and as predicted, and a second run the same."""
    program, losses, peak = trained(rc.RecomputeOptimizer(rc.SGD(0.1)).set_approximations(allowed))
    _, exact_losses, exact_peak = exact()
    assert lossy(program.block) == operators and program.plan.approximations
    assert losses[0] == exact_losses[0] and losses[1:] != exact_losses[1:]
    assert abs(losses[-1] - exact_losses[-1]) < 0.1
    assert peak < share * exact_peak
    again, other, _ = trained(rc.RecomputeOptimizer(rc.SGD(0.1)).set_approximations(allowed))
    assert other == losses and all(np.array_equal(again.data[n], a) for n, a in program.data.items())


def test_checkpoints_and_approximations() -> None:
    """What waits between checkpoints is approximated; what is recomputed is exact."""
    names = ["embeddings.out", "layer.0.out"]
    plain, losses, peak = trained(rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints(names))
    found, other, lower = trained(
        rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints(names).set_approximations(["store:8"])
    )
    assert other[0] == losses[0] == exact()[1][0] and lower < peak
    assert not lossy(plain.block) and found.plan.checkpoints == tuple(names)
    assert any(o.role is Role.RECOMPUTE for o in found.block.operators)


def test_a_budget_takes_as_few_as_it_needs() -> None:
    """A plan in a file is the same step again."""
    program, loss = loaded()
    peaks = {}
    for share in ("90%", "80%"):
        step = compile_step(
            program,
            loss.name,
            rc.SGD(0.1),
            budget=share,
            approximations="store:8",
            slicing=False,
            effort=0.1,
        )
        assert step.planned.fits and step.planned.bound is None
        peaks[share] = len(step.planned.approximations), step.figures.peak_bytes
        again = compile_step(program, loss.name, rc.SGD(0.1), plan=step.plan)
        assert again.figures.peak_bytes == step.figures.peak_bytes
    assert 0 < peaks["90%"][0] < peaks["80%"][0] and peaks["90%"][1] > peaks["80%"][1]
    assert step.saved is not None and step.saved.approximations == step.planned.approximations


def test_approximations_come_before_recomputation_where_that_is_faster() -> None:
    """Gradients from sketches take less time, which pays for recomputation; the plan in a file is the same step."""
    program, loss = loaded()
    options = {"budget": "75%", "slicing": False, "effort": 0.1}
    exact_step = compile_step(program, loss.name, rc.SGD(0.1), **options)
    step = compile_step(program, loss.name, rc.SGD(0.1), **options, approximations="sketch:0.2")
    assert step.plan.before and step.planned.approximations == (*step.plan.before, *step.plan.approximations)
    assert step.planned.reruns and step.planned.seconds < exact_step.planned.seconds
    again = compile_step(program, loss.name, rc.SGD(0.1), plan=step.saved)
    assert again.program.block == step.program.block


def test_nothing_lossy_where_the_step_fits() -> None:
    program, loss = loaded()
    step = compile_step(program, loss.name, rc.SGD(0.1), budget="100%", approximations="store:2,sketch:0.2")
    assert not lossy(step.program.block) and not step.planned.approximations


def test_a_strategy_without_a_budget() -> None:
    program, loss = loaded()
    plain = compile_step(program, loss.name, rc.SGD(0.1), strategy="chen")
    step = compile_step(program, loss.name, rc.SGD(0.1), strategy="chen", approximations="store:8")
    assert step.planned.reruns and step.planned.approximations
    assert step.figures.peak_bytes < plain.figures.peak_bytes


def test_gradient_errors() -> None:
    """Fewer bits, larger errors; a sketch of rows adds (B - k)/k times the variance of the batch."""
    program, loss = loaded()
    plain = compile_step(program, loss.name, rc.SGD(0.1))
    specs = {s.name: s for s in models.info(NETWORK[0], **NETWORK[1]).inputs}
    errors = {}
    for allowed in ("store:8", "store:2", "sketch:0.25:rows"):
        step = compile_step(program, loss.name, rc.SGD(0.1), approximations=allowed)
        found = gradient_errors(plain, step, loss.name, synthetic_batch(plain.program, 0, specs))
        assert found["same_loss"] and found["worst"]["relative_error"] >= found["relative_error"] / 2
        errors[allowed] = found["relative_error"]
    assert 0 < errors["store:8"] < 0.1 * errors["store:2"] < 0.5
    assert found["sketches"] and all(s["ratio"] == pytest.approx(3) for s in found["sketches"] if s["of"] == 1024)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sketch:0", "the rate must lie between 0 and 1"),
        ("sketch:1.5", "the rate must lie between 0 and 1"),
        ("sketch:-3", "the rate must lie between 0 and 1"),
        ("sketch:nan", "the rate must lie between 0 and 1"),
        ("sketch", "give sketch:RATE"),
        ("sketch:0.2:row", "there is no sketch 'row'.*rows"),
        ("bits:0", "1 to 4 bits"),
        ("bits:9", "1 to 4 bits"),
        ("bits", "1 to 4 bits"),
        ("store:3", "values cannot be stored as '3'"),
        ("store:f9", "values cannot be stored as 'f9'"),
        ("store", "give store:8"),
        ("stores:8", "there is no approximation 'stores'.*store"),
        ("", "there is no approximation ''"),
        ("store:8,store:4", "'store' is given twice: store:8 and store:4"),
    ],
)
def test_bad_permissions(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_permissions(text)
    with pytest.raises(UsageError, match=why):
        rc.RecomputeOptimizer(rc.SGD(0.1)).set_approximations(text)


def test_what_cannot_be_combined() -> None:
    program, loss = loaded()
    with pytest.raises(UsageError, match="a plan already defines what is approximated"):
        compile_step(program, loss.name, rc.SGD(0.1), plan=RecomputePlan(), approximations="store:8")
    with pytest.raises(UsageError, match="host memory are not combined with approximations"):
        compile_step(program, loss.name, rc.SGD(0.1), budget="60%", offload=True, approximations="store:8")
    with pytest.raises(UsageError, match="keeps 100,000 rows, and the products over the batch have 1,024 at most"):
        compile_step(program, loss.name, rc.SGD(0.1), approximations="sketch:100000")


def minimized() -> Block:
    program, loss = loaded()
    rc.SGD(0.1).minimize(loss)
    return program.block


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("nothing=store:8", "there is no value 'nothing'"),
        ("layer.0.gelu", "is no approximation of a value"),
        ("=store:8", "is no approximation of a value"),
        ("layer.0.attention.residual=bits:4", "not all of its readers can do with this"),
        ("logits=store:8", "no such value waits"),
    ],
)
def test_choices_that_do_not_fit(choice: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Approximate((choice,)).run(minimized())


def test_choices_are_text() -> None:
    for text in ("layer.0.gelu=sketch:0.2:rows", "a=b=store:8", "h=bits:4+sketch:64:dct"):
        assert str(parse_choice(text)) == text


def test_only_training_steps() -> None:
    program, _ = loaded()
    with pytest.raises(UsageError, match="call minimize first"):
        Approximate(everywhere=("store:8",)).run(program.block)


STEP = """\
program step {
  input %x: f32[64,32]
  param %w: f32[32,32]
  state %step: i64[]
  %a: f32[64,32] = MatMul(%x, %w)
  %b: f32[64,32] = Exp(%a)
  %c: f32[64,32] = Relu(%a)
  %v: f32[32,64] = Reshape(%b) {shape=[32,64]}
  %d: f32[64,32] = Add(%b, %c)
  backward %e: f32[64,32] = Mul(%d, %a)
  backward %f: f32[64,32] = Add(%e, %a)
  backward %g: f32[32,64] = Exp(%v)
  backward %again: f32[64,32] = Exp(%a)
  backward %h: f32[64,32] = Mul(%again, %f)
  optimize %step: i64[] = Increment(%step)
  output %f, %g, %h
}
"""


def test_where_codes_are_made_and_read() -> None:
    """Before the last forward reader, which may write over the value; one copy for readers that are near."""
    made = rc.verify(Approximate(("a=store:4",)).run(rc.parse(STEP)))
    names = [next(op.writes()).name for op in made.operators]
    assert names == ["a", "b", "a.stored", "c", "v", "d", "a.again", "e", "f", "g", "again", "h", "step"]
    assert rc.parse(rc.show(made)) == made
    view = rc.verify(Approximate(("b=store:bf16",)).run(rc.parse(STEP)))
    at = {next(op.writes()).name: op for op in view.operators}
    assert at["g"].inputs[0].shape == (32, 64) and at["g"].inputs[0].name not in ("v", "b")


def test_copies_that_are_made_again_are_looked_through() -> None:
    """`again` is the forward value b, so that its reader reads b as far as approximations are concerned."""
    step = Step(rc.parse(STEP))
    a = next(v for v in step.waiting() if v.name == "a")
    assert [(leaf.at, leaf.origin.name) for leaf in step.leaves(a)] == [(5, "a"), (6, "a"), (9, "b")]


def test_all_stays_linear_in_operators() -> None:
    """Ten times the layers, about ten times the operations of the search (counted, not timed)."""

    def reads(layers: int) -> int:
        t = "f32[256,32]"
        lines = ["program p {", f"  input %x: {t}", "  param %w: f32[32,32]", f"  %m0: {t} = MatMul(%x, %w)"]
        for i in range(layers):
            lines += [f"  %h{i}: {t} = Gelu(%m{i})", f"  %m{i + 1}: {t} = MatMul(%h{i}, %w)"]
        lines += [f"  %loss: f32[] = ReduceSum(%m{layers}) {{axes=[0, 1], keepdims=0}}", "  output %loss", "}"]
        made = rc.Program(rc.parse("\n".join(lines) + "\n"), {"w": np.zeros((32, 32), np.float32)})
        rc.SGD(0.1).minimize(made["loss"])
        counted = 0
        step = step_of(made.block)
        lookup = step.readers

        class Counting(dict):  # type: ignore[type-arg]
            def get(self, *args: Any) -> Any:
                nonlocal counted
                counted += 1
                return lookup.get(*args)

        step.readers = Counting()
        assert len(best(step, parse_permissions("bits:4,sketch:0.2"), lambda c: c.saved)) >= layers
        return counted

    assert reads(100) < 15 * reads(10)


def test_the_report_shows_what_stands_for_other_values() -> None:
    from recompute.report.timeline import timeline

    program, loss = loaded()
    step = compile_step(program, loss.name, rc.SGD(0.1), approximations="sketch:0.2,bits:4,store:8")
    found = {a.role for a in timeline(step.program.block, step.cost).allocations}
    assert "approximate" in found
    plain = compile_step(program, loss.name, rc.SGD(0.1))
    assert "approximate" not in {a.role for a in timeline(plain.program.block, plain.cost).allocations}


POINTWISE = """\
program p {
  input %x: f32[8,16,6,6]
  param %w: f32[24,16,1,1]
  param %v: f32[4,24,3,3]
  %h: f32[8,24,6,6] = Conv(%x, %w)
  %z: f32[8,4,4,4] = Conv(%h, %v)
  %loss: f32[] = ReduceSum(%z) {axes=[0, 1, 2, 3], keepdims=0}
  output %loss
}
"""


def test_pointwise_convolutions_are_products_over_pixels() -> None:
    """The mean of sketched gradients is the exact one, within its own error; other convolutions stay as they are."""
    g = np.random.default_rng(0)
    data = {"w": g.normal(size=(24, 16, 1, 1)), "v": g.normal(size=(4, 24, 3, 3))}
    data = {n: a.astype(np.float32) for n, a in data.items()}
    program = rc.Program(rc.parse(POINTWISE), data)
    rc.SGD(0.0).minimize(program["loss"])
    feed = {"x": g.normal(size=(8, 16, 6, 6)).astype(np.float32)}
    executor, count = rc.Executor(), 300
    exact = executor.run(program, feed, ["w_grad", "v_grad"])
    program.block = Approximate(everywhere=("sketch:0.25",)).run(program.block)
    names = [o.op.name for o in program.block.operators]
    assert names.count("Sketch") == 2 and names.count("ConvGradWeight") == 1
    found = []
    for _ in range(count):
        w, v = executor.run(program, feed, ["w_grad", "v_grad"])
        assert np.array_equal(v, exact[1])
        found.append(w.astype(np.float64))
    made = np.array(found)
    z = (made.mean(axis=0) - exact[0]) / (made.std(axis=0) / np.sqrt(count))
    assert np.abs(z).max() < 5 and 0.8 < z.std() < 1.2
