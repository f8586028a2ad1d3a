"""One list of passes makes every training step: what `pipeline` lists is what all drivers run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import models
from recompute.cli.command import main
from recompute.compiling.compiler import compile_step
from recompute.compiling.steps import Steps, attach_loss
from recompute.language.ir import Block, Role
from recompute.language.program import Program
from recompute.passes import step_passes
from recompute.passes.base import Pass, apply_passes, check_order, run_passes
from recompute.passes.inserting import Insertion
from recompute.planning.step import target_of
from recompute.training.pipeline import pipeline
from recompute.training.protocol import WrappedOptimizer, spec_of
from recompute.training.with_passes import WithPasses

#: ten networks, small
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp4": {"batch": 4},
    "lenet": {"batch": 4},
    "resnet18": {"batch": 2, "width": 4, "image": 32, "classes": 10},
    "unet": {"batch": 4, "width": 2, "image": 32},
    "mobilenet_v2": {"batch": 2, "image": 32},
    "lstm": {"batch": 4},
    "bert-tiny": {"batch": 2},
    "gpt2-tiny": {"batch": 2},
    "vit-tiny": {"batch": 2},
    "llama-tiny": {"batch": 2},
}


def forward(name: str) -> tuple[Program, str]:
    """A network with its loss, whose batch can change."""
    options = {k: v for k, v in NETWORKS[name].items() if k != "batch"}
    program = rc.load(models.build(name, **options), batch=NETWORKS[name]["batch"])
    loss = attach_loss(program, None)[0]
    program.block = program.block.with_operators(program.operators, outputs=(loss,))
    return program, loss


def middle(program: Program) -> list[str]:
    """A checkpoint in the middle of the forward pass."""
    made = [v.name for o in program.operators if o.role is rc.Role.FORWARD for v in o.writes()]
    return [made[len(made) // 2]]


#: what is asked of a step, as its optimizer
ASKED: dict[str, Callable[[Program], Any]] = {
    "plain": lambda p: rc.Adam(),
    "checkpoints": lambda p: rc.RecomputeOptimizer(rc.Adam()).set_checkpoints(middle(p)),
    "clipped halves": lambda p: rc.MixedPrecision(rc.SGD(grad_clip=rc.clip.ClipGradByGlobalNorm(1.0)), "fp16"),
    "averages": lambda p: rc.EMA(rc.MixedPrecision(rc.Momentum(), "bf16")),
    "slices": lambda p: rc.RecomputeOptimizer(rc.Adam()).set_slices("all:0:2"),
    "merged": lambda p: rc.GradientMerge(rc.RecomputeOptimizer(rc.Adam()).set_checkpoints(middle(p)), 2),
    "zero": lambda p: rc.DataParallel(rc.Adam(), rc.Mesh.of(dp=2), 1, zero=2),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_list_is_what_optimizers_run(name: str, asked: str) -> None:
    if asked == "slices" and name in ("resnet18", "mobilenet_v2"):
        pytest.skip("batch statistics need the whole batch")
    program, loss = forward(name)
    optimizer = ASKED[asked](program)
    listed = program.clone()
    optimizer.minimize(program[loss])
    spec = spec_of(optimizer).with_(rule=ASKED[asked](listed).spec.rule)
    listed.slices, listed.mesh = program.slices, program.mesh
    apply_passes(listed, pipeline(spec, listed, loss))
    assert listed.block == program.block
    assert listed.gradients == program.gradients and listed.plan == program.plan


@pytest.mark.parametrize("name", ["lenet", "gpt2-tiny"])
def test_all_drivers_make_the_same_step(name: str) -> None:
    """minimize, compile_step, estimates, the trainer, and passes by hand."""
    program, loss = forward(name)
    kept = middle(program)
    made = program.clone()
    optimizer = rc.RecomputeOptimizer(rc.Adam()).set_checkpoints(kept)
    apply_passes(made, pipeline(optimizer.spec, made, loss))
    block = run_passes(made.block, step_passes(target_of(None)))
    assert compile_step(program, loss, rc.Adam(), checkpoints=kept).program.block == block
    assert compile_step(program, loss, optimizer).program.block == block
    steps = Steps(program, loss=loss, optimizer=optimizer)
    assert steps.compile(steps.default_batch, kept).program.block == block
    trained = program.clone()
    trainer = rc.Trainer(trained, rc.RecomputeOptimizer(rc.Adam()).set_checkpoints(kept), loss=loss, quiet=True)
    executor = trainer.programs.executor if hasattr(trainer, "programs") else rc.Executor()
    assert executor.planned(trained, [loss]) == block


def test_a_plain_step_at_hand_changes_no_result() -> None:
    program, loss = forward("unet")
    kept = middle(program)
    plain = compile_step(program, loss, rc.SGD())
    for options in ({"checkpoints": kept}, {"checkpoints": kept, "fetch": kept}, {"budget": "90%"}):
        alone = compile_step(program, loss, rc.Adam(), **options)
        assert compile_step(program, loss, rc.Adam(), plain=plain, **options).program.block == alone.program.block


@pytest.mark.parametrize(
    "options",
    [
        ["--checkpoints", "fc1"],
        ["--checkpoints", "relu*", "--offload"],
        ["--slice", "all:0:2", "--stop-on-nan", "--run", "1"],
        ["--mesh", "dp=2", "--zero", "1"],
        ["--memory-budget", "95%"],
        ["--mesh", "tp=2"],
        ["--mesh", "dp=2,pp=2", "--zero", "1"],
        ["--precision", "fp16"],
    ],
    ids=" ".join,
)
def test_every_printed_pass_is_dumped(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--memory-budget" in options:
        pytest.importorskip("ortools", reason="the planners' cuts need the extra `plan`")
    command = ["bert-tiny" if "tp=2" in options else "lenet", "--batch", "8", *options]  # LeNet has nothing to divide
    assert main([*command, "--print-passes"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    printed = [words[1].partition("{")[0] for words in lines if words and words[0].isdigit()]
    assert main([*command, "-q", "--dump-ir", str(tmp_path / "ir")]) == 0
    dumped = [p.stem.partition("-")[2] for p in sorted((tmp_path / "ir").iterdir())]
    rest = iter(dumped)
    # `in-best-order` runs the passes behind it; ranks that divide a head leave it as it is
    assert all(n in rest for n in printed if n not in ("in-best-order", "find-head")), (printed, dumped)


def test_a_failed_step_leaves_the_program_as_it_was() -> None:
    program, loss = forward("mlp4")
    before, arrays = program.block, set(program.data)
    with pytest.raises(rc.UsageError, match="no parameter"):
        rc.Adam(groups=[{"match": "none.*", "lr": 1.0}]).minimize(program[loss])
    assert program.block is before and set(program.data) == arrays
    assert not program.gradients and program.forward is None
    rc.Adam().minimize(program[loss])


def test_optimizers_of_other_classes_update_by_their_own_rule() -> None:
    class Halving:
        """w ← w - g / 2, by operators of its own."""

        def backward(self, loss: rc.Variable, *options: Any) -> Any:
            raise AssertionError("the backward pass is ours")

        def apply_gradients(self, pairs: Any) -> Any:
            return rc.SGD(0.5).apply_gradients(pairs)

    class Wrapper(WrappedOptimizer):
        """Adds nothing."""

    results = []
    for optimizer in (rc.SGD(0.5), Wrapper(Halving())):
        program, loss = forward("mlp4")
        optimizer.minimize(program[loss])
        feed = {v.name: np.ones(v.shape, v.value.type.numpy) for v in program.inputs}
        results.append(rc.Executor().run(program, feed, [loss])[0])
        results.append(program.data[program.parameters[0].name].copy())
    assert np.array_equal(results[0], results[2]) and np.array_equal(results[1], results[3])


MARK = '''
from __future__ import annotations
from dataclasses import dataclass, replace
from recompute.passes import Pass

@dataclass(frozen=True)
class RenameProgram(Pass):
    """Another name."""

    to: str = "marked"

    def run(self, block):
        return replace(block, name=self.to)
'''


@pytest.mark.parametrize(
    "place", ["before:find-norms", "after:autodiff", "after:eager-updates", "before:choose-kernels"]
)
def test_a_pass_of_ones_own(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "kernels" in place:
        pytest.importorskip("numba", reason="without its kernels there is no such pass")
    file = tmp_path / "mine.py"
    file.write_text(MARK)
    options = ["--batch", "4", "--load-passes", str(file), "--insert-pass", f"{place}=rename-program{{to=mine}}"]
    assert main(["lenet", *options, "--print-passes"]) == 0
    assert "rename-program{to=mine}" in capsys.readouterr().out
    assert main(["lenet", *options, "-q", "--dump-ir", str(tmp_path / "ir")]) == 0
    (dumped,) = (tmp_path / "ir").glob("*-rename-program.rir")
    assert dumped.read_text().startswith("program mine")


def test_a_place_that_is_not_there_is_said_before_the_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lenet", "--print-passes", "--insert-pass", "after:autodif=dead-code"]) == 2
    assert "did you mean autodiff" in capsys.readouterr().err


@dataclass(frozen=True)
class HalveGradients(Pass):
    """Half of each gradient."""

    needs = ("gradients",)
    refuses = ("updates",)

    def rewrite(self, program: rc.Program) -> Block:
        b = program.builder(Role.BACKWARD, "half")
        pairs = [(p, program[g].value) for p, g in program.gradients]
        program.gradients = [(p, b.Mul(g, b.constant(0.5, g)).name) for p, g in pairs]
        program.append(b)
        return program.block


def halved(optimizer: rc.SGD, at: str = "autodiff") -> WithPasses:
    """Updates by half of each gradient."""
    return WithPasses(optimizer, [Insertion("after", at, (HalveGradients(),))])


@pytest.mark.parametrize("how", ["minimize", "compile_step", "budget", "wrapped", "merged"])
def test_a_pass_that_a_wrapper_adds(how: str) -> None:
    after = []
    for optimizer in (rc.SGD(0.25), halved(rc.SGD(0.5))):
        program, loss = forward("mlp4")
        if how == "minimize":
            optimizer.minimize(program[loss])
        elif how == "wrapped":
            rc.RecomputeOptimizer(optimizer).set_budget("100%").minimize(program[loss])
        else:
            optimizer = rc.GradientMergeOptimizer(optimizer, k_steps=2) if how == "merged" else optimizer
            budget = "100%" if how == "budget" else None
            program = compile_step(program, loss, optimizer, budget=budget).program
        feed = {v.name: np.ones(v.shape, v.value.type.numpy) for v in program.inputs}
        rc.Executor().run(program, feed, [loss])
        after.append(program.data[program.parameters[0].name].copy())
    assert np.array_equal(*after)


def test_a_wrappers_pass_at_a_place_that_is_not_there() -> None:
    program, loss = forward("mlp4")
    with pytest.raises(rc.UsageError, match="has no pass 'precision'"):
        halved(rc.SGD(0.5), at="precision").minimize(program[loss])
    with pytest.raises(rc.UsageError, match="'halve-gradients' comes too late: put it before 'updates'"):
        halved(rc.SGD(0.5), at="updates").minimize(program[loss])


@pytest.mark.parametrize(
    "text, why",
    [
        ("autodiff=dead-code", "after:NAME=PASS"),
        ("after:autodif=dead-code", "did you mean autodiff"),
        ("after:autodiff=ded-code", "did you mean dead-code"),
        ("after:recompute=dead-code", "has no pass 'recompute'"),
        ("after:autodiff=precision{to=bf16}", "'precision' comes too late: put it before 'autodiff'"),
        pytest.param(
            "before:choose-kernels=memory-plan",
            "needs frees",
            marks=pytest.mark.skipif(find_spec("numba") is None, reason="without the extra `cpu` no kernel is chosen"),
        ),
        ("before:autodiff=find-head{large=7}", "'find-head': option 'large' must be true or false"),
        ("after:autodiff=buckets{member=big}", "'buckets': option 'member' must be a whole number, not 'big'"),
        (7, "inserted must be texts"),
    ],
)
def test_passes_that_cannot_stand_there(text: Any, why: str) -> None:
    program, loss = forward("mlp4")
    with pytest.raises(rc.UsageError, match=why):
        compile_step(program, loss, rc.Adam(), inserted=(text,))


@pytest.mark.parametrize("asked", ASKED)
def test_the_order_holds(asked: str) -> None:
    program, loss = forward("mlp4")
    check_order([*pipeline(ASKED[asked](program).spec, program, loss), *step_passes(target_of(None))])
