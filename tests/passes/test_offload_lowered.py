"""Offloaded values have one name before and after lowering, which folds transposes and turns layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import recompute as rc
from recompute import models, parse
from recompute.compiling.compiler import CompiledStep, compile_step, plain_fitting
from recompute.cost import device
from recompute.data.batches import synthetic_batch
from recompute.language.ir import Block
from recompute.passes import Liveness, MemoryPlan, Offload, RecomputePlan, offloaded, run_passes
from recompute.passes.offloading.offload import find_rests, lowered_names, staying
from recompute.passes.planners.fit.with_offload import _moved
from recompute.passes.sequence import lowered, lowered_without_copies, step_passes
from recompute.planning.step import target_of
from recompute.runtime.compiled import block_to_run
from recompute.runtime.cuda.device.emulator import compiler

PLACES = [rc.CPUPlace(), rc.EmulatedCUDAPlace()]
NETWORKS: dict[str, dict[str, Any]] = {
    "vit-tiny": {"layers": 1, "image": 64},
    "gpt2-tiny": {"layers": 2},
    "resnet18": {"image": 32, "classes": 10, "width": 8},
}


def network(name: str, batch: int) -> tuple[rc.Program, str]:
    program = rc.load(models.build(name, batch=batch, **NETWORKS[name]))
    kind, _ = rc.losses.natural_loss(program)
    return program, kind if kind in program else getattr(rc.losses, kind)(program).name


def target(place: rc.CPUPlace, rate: float = 1e13) -> rc.Target:
    """With a link of this many bytes a second."""
    return target_of(rc.Target(place=place, cost=dataclasses.replace(device("h200"), link=rate)))


def resting(block: Block) -> list[str]:
    return [r.value.name for r in find_rests(block, block.values())]


@pytest.mark.parametrize("place", PLACES, ids=["cpu", "emulated"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_value_that_waits_has_a_name(name: str, place: rc.CPUPlace) -> None:
    """What waits in the lowered step is offloaded by some name of the step before, and all of it by all names."""
    program, loss = network(name, 2)
    t = target(place)
    block = plain_fitting(program, loss, rc.SGD(), t).once
    after = lowered(block, t)
    there = lowered_names(resting(block), block, after)
    assert {n for names in there.values() for n in names} == set(resting(after))
    moved = lowered_without_copies(Offload(tuple(resting(block)), tight=True).run(block), t)
    assert moved[0] == after and set(moved[1]) == set(resting(after))


@pytest.mark.parametrize("place", PLACES, ids=["cpu", "emulated"])
def test_named_values_move_whatever_is_folded(place: rc.CPUPlace) -> None:
    """Attention's query and result, which its kernels read and write in another order of axes."""
    if place != PLACES[0] and not compiler():
        pytest.skip("the emulated device needs a C++ compiler")
    program, loss = network("vit-tiny", 2)
    names = ["blocks.0.attn.query.heads", "blocks.0.attn.context", "blocks.0.out"]
    plans: list[Any] = [{}, {"plan": RecomputePlan(offloads=tuple(names))}]
    steps = [compile_step(program, loss, rc.SGD(0.1), target=target(place), **plan) for plan in plans]
    assert steps[1].figures.offloaded_values == len(names) and not steps[1].plan.notes
    host = sum(steps[1].program.logical.values()[n].nbytes for n in names)
    assert steps[1].figures.host_bytes == host
    assert results(steps[0], loss, place) == results(steps[1], loss, place)


def results(step: CompiledStep, loss: str, place: rc.CPUPlace) -> tuple[Any, ...]:
    """Losses' and weights' bits of two steps whose memory was as predicted."""
    executor, feed = rc.Executor(place), synthetic_batch(step.program)
    losses = [executor.run(step.program, feed, [loss])[0].tobytes() for _ in range(2)]
    session = executor.session(step.program, [loss])
    assert session.measured_peak_bytes == step.figures.peak_bytes
    assert session.measured_host_bytes == step.figures.host_bytes
    return losses, {k: a.tobytes() for k, a in step.program.data.items()}


@pytest.mark.parametrize("place", PLACES, ids=["cpu", "emulated"])
def test_what_a_planner_chooses_moves(place: rc.CPUPlace) -> None:
    """It chooses among what waits in the lowered step, by names that are carried out."""
    program, loss = network("gpt2-tiny", 8)
    fitting = plain_fitting(program, loss, rc.SGD(0.1), target(place))
    fixed = sum(v.nbytes for v in fitting.block.persistent())
    found = _moved(fitting, (RecomputePlan(), False), fixed + (fitting.plain.peak - fixed) * 6 // 10)
    assert found is not None and found.plan.offloads and not staying(found.block, found.compiled)
    assert not set(found.plan.offloads) <= found.compiled.values().keys()  # some are folded
    assert len(offloaded(found.compiled)) == len(found.plan.offloads)
    passes = step_passes(fitting.target, found.plan, moved=lowered_without_copies(found.block, fitting.target)[1])
    assert run_passes(fitting.once, passes) == found.compiled


SHORT = """\
program short {
  input %x: f32[4,4]
  %a: f32[4,4] = Tanh(%x)
  %b: f32[4,4] = Transpose(%a) {perm=[1,0]}
  %c: f32[4,4] = Exp(%b)
  backward %d: f32[4,4] = Mul(%c, %b)
  output %d
}
"""


def test_what_stays_has_a_note() -> None:
    """A value that lowering makes needless, and one whose copies take longer than it waits."""
    block = Offload(("b", "c"), tight=True).run(parse(SHORT))
    folded = parse(SHORT.replace("Mul(%c, %b)", "Mul(%c, %a)"))
    assert lowered_names(("b", "c"), parse(SHORT), folded) == {"b": ("a",), "c": ("c",)}
    assert lowered_names(("b",), parse(SHORT), parse(SHORT.replace("%c, %b", "%c, %x"))) == {"b": ()}
    needless = parse(SHORT.replace("Mul(%c, %b)", "Mul(%c, %x)"))
    plan = [Liveness(), MemoryPlan()]
    (first, second) = staying(block, run_passes(needless, plan))
    assert first == "'b' is not offloaded: the compiled step needs it no more"
    assert second == "'c' is not offloaded: there is room for it, and its copies take longer than it waits"
    assert staying(block, run_passes(block, plan)) == ()


def test_a_step_notes_what_stays() -> None:
    """Over a slow link a value stays where there is room."""
    program, loss = network("vit-tiny", 2)
    plan = RecomputePlan(offloads=("blocks.0.norm2",))
    step = compile_step(program, loss, rc.SGD(), plan=plan, target=target(PLACES[0], 1e6))
    assert step.plan.offloads == plan.offloads and not step.figures.offloaded_values
    assert [note.partition(":")[0] for note in step.plan.notes] == ["'blocks.0.norm2' is not offloaded"]
    optimizer = rc.RecomputeOptimizer(rc.SGD()).set_checkpoints(["blocks.0.norm2"]).set_offload()
    optimizer.minimize(program[loss])
    with pytest.warns(UserWarning, match=r"'blocks.0.norm2' is not offloaded"):
        block_to_run(program, target(PLACES[0], 1e6), [loss])
