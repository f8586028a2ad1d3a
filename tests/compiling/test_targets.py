"""What a step is compiled for: one list of passes makes it, and a budget holds wherever it runs."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import recompute as rc
from recompute import models
from recompute.cli import main
from recompute.compiling.compiler import _made, compile_step, resolve_checkpoints
from recompute.compiling.steps import attach_loss
from recompute.cost import device, kept_values, link_of
from recompute.errors import BudgetError, UsageError
from recompute.passes import PASSES, Pass, RecomputePlan, run_passes, step_passes
from recompute.passes.offloading.offload import without_copies
from recompute.passes.offloading.transfers import LINK, Link
from recompute.passes.sequence import lowered_without_copies
from recompute.planning import fitting_of, plan_step, request, target_of
from recompute.runtime.lowering import providers

EMULATED = rc.EmulatedCUDAPlace()
#: what executors may be told
OTHERS: list[dict[str, Any]] = [{}, {"providers": ("numpy",)}, {"schedule": False}, {"rebuild": False}]


def network(name: str = "unet", **options: Any) -> tuple[rc.Program, str]:
    """A small network of which much can be recomputed, and its loss's name."""
    if name == "unet":
        options = {"width": 2, "image": 32, "batch": 4, **options}
    program = rc.load(models.build(name, **options))
    return program, attach_loss(program, None)[0]


# -- the list ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [rc.CPUPlace(), EMULATED], ids=["cpu", "emulated"])
@pytest.mark.parametrize("fields", OTHERS, ids=str)
def test_the_list_makes_the_step(place: rc.CPUPlace, fields: dict[str, Any]) -> None:
    program, loss = network("resnet18", batch=2, width=4, image=32, classes=10)
    target = target_of(rc.Target(place=place, **fields))
    step = compile_step(program, loss, rc.Momentum(), checkpoints=["layer*.out"], target=target)
    made = _made(program, loss, rc.RecomputeOptimizer(rc.Momentum()).set_checkpoints(["layer*.out"]), ())
    assert run_passes(made.block, step_passes(target)) == step.program.block


@pytest.mark.parametrize("offload", [False, True])
def test_the_list_makes_the_planned_step(offload: bool) -> None:
    program, loss = network()
    made = _made(program, loss, rc.Momentum(), ())
    target = target_of(rc.Target(cost=device("t4")))
    fitting = fitting_of(made.block, target)
    for scheduled in (False, True):
        base = fitting.ordered if scheduled else fitting.block
        names = [v.name for op in base.operators if op.role is rc.Role.FORWARD for v in op.writes()]
        plan = rc.passes.plan_from_checkpoints(base, [names[len(names) // 2]])
        if offload:
            plan = RecomputePlan(offloads=tuple(n for n in kept_values(base) if n.endswith(".out"))[:2])
        fitted = fitting.carry_out(plan, scheduled)
        moved = lowered_without_copies(fitted.block, target)[1]
        found = run_passes(made.block, step_passes(target, plan, scheduled=scheduled, moved=moved))
        assert found == fitted.compiled and (found != without_copies(found)) is offload
        if offload:
            with pytest.raises(UsageError, match="`moved` must say what the lowered step calls these"):
                step_passes(target, plan)


def test_the_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba", reason="without its kernels there are fewer passes")
    assert main(["resnet50", "--print-passes", "--checkpoints", "layer*.out"]) == 0
    out = capsys.readouterr().out
    names = [
        line.split()[1].partition("{")[0] for line in out.splitlines() if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert names == [
        "find-norms", "find-gates", "find-attention", "keep-forward", "find-head", "autodiff", "recompute", "updates",
        "eager-updates", "count-step", "unplan", "dead-code", "temporary-weights", "rebuild", "commit-updates",
        "regather", "buckets", "tree-sums", "fold-transposes", "heads-last", "scatter-gradients", "channels-last",
        "open-norms", "fusion", "choose-kernels", "in-best-order", "overlap", "liveness", "memory-plan",
    ]  # fmt: skip
    assert main(["resnet50", "--print-passes", "--memory-budget", "60%", "--providers", "numpy", "--no-schedule"]) == 0
    out = capsys.readouterr().out
    assert "split-norms" in out and "fuse-norms" in out and "choose-kernels" not in out and "in-best-order" not in out


def test_what_is_dumped_is_what_runs(tmp_path: Path) -> None:
    program, loss = network()
    step = compile_step(program, loss, rc.Momentum(), budget="85%", strategy="kusumoto-memory", dump=tmp_path)
    texts = sorted(tmp_path.iterdir())
    assert rc.parse(texts[-1].read_text()) == step.program.block
    assert {p.name.partition("-")[2] for p in texts} >= {"recompute.rir", "fuse-norms.rir", "choose-kernels.rir"}


def test_a_pass_of_any_name_comes_anywhere() -> None:
    class Cse(Pass):
        def run(self, block: rc.Block) -> rc.Block:
            return block

    try:
        program, _ = network()
        passes = rc.pipeline("recompute,cse")
        assert run_passes(program.block, passes) == program.block
    finally:
        del PASSES[Cse.name]


# -- budgets ----------------------------------------------------------------------------------------------------------


def measured(program: rc.Program, loss: str, place: Any, **options: Any) -> int:
    return rc.Executor(place, **options).session(program, [loss]).measured_peak_bytes


@pytest.mark.parametrize("options", OTHERS, ids=str)
@pytest.mark.parametrize("place", [None, EMULATED], ids=["cpu", "emulated"])
def test_a_budget_holds_where_the_step_runs(place: Any, options: dict[str, Any]) -> None:
    """It was planned for this machine's processor with all kernels: another executor plans again, within the same."""
    if place is not None and "providers" in options:
        options = {"providers": providers(place)[:2]}
    program, loss = network()
    optimizer = rc.RecomputeOptimizer(rc.Momentum()).set_budget("90%").set_strategy("kusumoto-memory")
    optimizer.minimize(program[loss])
    plain = program.planned.plain_peak_bytes
    peak = measured(program, loss, place, **options)
    if place is None and not options:
        assert peak == program.planned.peak_bytes <= program.planned.budget < plain
    else:
        assert program.compiled is not None and program.compiled.refit is not None
        again = program.compiled.refit(rc.Executor(place, **options).target)
        assert peak <= again.budget


def test_a_budget_in_bytes_holds_or_is_refused() -> None:
    program, loss = network()
    plain = compile_step(program, loss, rc.Momentum(), target=rc.Target(place=EMULATED)).figures.peak_bytes
    own = compile_step(program, loss, rc.Momentum()).figures.peak_bytes
    low, high = sorted((plain, own))
    for budget in (low - 1, high + 1, low * 19 // 20):
        other = program.clone()
        rc.RecomputeOptimizer(rc.Momentum()).set_budget(budget).set_strategy("kusumoto-memory").minimize(other[loss])
        for place in (None, EMULATED):
            try:
                assert measured(other, loss, place) <= budget
            except BudgetError as e:
                assert f"fits {budget:,} bytes" in str(e) and place is EMULATED


def test_a_target_is_planned_for_once() -> None:
    """What `minimize` has compiled is what the executor runs; nothing is planned again."""
    program, loss = network()
    optimizer = rc.RecomputeOptimizer(rc.Momentum()).set_strategy("kusumoto-memory")
    optimizer.set_budget("90%", target=rc.Target(place=EMULATED)).minimize(program[loss])
    assert program.compiled is not None
    compiled = program.compiled.block
    assert rc.Executor(EMULATED).session(program, [loss]).block is compiled
    other = rc.Executor(EMULATED).session(program.clone(), [loss])
    assert other.block is compiled and other.measured_peak_bytes == program.planned.peak_bytes


def test_what_is_fetched_beside_a_budget_is_said() -> None:
    program, loss = network()
    rc.RecomputeOptimizer(rc.Momentum()).set_budget("85%").set_strategy("kusumoto-memory").minimize(program[loss])
    values = [v.name for op in program.operators if op.role is rc.Role.FORWARD for v in op.writes()]
    with pytest.warns(UserWarning, match="its budget is .*fetch less"):
        rc.Executor().session(program, [loss, *values])


def test_no_plan_that_fits_is_an_error_of_its_own(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    program, loss = network()
    with pytest.raises(BudgetError, match="no schedule fits into 1,000 bytes"):
        compile_step(program, loss, rc.Momentum(), budget=1000)

    def refuse(*_: Any, **__: Any) -> None:
        raise BudgetError("said in other words")

    monkeypatch.setattr("recompute.planning.step.fit_within", refuse)
    assert main(["unet", "--option", "image=32", "--option", "width=2", "--batch", "4", "--memory-budget", "80%"]) == 2
    err = capsys.readouterr().err
    assert "said in other words" in err and "the biggest batch that fits without recomputation is" in err


# -- names and options ------------------------------------------------------------------------------------------------


def test_kept_values_are_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed names of kept values, and those in a saved plan, are accepted by --checkpoints."""
    command = ["unet", "--option", "image=32", "--option", "width=2", "--batch", "4", "--optimizer", "momentum"]
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    budget = ["--memory-budget", "85%", "--strategy", "kusumoto-memory"]
    assert main([*command, *budget, "--save-plan", str(plan), "--json", str(report), "-v"]) == 0
    (line,) = [s for s in capsys.readouterr().out.splitlines() if s.startswith("kept for the backward pass")]
    names = line.rpartition("--checkpoints: ")[2].split(",")
    saved = json.loads(plan.read_text())["checkpoints"]
    assert names == saved == json.loads(report.read_text())["planned"]["kept"] and len(names) > 3
    program, _ = network()
    assert set(resolve_checkpoints(program, names)) == set(names)
    assert main([*command, "--checkpoints", line.rpartition("--checkpoints: ")[2]]) == 0


def test_a_device_changes_times_not_the_step(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    found = []
    for given in ([], ["--device", "h200"]):
        assert main(["lenet", "--batch", "8", "--run", "1", "-q", "--json", str(report), *given]) == 0
        found.append(json.loads(report.read_text()))
    assert found[0]["plain"]["peak_bytes"] == found[1]["plain"]["peak_bytes"]
    assert found[0]["run"]["losses"] == found[1]["run"]["losses"]
    assert found[1]["costs"] == "H200"
    program, loss = network()
    own, priced = (compile_step(program, loss, rc.Momentum(), cost=c).program.block for c in (None, device("h200")))
    assert own == priced


def test_targets_say_what_they_are_for() -> None:
    assert rc.compile_step is compile_step
    program, loss = network()
    with pytest.raises(UsageError, match=r"target and precision both define .* give target=rc.Target\(precision="):
        compile_step(program, loss, rc.SGD(), target=rc.Target(), precision="bf16")
    with pytest.raises(UsageError, match=r"has no option 'chekpoints'"):
        compile_step(program, loss, rc.SGD(), chekpoints=["x"])
    with pytest.raises(UsageError, match=r"estimate has no option 'pace' \(did you mean place"):
        rc.estimate("lenet", pace=rc.CPUPlace())
    with pytest.raises(UsageError, match=r"optimizer must be an optimizer, such as rc.Adam\(\), not 'adam'"):
        rc.estimate("lenet", optimizer="adam")
    with pytest.raises(UsageError, match="recompute is a complete request: leave out"):
        compile_step(program, loss, rc.SGD(), recompute=request("60%"), budget="60%")
    assert rc.estimate("lenet", batch=2, target=rc.Target(place=EMULATED)).peak_bytes > 0
    step = program.clone()
    rc.SGD().minimize(step[loss])
    plan_step(step, request("100%"), target_of(None))
    assert step.block.addresses


def test_a_target_keeps_its_link() -> None:
    slow = Link(1e9, 1e9, 0.0)
    assert target_of(target_of(rc.Target(cost="h200", link=slow))).link == slow
    assert target_of(rc.Target(cost="h200")).link == link_of(device("h200"))
    assert target_of(rc.Target(cost="h200", link=LINK)).link == LINK  # also one equal to that of no link


def test_public_functions_have_few_parameters() -> None:
    import inspect

    wide = []
    for module in pkgutil.iter_modules(rc.__path__):
        if module.name.startswith("cli") or module.name in ("testing", "jax"):  # jax needs its extra
            continue
        for name, f in vars(importlib.import_module(f"recompute.{module.name}")).items():
            own = inspect.isfunction(f) and f.__module__.startswith("recompute") and not name.startswith("_")
            named = [p for p in inspect.signature(f).parameters.values() if p.kind is not p.VAR_KEYWORD] if own else []
            if len(named) > 10:
                wide.append(f"{module.name}.{name}")
    assert set(wide) <= {"onnx_import.load"}
