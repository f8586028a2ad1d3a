"""Every planner on the zoo's networks: what it plans is what is compiled, fits, and trains to the same bits.

What went wrong elsewhere (PLANNING.md), and the tests that say it does not here:

- a budget that is no peak: `test_zoo_within_a_budget` (compiled and measured peak against the budget)
- random operators that differ on the second run, batch-norm statistics updated twice: all state is compared there, and
  in test_planner_random_programs.py and test_zoo_training.py; `check_reruns` finds reruns that change state
- second-order gradients after recomputation: `test_second_order_gradients_of_a_planned_step`
- common-subexpression elimination undoing it, the executor reordering: `test_nothing_undoes_or_reorders_a_plan`
- recomputation of values nobody needs: `check_reruns`, for every plan here
- checkpoints unsorted, duplicated, off the loss path: test_recompute_optimizer.py
- the limit missed without a word: `test_a_plan_that_does_not_fit_is_an_error`
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from test_planner_properties import LITTLE, options
from zoo_cases import compiled, network, zoo

import recompute as rc
from recompute import parse
from recompute.compiling.compiler import plain_fitting
from recompute.cost import device
from recompute.errors import UsageError
from recompute.language.builder import Builder
from recompute.language.ir import Block, Free, Role
from recompute.language.op import op_class
from recompute.passes import DeadCode
from recompute.passes.gradient.autodiff import differentiate
from recompute.passes.planners import PLANNERS, plan, plan_of
from recompute.passes.planners.core.bound import least_budget
from recompute.passes.planners.core.derive import derive
from recompute.passes.planners.core.schedules import keep_schedule
from recompute.passes.planners.core.simulate import pruned
from recompute.passes.planners.fit.lowered import derive_for
from recompute.passes.planners.fit.plan import candidates, fit_within
from recompute.passes.planners.fit.problem import Fitted, Fitting
from recompute.passes.recomputation.recompute import RecomputePlan, Rerun, apply
from recompute.passes.recomputation.split_norms import FuseNorms
from recompute.passes.scheduling.schedule import live_peak
from recompute.passes.sequence import lowered
from recompute.runtime.cpu.session import Session
from recompute.runtime.lowering import resolved
from recompute.testing import evaluate

pytest.importorskip("ortools", reason="the extra 'plan' is not installed")

#: large enough for activations to matter
BATCH = 8
SHARES = (0.9, 0.7, 0.5)  # see budget_of
COST = device("v100-32")
#: networks that compile in a moment meet several strategies each, the others one that is quick
SMALL = ("mlp", "mlp4", "lenet", "lstm", "alexnet", "bert-tiny", "gpt2-tiny", "unet", "fcn8")
SLOW = ("auto", "optimal", "checkmate", "checkmate-lp", "moccasin", "kusumoto-exact", "kusumoto-exact-memory")
QUICK = tuple(s for s in sorted(PLANNERS) if s not in SLOW)
#: left to -m hours: compiling them takes longer than a second
DEEP = ("amoebanet", "bert-medium", "fcos-tiny", "gpt2-small", "inception_v3", "mobilenet_v2", "nasnet", "resnet50")
DEEP += ("vgg11", "vgg11_bn")


def turns() -> list[tuple[str, str, float]]:
    """(network, strategy, share): strategies take turns, so that each meets several networks."""
    every = itertools.cycle(sorted(PLANNERS))
    quick = itertools.cycle(QUICK)
    share = itertools.cycle(SHARES)
    found = [(name, next(every), next(share)) for name in SMALL for _ in range(3)]
    others = [n for n in zoo() if n not in SMALL and n not in DEEP]
    return found + [(name, next(quick), next(share)) for name in others]


TURNS = turns()


def trained(name: str, block: Block, peak: int, steps: int = 2) -> tuple[list[bytes], dict[str, np.ndarray]]:
    """The bits of the losses, and all state afterwards; the measured peak is the predicted one."""
    _, loss, feed = network(name, BATCH)
    step, executor = compiled(name, BATCH).program.clone(), rc.Executor()
    step.block = block
    losses = [executor.run(step, feed, [loss])[0].tobytes() for _ in range(steps)]
    assert executor.session(step, [loss]).measured_peak_bytes == peak
    return losses, step.data


@cache
def plain(name: str) -> tuple[list[bytes], dict[str, np.ndarray]]:
    f = fitting(name)
    return trained(name, f.plain.compiled, f.plain.peak)


@cache
def fitting(name: str) -> Fitting:
    program, loss, _ = network(name, BATCH)
    return plain_fitting(
        program, loss, rc.Momentum(learning_rate=0.01), rc.Target(providers=(), cost=COST, schedule=name in SMALL)
    )


@cache
def lowest(name: str) -> int:
    """The least compiled peak that two quick strategies find."""
    f = fitting(name)
    found = [c for s in ("cut-sweep", "gruslys") for c in candidates(f, f.derived.problem.fixed + 1, s, tries=1)]
    return min(f.plain.peak, *(c.peak for c in found))


def budget_of(name: str, share: float) -> int:
    """So much of the way from the lowest peak that is easily found to the plain step's."""
    low = lowest(name)
    return low + int((fitting(name).plain.peak - low) * share)


def check_reruns(fitted: Fitted) -> None:
    """Nothing runs again for nobody, nor does what changes state, and dead code is all gone."""
    again = [op for op in fitted.block.operators if op.role is Role.RECOMPUTE]
    read = {v.name for op in fitted.block.operators for v in op.reads()} | set(fitted.block.outputs)
    assert not [op for op in again if not any(v.name in read for v in op.writes())]
    assert not [op for op in again if op.op.updates]
    applied = apply(fitted.base, fitted.plan)
    kept = DeadCode().run(applied)
    count = sum(op.role is Role.RECOMPUTE for op in applied.operators)
    assert count == sum(op.role is Role.RECOMPUTE for op in kept.operators)
    assert sum(op.role is Role.RECOMPUTE for op in FuseNorms().run(kept).operators) == len(again)


def check_judge(f: Fitting, fitted: Fitted) -> None:
    """The planner's account is the program's: live bytes where nothing is joined, and not less where parts are."""
    assert fitted.planned is not None
    problem = next(d.problem for d, scheduled in f.bases() if scheduled == fitted.scheduled)
    live = live_peak(fitted.block)
    told = fitted.planned.outcome.peak - problem.fixed
    assert told == live if not problem.shared else told >= live


def check_numbers(name: str, fitted: Fitted) -> None:
    """Losses and all that is trained are the plain step's, bit for bit."""
    expected, before = plain(name)
    losses, after = trained(name, fitted.compiled, fitted.peak)
    assert losses == expected
    for key, array in before.items():
        assert array.tobytes() == after[key].tobytes(), key


def check_within_a_budget(name: str, strategy: str, share: float) -> bool:
    """Whether the strategy found a plan that fits, which then keeps all its promises; it says so if not."""
    f = fitting(name)
    budget = budget_of(name, share)
    try:
        fitted = fit_within(f, budget, strategy, options(strategy))
    except UsageError as e:
        assert f"{budget:,}" in str(e) or "takes up to" in str(e) or "lower sets" in str(e), str(e)
        return False
    assert fitted.peak <= budget
    if fitted.planned is not None:
        check_judge(f, fitted)
    check_reruns(fitted)
    check_numbers(name, fitted)
    return True


def check_whatever_it_plans(name: str, strategy: str) -> None:
    """The plan with the lowest peak that a strategy knows, within a budget that nothing fits."""
    f = fitting(name)
    for found in candidates(f, f.derived.problem.fixed + 1, strategy, options(strategy), tries=1):
        check_judge(f, found)
        check_reruns(found)
        check_numbers(name, found)


@pytest.mark.parametrize(
    ("name", "strategy", "share"),
    TURNS,
    ids=lambda x: str(x),
)
def test_zoo_within_a_budget(name: str, strategy: str, share: float) -> None:
    if lowest(name) == fitting(name).plain.peak and strategy in QUICK:
        check_whatever_it_plans(name, strategy)
    else:
        check_within_a_budget(name, strategy, share)


@pytest.mark.hours
@pytest.mark.parametrize("name", zoo())
def test_zoo_within_every_budget(name: str) -> None:
    """All of it, on two cores only where somebody asks by `-m hours`."""
    for strategy, share in itertools.product(sorted(PLANNERS), SHARES):
        check_within_a_budget(name, strategy, share)


def test_every_strategy_and_most_networks_have_their_turn() -> None:
    assert {s for _, s, _ in TURNS} == set(PLANNERS)
    assert {n for n, _, _ in TURNS} == set(zoo()) - set(DEEP)
    assert set(LITTLE) <= set(PLANNERS)


# -- promises ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("unet", "lstm"))
@pytest.mark.parametrize("strategy", ("auto", "cut-sweep", "gruslys", "feng-huang"))
def test_the_same_plan_every_time(name: str, strategy: str) -> None:
    """Equal problems of which nothing is remembered, the same plan."""
    problem, budget = fitting(name).derived.problem, budget_of(name, 0.6)
    found = [plan(replace(problem), budget=budget, strategy=strategy, **options(strategy)) for _ in range(2)]
    assert found[0].plan == found[1].plan


@pytest.mark.parametrize("name", ("unet", "lstm"))
def test_a_bigger_budget_never_gives_a_slower_plan(name: str) -> None:
    """Budgets in ascending order, each better informed than the one before."""
    problem = replace(fitting(name).derived.problem)
    asked = [
        plan(problem, budget=budget_of(name, s), strategy="auto", **options("auto"))
        for s in (0.3, 0.45, 0.6, 0.7, 0.85, 1.0)
    ]
    fitting_ones = [a for a in asked if a.fits]
    assert len(fitting_ones) > 2
    for small, large in itertools.pairwise(fitting_ones):
        assert large.outcome.cost <= small.outcome.cost
        assert large.bound is not None and large.outcome.cost >= large.bound * (1 - 1e-9)


@pytest.mark.parametrize("name", ("lstm", "mlp4"))
def test_a_budget_below_the_provable_minimum_is_refused_with_it(name: str) -> None:
    f = fitting(name)
    least = least_budget(f.derived.problem)
    with pytest.raises(UsageError, match=f"at least {least:,} are needed"):
        fit_within(f, least - 1, "auto", options("auto"))


def test_a_plan_that_does_not_fit_is_an_error() -> None:
    """Whether or not the strategy knows budgets."""
    f = fitting("bert-tiny")
    budget = f.derived.problem.fixed + (f.plain.peak - f.derived.problem.fixed) // 50
    for strategy in ("chen", "chen-sweep", "gruslys", "kusumoto", "feng-huang", "min-cut", "rotor"):
        with pytest.raises(UsageError, match=f"finds no plan that fits {budget:,} bytes: its lowest peak is"):
            fit_within(f, budget, strategy)


def test_nothing_undoes_or_reorders_a_plan() -> None:
    """The compiled block holds every rerun, and the executor's steps are its operators in order."""
    f = fitting("bert-tiny")
    fitted = fit_within(f, budget_of("bert-tiny", 0.5), "feng-huang")
    planned = [op for op in fitted.compiled.operators if not isinstance(op.op, Free)]
    again = sorted(v.name for op in fitted.block.operators if op.role is Role.RECOMPUTE for v in op.writes())
    assert again and again == sorted(v.name for op in planned if op.role is Role.RECOMPUTE for v in op.writes())
    step = compiled("bert-tiny", BATCH).program.clone()
    step.block = fitted.compiled
    steps = [bound.op for bound in Session(fitted.compiled, step.data).steps]
    place = {id(op): i for i, op in enumerate(planned)}
    assert [place[id(op)] for op in steps] == sorted(place[id(op)] for op in steps)


TWICE = """\
program twice {
  input %x: f64[4,3]
  param %w: f64[3,3]
  %a: f64[4,3] = MatMul(%x, %w)
  %t: f64[4,3] = Tanh(%a)
  %s: f64[4,3] = Sigmoid(%t)
  %p: f64[4,3] = Mul(%s, %t)
  %e: f64[4,3] = Tanh(%p)
  %loss: f64[] = ReduceSum(%e) {keepdims=0}
  output %loss
}
"""


def test_second_order_gradients_of_a_planned_step() -> None:
    """A gradient's own gradient is that of the program itself, whatever ran again."""
    once, ((_, first),) = differentiate(parse(TWICE), "loss", ["w"])
    b = Builder.on(once, role=Role.LOSS)
    norm = b.emit(op_class("ReduceSum")(keepdims=0), b.Mul(first, first), name="norm")
    block = once.with_operators((*once.operators, *b.operators), outputs=("loss", norm.name))
    twice, ((_, second),) = differentiate(block, norm.name, ["w"])
    twice = DeadCode().run(twice.with_operators(twice.operators, outputs=("loss", second.name)))
    g = np.random.default_rng(0)
    given = {"x": g.standard_normal((4, 3)), "w": g.standard_normal((3, 3))}
    expected = evaluate(twice, given, ["loss", second.name])
    d = derive(twice, COST.seconds)
    count = 0
    for kept in ([], d.problem.saved[::2], d.problem.saved[1::2]):
        after = apply(twice, d.for_block(plan_of(pruned(d.problem, keep_schedule(d.problem, kept)))))
        count += sum(op.role is Role.RECOMPUTE for op in after.operators)
        found = evaluate(after, given, ["loss", second.name])
        assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]
    assert count


def test_a_transpose_that_a_product_takes_in_runs_again_with_what_it_reads() -> None:
    """Also one of the backward pass.  It costs no rerun that does not need it: the gradient of Exp reads y itself."""
    block = parse("""program turned {
  input %x: f32[4,3]
  input %g: f32[4,5]
  %y: f32[4,3] = Relu(%x)
  %z: f32[4,3] = Exp(%y)
  loss %l: f32[] = ReduceSum(%z) {keepdims=0}
  backward %t: f32[3,4] = Transpose(%y) {perm=[1,0]}
  backward %w: f32[3,5] = MatMul(%t, %g)
  output %w
}""")
    target = resolved(rc.Target(cost="h100-80"))
    derived = derive_for(block, target, lambda op: 1.0)
    assert [(n.name, n.cost) for n in derived.problem.nodes] == [("y", 1), ("z", 1), ("l", 1), ("w", 2)]
    planned = apply(block, derived.for_block(RecomputePlan((Rerun(0, 3),))))
    product = lowered(DeadCode().run(planned), target).operators[-1]
    assert [v.name for v in product.reads()] == ["y@1", "g"]
