"""Steps of many ranks before anything runs: what each rank holds, sends and waits for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time

import numpy as np
import pytest

import recompute as rc
from recompute.analysis.ranks import (
    among_ranks,
    channels_of,
    classes_of,
    compute_seconds,
    programs_of,
    ranks_of_steps,
    shape_of,
)
from recompute.communication.mesh import Mesh
from recompute.communication.verify_ranks import verify_ranks
from recompute.compiling.compiler import CompiledStep
from recompute.compiling.steps import Steps
from recompute.language.ir import Free
from recompute.ops.communication.shard import padded_size
from recompute.passes import Target
from recompute.passes.communication.tree_sums import TreeSums
from recompute.training.parallel import Parallel

NETWORK = "node=2,nvlink=10GB/s,net=1GB/s"
TARGET = Target(cost=rc.cost.device("h100-80"), precision="bf16")
#: 2 layers of 16
BERT = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 50, "positions": 8, "seq": 8}


def steps_of(ranks: int, zero: int, model: str = "bert-tiny", **options: int) -> Steps:
    optimizer = among_ranks(rc.optimizers.Adam(), f"dp={ranks}", zero, options.pop("micro_batches", None))
    return Steps(model, optimizer=optimizer, target=TARGET, options=options or BERT)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "each"), [(2, 1), (4, 1), (4, 2), (8, 1)])
def test_formulas_of_zero_hold_to_the_byte(ranks: int, each: int, zero: int) -> None:
    """Of 16 bytes a parameter in mixed precision, the master weight (4) and the moments (8) are state: a rank keeps
    their N-th part.  Weights in low precision and gradients are values, which live for a part of the step."""
    steps = steps_of(ranks, zero, micro_batches=ranks * each)
    block = steps.compile(ranks * each).program.block
    sizes = [v.size for v in steps.program(ranks * each)[0].block.parameters]
    padded = sum(padded_size(n, ranks * each) for n in sizes) // ranks
    scalars = [v for v in block.state if not v.shape]
    assert sum(v.nbytes for v in block.parameters) == 4 * padded
    assert sum(v.nbytes for v in block.state if v.shape) == 8 * padded
    assert sum(v.nbytes for v in scalars) <= 24
    assert 12 * padded * ranks - 12 * sum(sizes) < 12 * ranks * each * len(sizes)  # nothing but padding


def test_without_zero_every_rank_keeps_all() -> None:
    steps = steps_of(4, 0)
    block = steps.compile(4).program.block
    sizes = sum(v.size for v in steps.program(4)[0].block.parameters)
    assert sum(v.nbytes for v in block.parameters) == 4 * sizes
    assert sum(v.nbytes for v in block.state if v.shape) == 8 * sizes


@pytest.mark.parametrize("zero", [0, 3])
def test_all_ranks_take_the_same_memory(zero: int) -> None:
    """The estimate compares the last rank alone."""
    steps = steps_of(4, zero)
    plain = steps.compile(8)
    made = [steps.for_ranks(dataclasses.replace(steps.parallel, rank=r)).compile(8) for r in range(4)]
    assert {m.figures.peak_bytes for m in made} == {plain.figures.peak_bytes}
    assert all(shape_of(m.program.block) == shape_of(plain.program.block) for m in made)
    assert verify_ranks([m.program.block for m in made], Mesh.of(dp=4)) == 1


def test_ranks_that_differ_are_an_error() -> None:
    steps = steps_of(4, 1)
    with pytest.raises(rc.VerifyError, match="ranks 0 and 1 of the mesh dp=4 have different operators"):
        programs_of(steps.compile(8), steps.parallel, lambda other: steps_of(4, 0).compile(8))


@pytest.mark.parametrize(("batch", "different"), [(16, 1), (4, 4)])
def test_parts_that_are_not_aligned_are_known_for_every_rank(batch: int, different: int) -> None:
    """A part of 4 bytes a sample is a view in every rank, every second, every fourth ..."""
    steps = steps_of(8, 1, "mlp4", hidden=16)
    plain = steps.compile(batch * 8)

    def made(other: Parallel) -> CompiledStep:
        return steps.for_ranks(other).compile(batch * 8)

    programs = programs_of(plain, steps.parallel, made)
    assert len(programs) == different
    classes = classes_of(programs, 8)
    assert sum(c.count for c in classes) == 8
    peaks = [made(dataclasses.replace(steps.parallel, rank=r)).figures.peak_bytes for r in range(8)]
    assert [programs[r % different].figures.peak_bytes for r in range(8)] == peaks
    assert sorted({c.peak_bytes for c in classes}) == sorted(set(peaks))


def test_a_thousand_ranks_are_checked_at_once() -> None:
    start = time.process_time()
    found = rc.estimate("mlp4", mesh="dp=1024", zero=2, batch=1024, network="node=8,nvlink=450GB/s,net=50GB/s")
    assert found.ranks is not None and found.ranks.classes[0].count == 1024
    assert time.process_time() - start < 30


def test_sums_send_the_bytes_of_the_operators_that_they_replace() -> None:
    """AllReduce as AllToAll and AllGather: 2B(n-1)/n.  Small ones are gathered whole, in one communication."""
    text = """program p {{
      input %x: f32[{n}]
      communicate %s: f32[{n}] = {name}(%x) {{axis="dp", ranks=4, number=0}}
      communicate %y: f32[{out}] = CommWait(%s, %x)
      output %y
    }}"""
    for name, n, out, wanted in (
        ("AllReduce", 1 << 16, 1 << 16, 2 * 3 << 16),
        ("AllReduce", 64, 64, 3 * 64 * 4),
        ("ReduceScatter", 1 << 16, 1 << 14, 3 << 16),
    ):
        block = rc.verify(rc.parse(text.format(n=n, out=out, name=name).replace(f"%s: f32[{n}]", f"%s: f32[{out}]")))
        assert sum(c.bytes for c in channels_of(TreeSums().run(block))) == wanted


def test_an_estimate_of_ranks() -> None:
    found = rc.estimate("mlp4", mesh=rc.Mesh.of(dp=4), zero=1, batch=64, network=NETWORK, target=TARGET)
    ranks = found.ranks
    assert ranks is not None and (ranks.batch, ranks.batch_per_rank, ranks.ranks) == (64, 16, 4)
    (c,) = ranks.classes
    assert sum(c.by_role.values()) == c.peak_bytes == found.peak_bytes == ranks.peak_bytes
    assert ranks.step_seconds == pytest.approx(ranks.compute_seconds + ranks.stalled_seconds)
    assert ranks.communication_seconds == pytest.approx(ranks.hidden_seconds + ranks.stalled_seconds)
    assert ranks.efficiency == pytest.approx(ranks.one_rank_seconds / ranks.step_seconds)
    assert 0 < ranks.efficiency < 1 and {k.link for k in ranks.links} == {"nvlink", "net"}
    assert sum(k.bytes for k in ranks.links) == sum(c.bytes for c in ranks.channels)
    text = str(found)
    assert "scaling efficiency" in text and "ranks 0 to 3" in text
    assert json.loads(json.dumps(found.to_dict()))["ranks"]["peak_bytes"] == ranks.peak_bytes
    assert found.by_batch is not None and all(b % 4 == 0 for b, _ in found.by_batch.compiled)
    assert found.by_batch.peak(64) == pytest.approx(found.peak_bytes, rel=0.01)


def test_without_a_network_there_are_bytes_alone() -> None:
    ranks = rc.estimate("mlp4", mesh="dp=2", batch=8).ranks
    assert ranks is not None and ranks.step_seconds is None and ranks.links == ()
    assert ranks.channels and "--link" in str(ranks)


def test_faster_links_make_shorter_steps() -> None:
    seconds = [
        rc.estimate("mlp4", mesh="dp=4", batch=64, network=f"net={rate}GB/s,latency=0s").ranks.step_seconds  # type: ignore[union-attr]
        for rate in (0.1, 1, 1e6)
    ]
    alone = rc.estimate("mlp4", mesh="dp=4", batch=64).ranks.compute_seconds  # type: ignore[union-attr]
    assert seconds[0] > seconds[1] > seconds[2] >= alone
    assert seconds[2] == pytest.approx(alone, rel=0.01)


def test_one_rank_is_a_mesh_too() -> None:
    ranks = rc.estimate("mlp4", mesh="dp=1", batch=8, network=NETWORK).ranks
    assert ranks is not None and ranks.efficiency == 1 and ranks.channels == () and ranks.stalled_seconds == 0


def test_a_model_that_fixes_its_batch_has_no_efficiency() -> None:
    program = rc.load(rc.models.build("mlp4", batch=16))
    program.source = None
    ranks = rc.estimate(program, mesh="dp=2", network=NETWORK).ranks
    assert ranks is not None and (ranks.batch, ranks.batch_per_rank) == (16, 8)
    assert ranks.efficiency is None and "no efficiency" in ranks.notes[0]


def test_a_budget_that_no_batch_of_ranks_fits() -> None:
    with pytest.raises(rc.UsageError, match="cannot hold even batch 4 of mlp4"):
        rc.max_batch("mlp4", 100_000, mesh="dp=4", zero=2, network=NETWORK, effort=0.1, target=TARGET)


def test_candidates_of_plans_communicate_beside_computation() -> None:
    """What a search compiles within a budget is what is compiled without one."""
    fitting = steps_of(4, 0).fitting(16)
    plan = fitting.plain.plan
    within, without = (fitting.carry_out(plan, False, limit) for limit in (1 << 40, None))
    assert within.compiled == without.compiled
    kinds = [o.op.communicates for o in within.compiled.operators if not isinstance(o.op, Free)]
    assert any(a == "begin" and b != "wait" for a, b in itertools.pairwise(kinds))


def test_the_biggest_batch_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recompute.analysis.biggest_batch.lowest_plan", lambda *options: None)  # takes seconds
    budget = 1_500_000
    found = rc.max_batch("mlp4", budget, mesh="dp=4", zero=2, network=NETWORK, target=TARGET)
    plain = found["plain"]
    assert plain.batch % 4 == 0 and plain.peak_bytes <= budget < plain.next_peak_bytes
    assert found.ranks is not None and found.ranks.batch == found.batch and found.ranks.peak_bytes <= budget
    at = rc.estimate("mlp4", mesh="dp=4", zero=2, batch=plain.batch + 4, target=TARGET)
    assert at.peak_bytes == plain.next_peak_bytes
    assert "ranks 0 to 3" in str(found)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"zero": 2}, "zero=2 divides state among ranks, but there is no mesh"),
        ({"micro_batches": 4}, "micro_batches are those of all ranks, but there is no mesh"),
        ({"network": NETWORK}, "network is between ranks, but there is no mesh"),
        ({"mesh": "dp=2,pp=2"}, "are estimated by rc.estimate_stages"),
        ({"mesh": 4}, "mesh must be rc.Mesh"),
        ({"mesh": "dp=2", "zero": 4}, "zero must be 0 .* 1, 2 or 3"),
        ({"mesh": "dp=4", "batch": 6}, "a batch of 6 cannot be cut into 4 equal micro-batches"),
        ({"mesh": "dp=4", "micro_batches": 6}, "6 micro-batches cannot be shared equally"),
        ({"mesh": "dp=4", "network": "node=2,nvlink=1GB/s"}, "more than the 2 of a node"),
        ({"mesh": "dp=4", "network": 3}, "network must be a text"),
    ],
)
def test_what_cannot_be_estimated(options: dict, says: str) -> None:
    with pytest.raises(rc.UsageError, match=says):
        rc.estimate("mlp4", **options)
    options.pop("batch", None)
    if says.startswith("a batch"):
        return
    with pytest.raises(rc.UsageError, match=says):
        rc.max_batch("mlp4", "1MiB", **options)


def test_the_program_of_an_estimate_is_the_one_that_runs() -> None:
    """An optimizer that is data parallel already; its numbers are those of the step that ranks compile."""
    optimizer = rc.DataParallel(rc.optimizers.Adam(), rc.Mesh.of(dp=2), zero=1)
    found = rc.estimate("mlp4", optimizer=optimizer, batch=16)
    program = rc.load(rc.models.build("mlp4", batch=16))
    mine = rc.DataParallel(rc.optimizers.Adam(), rc.Mesh.of(dp=2), zero=1, batch=16)
    step = rc.compile_step(program, "loss", mine)
    assert step.figures.peak_bytes == found.peak_bytes == found.ranks.peak_bytes  # type: ignore[union-attr]
    assert Parallel(Mesh.of(dp=2)).ranks == 2 and np.prod(step.program.block.inputs[0].shape[:1]) == 8


def test_times_are_those_of_the_end_of_the_sequence() -> None:
    """Its causal attention has the most keys: rank 0, which has the start, takes less."""
    options = {"layers": 1, "hidden": 64, "heads": 1, "vocab": 32, "seq": 2048, "context": 2048}
    target = Target(cost=rc.cost.device("h100-80"), place="cuda:0")
    steps = Steps("gpt2-tiny", optimizer=rc.DataParallel(rc.Adam(), "cp=2", batch=1), options=options, target=target)
    plain = steps.compiled(1, None)
    found = ranks_of_steps(steps, 1, None, plain, None)
    assert found is not None
    assert found.compute_seconds > 1.01 * compute_seconds(plain.program.block, rc.cost.device("h100-80"))
