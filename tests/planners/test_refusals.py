"""What is said about budgets that nothing fits: proofs hold for the lowered step, and the advice is near them."""

from __future__ import annotations

import pytest

import recompute as rc
from recompute.compiling.compiler import plain_fitting
from recompute.compiling.steps import attach_loss
from recompute.language.ir import Role
from recompute.passes.planners.fit.plan import fit_within
from recompute.passes.planners.fit.problem import Fitting
from recompute.passes.planners.fit.refusal import lowest_quickly
from recompute.passes.planners.methods.auto import quick_frontier_of
from recompute.runtime.lowering import resolved
from recompute.training.base import Optimizer

#: a table far larger than the rest: the two gradients of it would be most of the step's memory
_TIED = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 4096, "seq": 8, "dropout": 0.0}
#: activations far larger than the weights
_DEEP = {"layers": 4, "hidden": 16, "heads": 2, "vocab": 64, "seq": 32, "dropout": 0.0}


def fitting(options: dict[str, float], batch: int, optimizer: Optimizer) -> Fitting:
    program = rc.load(rc.models.build("gpt2-tiny", weights=False, **options), batch=batch)
    loss = rc.losses.cross_entropy(program["logits"]).name
    return plain_fitting(program, loss, optimizer, resolved(rc.Target("cuda:0", cost="h100-80")))


@pytest.mark.parametrize("mixed", [False, True])
def test_no_more_is_proven_of_a_tied_network_than_it_needs(mixed: bool) -> None:
    optimizer = rc.MixedPrecision(rc.AdamW(1e-4), "bf16") if mixed else rc.SGD(0.01)
    f = fitting(_TIED, 1, optimizer)
    assert any(o.op.name == "AddRows" for o in f.plain.compiled.operators)
    assert f.derived.problem.fixed < f.least <= f.plain.peak


def test_the_budget_that_is_advised_repeats_as_much_as_it_takes() -> None:
    f = fitting(_DEEP, 4, rc.SGD(0.01))
    with pytest.raises(rc.BudgetError, match="are needed") as refused:
        fit_within(f, f.least - 1)
    advised = refused.value.sure.peak
    first = quick_frontier_of(f.derived.problem).first
    assert first is not None
    assert f.least <= advised < first.peak
    assert f"a budget of {advised}B or more" in str(refused.value)
    assert lowest_quickly(fitting(_DEEP, 4, rc.SGD(0.01)), advised).peak == advised  # what every search falls back on


#: networks whose lowered steps have fewer values, or smaller scratch, than the steps that are planned
_NETWORKS: dict[str, tuple[int, dict[str, int]]] = {
    "bert-tiny": (16, {}),
    "gpt2-tiny": (2, {}),
    "vit-tiny": (2, {"layers": 2}),
    "llama-tiny": (4, {}),
    "lstm": (2, {}),
    "ds_cnn": (4, {}),
}


@pytest.mark.parametrize("name", _NETWORKS)
@pytest.mark.parametrize("place", ["cpu", "cuda:0"])
def test_no_compiled_step_is_below_its_bounds(name: str, place: str) -> None:
    batch, options = _NETWORKS[name]
    program = rc.load(rc.models.build(name, batch=batch, weights=False, **options))
    loss, _ = attach_loss(program, None)
    f = plain_fitting(program, loss, rc.Adam(), resolved(rc.Target(place, cost="h100-80")))
    low = lowest_quickly(f, 0)
    assert f.least <= min(f.plain.peak, f.unrepeated.peak, low.peak)
    more = sum(f.seconds(o) for o in low.block.operators if o.role is Role.RECOMPUTE)
    costs = [(f.plain, f.cost(f.plain)), (f.unrepeated, f.cost(f.unrepeated)), (low, f.derived.problem.cost + more)]
    for step, cost in costs:
        assert f.bound(step.peak) <= cost * (1 + 1e-9)
