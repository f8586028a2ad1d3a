"""Problems in which values are fetched from the host, and the steps that are planned with them."""

from __future__ import annotations

import math

import pytest

import recompute as rc
from recompute import models
from recompute.compiling.compiler import plain_fitting
from recompute.cost import device, priced
from recompute.data.batches import synthetic_batch
from recompute.language.verify import verify
from recompute.passes.offloading.transfers import Link
from recompute.passes.planners import simulate
from recompute.passes.planners.core.simulate import plan_of
from recompute.passes.planners.core.watch import WORK, Watch, watching
from recompute.passes.planners.fit import with_offload
from recompute.passes.planners.fit.plan import fit_within
from recompute.passes.planners.fit.problem import Fitting
from recompute.passes.planners.methods.auto import quick_frontier_of
from recompute.passes.planners.methods.eviction import evicting

pytest.importorskip("ortools", reason="the extra 'plan' is not installed")

from recompute.passes.planners.core.fetches import fetched
from recompute.passes.planners.core.moves_bound import bound_with_moves


def small_fitting(part: int = 2) -> tuple[Fitting, int]:
    """A step, and a budget of half of what its peak has beyond parameters and state, or of another part."""
    program = rc.load(models.build("bert-mini", batch=32, seq=128, weights=False))
    target = priced(rc.Target(providers=(), cost=device("h200")))
    fitting = plain_fitting(program, rc.losses.cross_entropy(program).name, rc.SGD(), target)
    fixed = fitting.derived.problem.fixed
    return fitting, fixed + (fitting.plain.peak - fixed) // part


def test_a_fetch_is_a_node_that_runs_again() -> None:
    """Without reruns the problem is the same; a fetch that runs again moves its value, a node of the step is rerun."""
    fitting, budget = small_fitting()
    base = fitting.derived.problem
    problems = list(fetched(fitting.derived, budget, fitting.target.rates, (0.3, 1.0)))
    assert len(problems) == 2
    for f in problems:
        p, plain = f.problem, range(len(f.problem))
        assert simulate(p, plain).peak >= simulate(base, range(len(base))).peak
        assert math.isclose(p.cost, base.cost, rel_tol=0.05)
        turn = next(i for i, n in enumerate(p.nodes) if n.backward)
        again = next(i for i in range(turn) if i not in f.names and p.nodes[i].repeatable)
        for fetch, name in f.names.items():
            plan = f.for_block(plan_of([*range(turn), again, fetch, *range(turn, len(p))]))
            assert plan.offloads == (name,) and name in fitting.block.values()
            rerun = fitting.derived.operators[f.number[again]]
            assert {r.operator for r in plan.reruns} <= {*rerun}


def test_fetches_are_tried_where_the_bound_proves_nothing() -> None:
    """Over a link so fast that copies take no time, what waits at the fullest moment can be fetched."""
    fitting, budget = small_fitting()
    fast = Link(2e12, 2e12, 0.0)
    assert math.isclose(bound_with_moves(fitting.derived.problem, budget, fast), fitting.derived.problem.cost)
    assert [len(f.names) > 10 for f in fetched(fitting.derived, budget, fast, (0.7,))] == [True]
    assert not list(fetched(fitting.derived, 2 * fitting.plain.peak, fast, (0.7,)))


def test_a_small_budget_is_kept_by_fetches_and_evictions() -> None:
    """At a fifth of the bytes beyond parameters and state: neither cuts nor recomputation alone find a plan."""
    fitting, budget = small_fitting(5)
    (f,) = fetched(fitting.derived, budget, fitting.target.rates, (1.0,))
    frontier = quick_frontier_of(f.problem)
    assert frontier.best(budget) is None
    goal = budget + (budget - f.problem.fixed) // 10
    sequences = [evicting(f.problem, goal, long_first=first) for first in (False, True)]
    outcomes = [simulate(f.problem, sequence) for sequence in sequences if sequence is not None]
    assert outcomes and min(o.peak for o in outcomes) <= goal < frontier.lowest.peak
    assert min(o.cost for o in outcomes) < 1.7 * fitting.derived.problem.cost


def test_planned_together_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than one after the other, which is faster than recomputation alone; and none is below the bound."""
    seconds = []
    for offload, shares in ((False, ()), (True, ()), (True, with_offload.SHARES)):
        monkeypatch.setattr(with_offload, "SHARES", shares)
        monkeypatch.setattr(with_offload, "FURTHER", ())
        fitting, budget = small_fitting()
        with watching(Watch(work=WORK)):
            found = fit_within(fitting, budget, offload=offload)
        verify(found.compiled)
        assert found.peak <= budget
        seconds.append(fitting.times(found).seconds)
        assert seconds[-1] >= fitting.bound(budget, moves=True) * (1 - 1e-9)
    assert found.plan.offloads and found.plan.reruns
    assert seconds[2] < seconds[1] <= seconds[0], seconds


def test_a_joint_plan_has_the_plain_steps_bits_and_its_predicted_peak() -> None:
    program = rc.load(models.build("gpt2-tiny", seq=64, layers=4), batch=32)
    loss = rc.losses.cross_entropy(program["logits"])
    sgd, target = rc.SGD(0.1), rc.Target(cost=device("h200"))
    planned = {"budget": "70% of activations", "offload": True, "slicing": False, "effort": 0.2}
    steps = [rc.compile_step(program, loss, sgd, target=target, **more) for more in ({}, planned)]
    assert steps[1].figures.offloaded_values and steps[1].figures.recomputed_operators
    losses = []
    for step in steps:
        executor, feed = rc.Executor(), synthetic_batch(steps[0].program)
        losses.append([executor.run(step.program, feed, [loss])[0].item() for _ in range(3)])
        assert executor.session(step.program, [loss.name]).measured_peak_bytes == step.figures.peak_bytes
    assert losses[0] == losses[1] and len(set(losses[0])) == 3
