"""Passes that move, join and repeat communication: the same bits, and what they promise."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from distributed_cases import own_arrays

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.communication.verify_ranks import verify_ranks
from recompute.language.ir import Block
from recompute.language.program import Program
from recompute.ops.communication.base import Communication
from recompute.ops.communication.collectives import AllGather
from recompute.passes import memory_report, run_passes
from recompute.passes.communication.buckets import Buckets
from recompute.passes.communication.overlap import Overlap
from recompute.passes.communication.regather import Regather
from recompute.passes.communication.tree_sums import TreeSums
from recompute.passes.scheduling.graph import Graph, Walk, graph_of
from recompute.training.parallel import DataParallel

RANKS, BATCH = 4, 8
SMALL = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 20, "seq": 4, "context": 4}
PASSES = {
    "buckets": [Buckets()],
    "regather": [Regather(small=0)],
    "sums": [TreeSums()],
    "overlap": [Overlap()],
    "far": [Overlap(ahead=5, behind=4)],
    "all": [Regather(small=256), Buckets(member=512, bucket=2048), TreeSums(), Overlap()],
}


@cache
def programs(zero: int, clip: bool = False) -> list[Program]:
    found = []
    for rank in range(RANKS):
        program = rc.load(rc.models.build("gpt2-tiny", **SMALL), batch=BATCH)
        loss = rc.losses.cross_entropy(program["logits"])
        optimizer = rc.Adam(1e-2, grad_clip=rc.clip.ClipGradByGlobalNorm(0.5) if clip else None)
        DataParallel(optimizer, Mesh.of(dp=RANKS), rank, zero=zero, batch=BATCH).minimize(loss)
        found.append(program)
    return found


def results(blocks: list[Block], of: list[Program]) -> list[bytes]:
    machine = LockStep(blocks, Mesh.of(dp=RANKS), [own_arrays(p) for p in of])
    g = np.random.default_rng(0)
    feeds = [{v.name: g.integers(0, 20, v.shape) for v in b.inputs} for b in blocks]
    losses = [machine.run(feeds, ["loss"])[0]["loss"].tobytes() for _ in range(2)]
    return losses + [a.tobytes() for state in machine.state for _, a in sorted(state.items())]


@pytest.mark.parametrize("name", list(PASSES))
@pytest.mark.parametrize(("zero", "clip"), [(0, False), (0, True), (3, False), (3, True)])
def test_the_same_bits(name: str, zero: int, clip: bool) -> None:
    of = programs(zero, clip)
    plain = [p.block for p in of]
    made = [run_passes(b, PASSES[name]) for b in plain]
    assert verify_ranks(made, Mesh.of(dp=RANKS)) == 1
    if name != "regather" or zero == 3:
        assert made[0] != plain[0]
    assert results(made, of) == results(plain, of)


def count(block: Block, kind: type = Communication) -> int:
    return sum(isinstance(o.op, kind) for o in block.operators)


def test_micro_batches_that_recompute_gather_again() -> None:
    """A lookup in a gathered table reads its slice's indices, and is no view of the table."""
    blocks = []
    for rank in range(2):
        program = rc.load(rc.models.build("bert-tiny", layers=1, hidden=8, heads=2, vocab=20, seq=4), batch=BATCH)
        loss = rc.losses.cross_entropy(program["logits"])
        inner = rc.RecomputeOptimizer(rc.Adam(1e-2)).set_checkpoints(["layer.0.out"])
        DataParallel(inner, Mesh.of(dp=2), rank, zero=3, micro_batches=4, batch=BATCH).minimize(loss)
        blocks.append(program.block)
    made = [rc.verify(run_passes(b, PASSES["regather"])) for b in blocks]
    assert count(made[0], AllGather) > count(blocks[0], AllGather)
    assert verify_ranks(made, Mesh.of(dp=2)) == 1


def test_buckets_are_fewer_messages() -> None:
    block = programs(1)[0].block
    assert count(Buckets().run(block)) < count(block) / 4
    assert Buckets(member=0).run(block) is block


def test_parameters_are_gathered_again() -> None:
    block = programs(3)[0].block
    made = Regather(small=0).run(block)
    assert count(made, AllGather) > count(block, AllGather) + 8
    assert Regather().run(block) == block, "all of them are small"
    one = programs(1)[0].block
    assert Regather(small=0).run(one) is one, "stage 1 keeps what it gathers"


def test_computation_goes_on_while_ranks_communicate() -> None:
    """Between most begins and their waits there is something to compute."""
    block = run_passes(programs(0)[0].block, [TreeSums(), Overlap()])
    begun: dict[str, int] = {}
    waits: list[bool] = []
    computed = 0
    for o in block.operators:
        if isinstance(o.op, Communication):
            begun[next(o.writes()).name] = computed
        elif o.op.communicates:
            waits.append(computed > begun[next(o.reads()).name])
        elif not o.op.moves_data:
            computed += 1
    assert sum(waits) > 0.6 * len(waits)


@pytest.mark.parametrize("zero", [0, 2])
def test_channels_keep_their_order_whatever_order_computation_has(zero: int) -> None:
    """Ranks may order operators in different ways, each for its memory; what they send has to have one order."""
    block = run_passes(programs(zero, True)[0].block, [TreeSums()])
    graph = graph_of(block)
    latest = [len(graph) - 1 - i for i in reversed(in_order(graph.reversed()))]
    assert latest != list(range(len(graph)))
    wanted = sent(block)
    for order in (range(len(graph)), in_order(graph), latest):
        other = block.with_operators([block.operators[i] for i in order])
        assert sent(run_passes(other, [Overlap()])) == wanted


def in_order(graph: Graph) -> list[int]:
    """An order of operators in which each runs as early as its inputs allow, the last ones of the given order first."""
    walk, found = Walk(graph), []
    while len(found) < len(graph):
        i = max(i for i in range(len(graph)) if walk.ready(i))
        walk.step(i)
        found.append(i)
    return found


def sent(block: Block) -> dict[str, list[tuple[str, int]]]:
    """What is begun on each channel, in order."""
    found: dict[str, list[tuple[str, int]]] = {}
    for o in block.operators:
        if isinstance(o.op, Communication):
            found.setdefault(o.op.queue, []).append((o.op.name, o.op.number))
    return found


def test_each_stage_takes_less() -> None:
    """Bytes of a rank, with large parameters and a small batch."""
    wide = {"layers": 4, "hidden": 128, "heads": 2, "vocab": 64, "seq": 4, "context": 4}
    peaks = []
    for zero in (0, 1, 3):
        program = rc.load(rc.models.build("gpt2-tiny", **wide), batch=RANKS)
        loss = rc.losses.cross_entropy(program["logits"])
        DataParallel(rc.Adam(), Mesh.of(dp=RANKS), 0, zero=zero, batch=RANKS).minimize(loss)
        peaks.append(memory_report(rc.Executor().planned(program)).peak)
    whole = 4 * sum(v.size for v in rc.load(rc.models.build("gpt2-tiny", **wide), batch=1).block.parameters)
    assert peaks[1] < peaks[0] - 1.5 * whole  # of the two moments, three quarters
    assert peaks[2] < peaks[1] - 0.5 * whole  # most parameters are not there at a time


def test_a_compiled_step_fits_no_other_communication() -> None:
    """Each of the communications of one rank's compiled step under another number, order, or out of turn is refused."""
    blocks = [run_passes(p.block, PASSES["all"]) for p in programs(3, True)]
    mesh = Mesh.of(dp=RANKS)
    assert verify_ranks(blocks, mesh) == 1
    mine = list(blocks[1].operators)
    begins = [i for i, o in enumerate(mine) if isinstance(o.op, Communication)]
    mutants: list[dict[int, Communication]] = []
    for i in begins:
        op = mine[i].op
        assert isinstance(op, Communication)
        mutants += [
            {i: dataclasses.replace(op, number=op.number + 1000)},
            {i: dataclasses.replace(op, order="library")},
        ]
        later = next((j for j in begins if j > i and mine[j].op.queue == op.queue), None)  # type: ignore[attr-defined]
        if later is not None:
            other = mine[later].op
            assert isinstance(other, Communication)
            swapped = {i: dataclasses.replace(op, number=other.number)}
            mutants.append({**swapped, later: dataclasses.replace(other, number=op.number)})
    assert len(mutants) > 60
    for changes in mutants:
        operators = [dataclasses.replace(o, op=changes[i]) if i in changes else o for i, o in enumerate(mine)]
        with pytest.raises(rc.VerifyError):
            verify_ranks([blocks[0], blocks[1].with_operators(operators), *blocks[2:]], mesh)


def test_nothing_is_updated_before_the_check_of_the_loss() -> None:
    """A step that NaN ends has changed nothing, on ranks as on one process."""
    network = rc.models.build("resnet18", width=4, blocks=(1, 1, 1, 1), image=16, classes=3)
    loss = rc.stop_on_nan(rc.losses.cross_entropy(rc.load(network, batch=BATCH)["logits"]))
    DataParallel(rc.Adam(), Mesh.of(dp=2), 0, zero=1, micro_batches=BATCH, batch=BATCH).minimize(loss)
    names = [o.op.name for o in rc.Executor().planned(loss.program, [loss]).operators]
    assert names.index("CheckFinite") < names.index("AdamUpdate")
