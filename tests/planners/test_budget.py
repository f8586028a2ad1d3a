"""A step within a budget: through the optimizer, through compile_step, by a plan that was saved."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import models
from recompute.budgets import as_budget, as_bytes
from recompute.compiling.compiler import compile_step
from recompute.compiling.steps import attach_loss
from recompute.cost import device
from recompute.data.batches import synthetic_batch
from recompute.errors import BudgetError, UsageError
from recompute.language.ir import Role
from recompute.language.text import show
from recompute.passes.planners.core.frontier import Frontier
from recompute.passes.planners.core.problem import RematerialisationProblem
from recompute.passes.planners.fit.problem import Fitted, Fitting
from recompute.passes.planners.fit.with_slices import Sliced
from recompute.planning import load_plan

pytest.importorskip("ortools", reason="the planners' cuts need the extra `plan`")

COST = device("v100-32")
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet18": {"image": 128, "classes": 10, "width": 16},
    "bert-tiny": {"seq": 32, "vocab": 100},
    "gpt2-tiny": {"seq": 32, "vocab": 100},
}


def network(name: str) -> tuple[rc.Program, str]:
    program = rc.load(models.build(name, batch=8, **NETWORKS.get(name, {})))
    return program, attach_loss(program, None)[0]


def tight(plain: Any) -> int:
    """Bytes for parameters and state, and four fifths of the plain arena."""
    return plain.figures.persistent_bytes + int(0.8 * plain.figures.arena_bytes)


def trained(step: Any, loss: str, feed: dict[str, np.ndarray], steps: int = 2) -> tuple[list[bytes], int]:
    """Losses and parameters as bytes, and the measured peak."""
    program, executor = step.program.clone(), rc.Executor()
    found = [executor.run(program, feed, [loss])[0].tobytes() for _ in range(steps)]
    found += [program.data[p.name].tobytes() for p in program.block.parameters]
    return found, executor.session(program, [loss]).measured_peak_bytes


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(n, s) for n in NETWORKS for s in ("auto", "chen-sweep", "kusumoto-memory") if (n, s) != ("gpt2-tiny", "auto")],
)
def test_fits_and_keeps_every_bit(name: str, strategy: str) -> None:
    program, loss = network(name)
    plain = compile_step(program, loss, rc.Adam(), cost=COST)
    budget = tight(plain)
    step = compile_step(program, loss, rc.Adam(), budget=budget, strategy=strategy, cost=COST)
    assert step.figures.peak_bytes <= budget < plain.figures.peak_bytes
    assert step.planned is not None and step.planned.peak_bytes == step.figures.peak_bytes
    assert step.planned.reruns == step.figures.recomputed_operators > 0
    feed = synthetic_batch(program, 0, {})
    expected, _ = trained(plain, loss, feed)
    found, measured = trained(step, loss, feed)
    assert found == expected
    assert measured == step.figures.peak_bytes


def test_optimizer_with_a_budget() -> None:
    program, loss = network("resnet18")
    plain = compile_step(program, loss, rc.Adam())
    optimizer = rc.RecomputeOptimizer(rc.Adam()).set_budget(tight(plain)).set_strategy("rotor")
    other = program.clone()
    operators, pairs = optimizer.minimize(other[loss])
    assert {o.role for o in operators} == {Role.OPTIMIZE} and len(pairs) == len(program.block.parameters)
    assert any(o.role is Role.RECOMPUTE for o in other.operators)
    executor = rc.Executor()
    executor.run(other, synthetic_batch(program, 0, {}), [loss])
    assert executor.session(other, [loss]).measured_peak_bytes == other.planned.peak_bytes
    assert other.planned.peak_bytes <= tight(plain)
    assert 0 <= other.planned.gap < 0.5


def test_strategy_without_a_budget() -> None:
    program, loss = network("resnet18")
    rc.RecomputeOptimizer(rc.Adam()).set_strategy("chen").minimize(program[loss])
    assert program.plan.reruns and program.planned.strategy == "chen"


def test_a_budget_that_the_plain_step_keeps_costs_nothing() -> None:
    program, loss = network("lenet")
    step = compile_step(program, loss, rc.Adam(), budget="100%")
    assert step.figures.recomputed_operators == 0 and not step.plan.reruns


def test_saved_plan_gives_the_same_program(tmp_path: Path) -> None:
    program, loss = network("resnet18")
    budget = tight(compile_step(program, loss, rc.Adam()))
    step = compile_step(program, loss, rc.Adam(), budget=budget, strategy="chen-sweep")
    assert step.saved is not None
    step.saved.save(tmp_path / "plan.json")
    again = compile_step(program, loss, rc.Adam(), plan=tmp_path / "plan.json")
    assert show(again.program.block) == show(step.program.block)
    assert load_plan(tmp_path / "plan.json") == step.saved
    larger = rc.load(models.build("resnet18", batch=10, **NETWORKS["resnet18"]))
    other = compile_step(larger, attach_loss(larger, None)[0], rc.Adam(), plan=tmp_path / "plan.json")
    assert other.figures.recomputed_operators == step.figures.recomputed_operators
    lenet, lenet_loss = network("lenet")
    with pytest.raises(UsageError, match="the plan is for another step: it names"):
        compile_step(lenet, lenet_loss, rc.Adam(), plan=tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "not a JSON object"),
        ('{"format": "x"}', "is not a plan of format"),
        ('{"format": "recompute-plan-1", "model": "m"}', "lacks the field 'batch'"),
    ],
)
def test_files_that_are_no_plan(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_plan(tmp_path / "p.json")


def test_what_contradicts_itself() -> None:
    program, loss = network("lenet")
    with pytest.raises(UsageError, match="give one of them"):
        compile_step(program, loss, rc.Adam(), checkpoints=["conv_1"], budget="50%")
    with pytest.raises(UsageError, match="give one of them"):
        rc.RecomputeOptimizer(rc.Adam()).set_checkpoints(["a"]).set_budget("1GB").minimize(program[loss])
    with pytest.raises(UsageError, match="needs a budget"):
        rc.RecomputeOptimizer(rc.Adam()).set_strategy("auto").minimize(program[loss])
    with pytest.raises(UsageError, match=r"there is no strategy 'kusumot'.*did you mean kusumoto"):
        rc.RecomputeOptimizer(rc.Adam()).set_strategy("kusumot")
    with pytest.raises(UsageError, match=r"has no option 'move'.*moves"):
        rc.RecomputeOptimizer(rc.Adam()).set_strategy("auto", move=3)


def test_below_what_is_possible() -> None:
    program, loss = network("lenet")
    with pytest.raises(UsageError, match=r"no schedule fits into 750,000 bytes.* Give a budget of \d+B or more"):
        compile_step(program, loss, rc.Adam(), budget=750_000)  # parameters and state take 740,484


def test_what_the_largest_update_reads_is_refused_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the largest parameter exists whole; the error names a share of activations that works."""
    program, loss = network("gpt2-tiny")
    plain = compile_step(program, loss, rc.Adam()).figures
    wide = max(v.nbytes for v in program.block.parameters)
    with monkeypatch.context() as m, pytest.raises(BudgetError, match=r"the update '.*' reads") as refused:
        m.setattr(Sliced, "quickly", lambda self: pytest.fail("a search"))
        compile_step(program, loss, rc.Adam(), budget=plain.persistent_bytes + wide - 1)
    share = re.search(r"'(\d+% of activations)' is ([\d,]+)", str(refused.value))
    assert share is not None
    held = plain.persistent_bytes
    assert as_budget(share[1]).within(plain.peak_bytes, held) == int(share[2].replace(",", ""))
    works = re.search(r"Give a budget of (\d+)B", str(refused.value))  # and any larger one
    assert works is not None and held + wide <= int(works[1]) <= int(share[2].replace(",", ""))


@pytest.mark.parametrize("text", ["", "x", "-1GB", "0", "0%", "1.5", "5 parsecs", "nan%"])
def test_amounts_that_are_none(text: str) -> None:
    if text == "1.5":
        assert as_bytes(text) == 1
        return
    with pytest.raises(UsageError):
        as_budget(text)


def test_amounts() -> None:
    assert as_budget("60%").within(1000, 100) == 600
    assert as_budget("40% of activations").within(1100, 100) == 500
    with pytest.raises(UsageError, match="cannot read '2GiB of activations'"):
        as_budget("2GiB of activations")
    assert as_budget("2 GiB").within(5, 1) == 2 << 30
    assert as_budget(77).within(5, 1) == 77
    with pytest.raises(UsageError, match="share of the plain"):
        as_bytes("60%")


def test_planning_leaves_nothing_behind() -> None:
    """The search's problems, frontiers and compiled candidates end with it."""

    kinds = (RematerialisationProblem, Frontier, Fitting, Fitted)

    def held() -> set[int]:
        gc.collect()
        return {id(o) for o in gc.get_objects() if issubclass(type(o), kinds)}

    program, loss = network("bert-tiny")
    before = held()
    rc.RecomputeOptimizer(rc.Adam()).set_budget("90%", slicing=False, effort=0.05).minimize(program[loss])
    assert program.planned.reruns and held() <= before
