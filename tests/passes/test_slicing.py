"""Parts of a step in slices: the same losses and parameters, less memory, and clear errors."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import models
from recompute.analysis.strategies import in_slices as in_slices_of
from recompute.analysis.strategies import lowest_plan
from recompute.compiling.compiler import compile_step
from recompute.compiling.steps import Steps, attach_loss
from recompute.cost import device
from recompute.errors import UsageError
from recompute.language.ir import Role
from recompute.language.kernels import PROVIDERS
from recompute.passes import Target, memory_report
from recompute.passes.planners.core.simulate import simulate
from recompute.passes.planners.core.watch import Watch
from recompute.passes.planners.fit import with_slices
from recompute.passes.planners.fit.problem import Fitting, _with_sums_there
from recompute.passes.planners.fit.with_slices import Sliced
from recompute.passes.slicing.open_means import open_means
from recompute.passes.slicing.regions import Found, found_regions, region_candidates
from recompute.passes.slicing.slicing import Slice, Slicing, in_slices, micro_step, parse_slicing
from recompute.planning.saved import load_plan
from recompute.runtime.cpu import register_all
from recompute.runtime.cpu.device import native

register_all()

#: a hidden layer of a gpt2-tiny, and attention's scores
HIDDEN, SCORES = "h.0.mlp.c_fc.matmul..h.0.mlp.c_proj.matmul:1:4", "h.0.attn.product..h.0.attn.context:0:2"

#: kernels whose workspace does not depend on the family of the processor
TARGET = rc.Target(providers=tuple(n for n in ("loops", "numba", "blas", "convolution") if n in PROVIDERS))


@functools.cache
def forward(name: str, batch: int, **options: int) -> tuple[rc.Program, str]:
    program = rc.load(models.build(name, batch=batch, **options))
    program.fuse_attention = program.fuse_head = False  # its parts are named below
    loss = attach_loss(program, None)[0]
    program.block = dataclasses.replace(program.block, outputs=(loss,))
    return program, loss


def small(batch: int = 2) -> tuple[rc.Program, str]:
    return forward("gpt2-tiny", batch, layers=1, hidden=32, vocab=64, seq=16, context=16)


def trained(program: rc.Program, loss: str, optimizer: Any, steps: int = 2) -> tuple[list[float], dict, Any]:
    """Losses, parameters and the session of a few steps."""
    step = program.clone()
    optimizer.minimize(step[loss])
    rng = np.random.default_rng(0)
    feed = {v.name: rng.integers(0, 8, v.shape) if not v.type.is_float else
            rng.standard_normal(v.shape).astype(np.float32) for v in step.block.inputs}  # fmt: skip
    executor = rc.Executor()
    losses = [float(executor.run(step, feed, [loss])[0]) for _ in range(steps)]
    return losses, {k: np.array(v) for k, v in step.data.items()}, executor.session(step, [loss])


def close(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    for name, x in a.items():
        np.testing.assert_allclose(b[name], x, rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("slices", ["all:0:2", "all:0:4", HIDDEN, SCORES, f"{HIDDEN} {SCORES}"])
def test_slices_train_the_same(slices: str) -> None:
    program, loss = small(4)
    losses, parameters, _ = trained(program, loss, rc.Momentum(0.1))
    optimizer = rc.RecomputeOptimizer(rc.Momentum(0.1)).set_slices(slices.split())
    got, others, _ = trained(program, loss, optimizer)
    np.testing.assert_allclose(got, losses, rtol=1e-6)
    close(parameters, others)


def test_the_whole_step_in_slices_computes_nothing_twice_and_needs_less() -> None:
    program, loss = forward("gpt2-tiny", 8, seq=64, layers=1)
    plain = compile_step(program, loss, rc.SGD(0.1))
    sliced = compile_step(program, loss, rc.RecomputeOptimizer(rc.SGD(0.1)).set_slices("all:0:8"))
    assert sliced.figures.recomputed_operators == 0
    assert sliced.figures.flops < 1.02 * plain.figures.flops
    assert sliced.figures.peak_bytes < 0.6 * plain.figures.peak_bytes


def test_slices_are_views_and_are_written_in_place() -> None:
    program, loss = small(1)
    step = program.clone()
    rc.SGD(0.1).minimize(step[loss])
    regions = found_regions(step.block, wide=False)
    hidden = next(r for r in regions if "c_fc" in r.slicing.first)
    block = in_slices(step.block, dataclasses.replace(hidden.slicing, pieces=4))
    made = [o for o in block.operators if o not in step.block.operators]
    cut = [o for o in made if o.op.name == "Slice" and o.inputs[0].name not in {v.name for v in block.persistent()}]
    assert cut and all(o.views() for o in cut)
    assert all(o.joins() for o in made if o.op.name == "Concat")


def test_regions_that_are_found_can_be_carried_out() -> None:
    """Beside adapters wide values are made from thin ones; a product of another input is not in a region for that."""
    base = rc.load(rc.models.build("llama-tiny", batch=4, layers=1, hidden=32, inner=48, heads=2, groups=1, seq=32))
    program = rc.lora(base, ["*_proj.weight"], r=4)
    rc.SGD(0.1).minimize(rc.losses.cross_entropy(program["logits"]))
    found = [f for wide in (False, True) for f in found_regions(program.block, wide)]
    assert found
    for f in found:
        assert Slice((str(f.slicing),)).run(program.block) != program.block


def test_the_price_of_slices_is_what_they_take() -> None:
    """Of each kind of region; like layers are of one kind."""
    program, loss = forward("gpt2-tiny", 8, layers=3, hidden=32, vocab=64, seq=16, context=16)
    step = program.clone()
    rc.SGD(0.1).minimize(step[loss])
    block, seconds = open_means(step.block), device("a100-80").seconds
    found = region_candidates(block, wide=False)
    kinds = {f.kind: f for f in found}
    assert len(kinds) < len(found)
    for f in kinds.values():
        sliced = Slice((str(dataclasses.replace(f.slicing, pieces=4)),)).run(block)
        taken = sum(map(seconds, sliced.operators)) - sum(map(seconds, block.operators))
        assert f.extra_seconds(4, seconds) == pytest.approx(taken, rel=0.02)


def test_one_slice_of_many_finds_sums_and_leaves_them() -> None:
    """What is alive in one slice is alive in all: no order makes sums later, or uses them up before the last slice."""
    program, loss = small(8)
    step = program.clone()
    rc.SGD(0.1).minimize(step[loss])
    block = open_means(step.block)
    one = micro_step(block, parse_slicing("all:0:8"))
    assert one is not None
    alone = _with_sums_there(one)
    assert len(one.there) >= len(block.parameters)
    assert one.there <= {v.name for v in alone.inputs}
    assert not one.there & {v.name for o in alone.operators for v in o.writes()}
    gradients = {v.name for o in one.block.operators if o.role is Role.OPTIMIZE for v in o.reads()}
    made = {v.name for o in one.block.operators if o.role is Role.BACKWARD for v in o.writes()}
    assert gradients & made and gradients & made <= set(alone.outputs)


def test_peaks_are_predicted_and_recomputation_keeps_the_bits() -> None:
    program, loss = small(4)
    optimizer = rc.RecomputeOptimizer(rc.SGD(0.1)).set_slices([HIDDEN])
    losses, parameters, session = trained(program, loss, optimizer)
    assert session.measured_peak_bytes == memory_report(session.block).peak
    again = rc.RecomputeOptimizer(rc.RecomputeOptimizer(rc.SGD(0.1)).set_slices([HIDDEN])).set_checkpoints(["h.0.out"])
    got, others, _ = trained(program, loss, again)
    assert got == losses
    for name, x in parameters.items():
        assert (others[name] == x).all(), name


def test_a_budget_is_met_by_slices_of_the_batch_and_the_plan_is_saved(tmp_path: Any) -> None:
    program, loss = forward("gpt2-tiny", 8, seq=64, layers=1)
    step = compile_step(program, loss, rc.SGD(0.1), budget="60%", target=TARGET)
    assert step.planned.slices == ("all:0:4",) and step.planned.fits and step.planned.overhead < 0.05
    without = compile_step(program, loss, rc.SGD(0.1), budget="90%", slicing=False, target=TARGET)
    assert not without.planned.slices
    step.saved.save(tmp_path / "plan.json")
    saved = load_plan(tmp_path / "plan.json")
    assert saved.slices == step.planned.slices
    other = compile_step(program, loss, rc.SGD(0.1), plan=tmp_path / "plan.json", target=TARGET)
    assert other.figures.peak_bytes == step.figures.peak_bytes


def test_other_batches_keep_the_slices() -> None:
    options = {"seq": 64, "layers": 1}
    steps = Steps("gpt2-tiny", optimizer=rc.RecomputeOptimizer(rc.SGD(0.1)).set_slices("all:0:4"), options=options)
    plain = Steps("gpt2-tiny", optimizer=rc.SGD(0.1), options=options)
    for batch in (4, 8):
        assert steps.compile(batch).figures.peak_bytes < 0.9 * plain.compile(batch).figures.peak_bytes


def test_text_of_a_sliced_step_is_read_back() -> None:
    program, loss = small(2)
    step = program.clone()
    rc.SGD(0.1).minimize(step[loss])
    block = Slice(("all:0:2",)).run(step.block)
    assert rc.parse(rc.show(block)) == block


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("h.0.out", "FIRST..LAST:AXIS:PIECES"),
        ("all:0:4@dp=0/2", "FIRST..LAST:AXIS:PIECES"),
        ("ranks:0:4", "FIRST..LAST:AXIS:PIECES"),
        ("all:0:1", "2 to 4 pieces"),
        ("all:0:5", "2 to 4 pieces"),
        ("all:7:2", "no input has an axis 7"),
        ("nothing..h.0.out:0:2", "makes 'nothing'"),
        ("h.0.out..h.0.attn.product:0:2", "exchange them"),
        ("h.0.mlp.c_fc.matmul..h.0.mlp.c_proj.matmul:9:2", "has no axis 9"),
        ("h.0.attn.probs..h.0.attn.context:3:2", "it can along"),
        ("h.0.attn.product..h.0.attn.context:1:2", "Dropout, .* cannot run in slices"),
    ],
)
def test_impossible_slices_are_refused(text: str, why: str) -> None:
    program, loss = small(4)
    with pytest.raises(UsageError, match=why):
        rc.RecomputeOptimizer(rc.SGD(0.1)).set_slices(text).minimize(program.clone()[loss])


def test_a_batch_that_an_operator_needs_whole_is_refused() -> None:
    program, loss = forward("mobilenet_v1", 2)
    with pytest.raises(UsageError, match="needed whole"):
        rc.RecomputeOptimizer(rc.SGD(0.1)).set_slices("all:0:2").minimize(program.clone()[loss])


def test_slicing_reads_what_it_writes() -> None:
    for s in (Slicing("a", "b", -1, 3), Slicing("all", "all", 0, 2), Slicing("micro", "micro", 0, 2)):
        assert parse_slicing(str(s)) == s


def test_plans_are_those_of_one_slice_and_lower_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "threads", lambda: 1)  # each thread has workspace of its own
    options = {"layers": 1, "seq": 32, "hidden": 32, "vocab": 64, "context": 32}
    steps = Steps("gpt2-tiny", optimizer=rc.SGD(0.1), options=options, target=TARGET)
    fitting = steps.fitting(16).of(("all:0:4",))
    problem = fitting.derived.problem
    assert simulate(problem, range(len(problem))).peak == pytest.approx(fitting.unrepeated.peak, rel=0.05)
    found = lowest_plan(steps, 16, Watch(effort=0.05), slices="all:0:4")
    assert found is not None
    assert steps.peak(16, found.kept) < 0.75 * steps.peak(16, in_slices_of("all:0:4").kept)
    assert {r.before for r in found.plan.reruns} <= set(range(len(fitting.block.operators)))


def test_gradients_in_halves_are_summed_in_float32() -> None:
    program, loss = small(4)
    step = program.clone()
    rc.RecomputeOptimizer(rc.MixedPrecision(rc.SGD(0.1), "bf16")).set_slices("all:0:4").minimize(step[loss])
    sums = [o for o in step.operators if o.role is rc.Role.BACKWARD and o.op.name == "Add"]
    updates = [o for o in step.operators if o.op.name == "SGDUpdate"]
    made = {v.name: o for o in step.operators for v in o.writes()}
    assert sums and all(o.inputs[1].dtype == "f32" for o in updates)
    assert not any(made[o.inputs[1].name].op.name == "Cast" for o in updates)  # not summed in halves and then cast


def test_checkpoints_are_those_of_each_slice() -> None:
    program, loss = small(4)
    plain = trained(program, loss, rc.RecomputeOptimizer(rc.SGD(0.1)).set_slices("all:0:2"))
    optimizer = rc.RecomputeOptimizer(rc.SGD(0.1)).set_slices("all:0:2").set_checkpoints(["h.0.out"])
    found = trained(program, loss, optimizer)
    assert found[0] == plain[0] and all((found[1][n] == a).all() for n, a in plain[1].items())
    assert found[2].measured_peak_bytes == memory_report(found[2].block).peak


@pytest.mark.parametrize("least", [1, 2, 3, 5])
def test_as_few_regions_as_fit(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones; that one less does not fit was tried."""
    seen: dict[int, bool] = {}

    def tried(_: Sliced, regions: list[int]) -> bool:
        assert regions == list(range(len(regions))) and len(regions) not in seen
        return seen.setdefault(len(regions), len(regions) >= least)

    monkeypatch.setattr(Sliced, "tried", tried)
    search: Any = Sliced(None, 0)  # type: ignore[arg-type]
    search._fewer(list(range(5)))
    assert min((n for n, fits in seen.items() if fits), default=5) == least
    assert max((n for n, fits in seen.items() if not fits), default=0) == least - 1


def test_slices_of_a_long_step_that_leave_little_room_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no first choice, but nothing is refused that they make fit."""
    program, loss = small(4)
    step = program.clone()
    rc.SGD(0.1).minimize(step[loss])
    fitting = Fitting(step.block, Target(providers=(), cost=device("a100-80")))
    budget = fitting.of(("all:0:4",)).unrepeated.peak
    monkeypatch.setattr(with_slices, "SOLVED_IN_PARTS", 0)
    search = Sliced(fitting, budget)
    search.batches()
    assert search.fits is None and search.doubtful
    search.in_doubt()
    assert search.fits is not None and search.fits.plan.slices == ("all:0:4",)


def test_kinds_of_regions_differ_by_axis_and_attributes() -> None:
    text = """program p {
  input %x: f32[8,8]
  %y: f32[8,8] = Softmax(%x) {axis=AXIS}
  %z: f32[8,8] = Exp(%y)
  output %z
}"""
    blocks = [rc.parse(text.replace("AXIS", axis)) for axis in ("0", "1")]
    found = [Found(Slicing("y", "z", axis, 2), 8, 0, 0, b.operators, None, None) for b in blocks for axis in (0, 1)]  # type: ignore[arg-type]
    assert len({f.kind for f in found}) == 4
