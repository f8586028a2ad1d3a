"""ZeRO 2 and 3 with sums that run on: each micro-batch's gradients are sent, and ranks add up their shards."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from distributed_cases import own_arrays
from sharded_cases import adam, feed_of, ranks_of, rows, same_as_one_rank

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.compiling.steps import Steps
from recompute.cost import device
from recompute.language.program import Program
from recompute.ops.communication.base import Communication
from recompute.ops.communication.collectives import AllReduce
from recompute.passes import Target
from recompute.passes.slicing.slicing import parse_slicing
from recompute.training.parallel import DataParallel

SMALL = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 24, "seq": 4}


def gpt() -> tuple[Program, Any]:
    program = rc.load(rc.models.build("gpt2-tiny", seed=0, **SMALL), batch=8)
    return program, rc.losses.cross_entropy(program["logits"])


def clipped() -> Any:
    return adam(grad_clip=rc.clip.ClipGradByGlobalNorm(0.1))


@pytest.mark.parametrize(("mesh", "zero"), [("dp=2", 2), ("dp=4", 3), ("dp=2,tp=2", 3), ("dp=2,cp=2", 2)])
def test_steps_are_those_of_one_rank(mesh: str, zero: int) -> None:
    same_as_one_rank(gpt, mesh, clipped, zero=zero, micro_batches=8, accumulate="running")


def test_stages_send_their_own_gradients() -> None:
    program, loss = gpt()
    feed = feed_of(program)
    adam().minimize(loss)
    alone = LockStep(program.block, Mesh(), own_arrays(program))
    made = ranks_of(gpt, "dp=2,pp=2", zero=2, micro_batches=8, accumulate="running")
    mesh = Mesh.of(dp=2, pp=2)
    ranks = LockStep([p.block for p, _ in made], mesh, [own_arrays(p) for p, _ in made])
    feeds = [rows(feed, mesh, r) for r in range(4)]
    for _ in range(3):
        want = alone.run(feed, [loss.name])[0][loss.name]
        assert all(abs(found[made[0][1]] - want) < 1e-5 for found in ranks.run(feeds, [made[0][1]]))


def test_halves_are_added_up_in_float32() -> None:
    program, loss = gpt()
    inner = rc.MixedPrecision(rc.SGD(0.1), "bf16")
    DataParallel(inner, "dp=2", zero=2, micro_batches=8, batch=8, accumulate="running").minimize(loss)
    sums = [next(o.writes()) for o in program.block.operators if o.op.name == "ReduceScatter"]
    assert len(sums) > 3 * len(program.block.parameters) and {v.dtype for v in sums} == {"f32"}


def test_sums_along_other_axes_are_sums_of_shards() -> None:
    program, loss = gpt()
    DataParallel(adam(), "dp=2,cp=2", zero=1, batch=8).minimize(loss)
    sums = [next(o.writes()) for o in program.block.operators if isinstance(o.op, AllReduce) and o.op.axis == "cp"]
    shards = {v.shape for v in program.block.parameters}
    assert sum(v.shape in shards for v in sums) == len(program.block.parameters)
    along_dp = {o.op.name for o in program.block.operators if isinstance(o.op, Communication) and o.op.axis == "dp"}
    assert "ReduceScatter" in along_dp


def compiled(zero: int, micro_batches: int = 16) -> Any:
    options = {"layers": 4, "hidden": 256, "heads": 2, "vocab": 512, "seq": 64}
    optimizer = DataParallel(rc.Adam(), "dp=4", zero=zero, micro_batches=micro_batches, batch=16, accumulate="running")
    target = Target(cost=device("h100-80"), precision="bf16", place="cuda:0")
    return Steps("gpt2-tiny", optimizer=optimizer, options=options, target=target).compiled(16, None)


def test_each_stage_takes_less_and_sends_more() -> None:
    steps = [compiled(zero) for zero in range(4)]
    peaks = [s.figures.peak_bytes for s in steps]
    assert peaks == sorted(peaks, reverse=True) and peaks[3] < 0.9 * peaks[2] < 0.8 * peaks[1]
    sent = []
    for s in steps:
        begun = [o for o in s.program.block.operators if isinstance(o.op, Communication)]
        sent.append(Counter())
        for o in begun:
            sent[-1][o.op.queue] += sum(v.nbytes for v in o.writes())
    gradients = [sum(n for queue, n in c.items() if queue != "weights") for c in sent]
    assert gradients[2] > 3 * gradients[1] and sent[3]["weights"] > 3 * sent[2]["weights"] == 3 * sent[1]["weights"]


def test_with_one_micro_batch_stage_2_is_stage_1() -> None:
    assert compiled(2, 4).figures.peak_bytes == compiled(1, 4).figures.peak_bytes


def test_text_form() -> None:
    text = "micro:0:8@dp=1/2/library/scattered"
    assert str(parse_slicing(text)) == text


@pytest.mark.parametrize("accumulate", ["tree", "running"])
@pytest.mark.parametrize("how", [{"sync_batch_norm": True}, {}, {"micro_batches": 8}])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_no_rank_sums_whole_gradients(zero: int, how: dict[str, Any], accumulate: str) -> None:
    program, loss = gpt()
    options: dict[str, Any] = {"zero": zero, "accumulate": accumulate, **how}
    DataParallel(adam(), "dp=2", batch=8, **options).minimize(loss)
    kinds = Counter(o.op.name for o in program.block.operators)
    assert kinds["AllReduce"] <= 2, "the loss, and the rows of the table of positions that there are"
    assert kinds["ReduceScatter"] >= len(program.block.parameters) - 1
