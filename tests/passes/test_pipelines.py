"""Pipelines: the programs of all ranks have the bits of one, and are proved free of deadlock before anything runs."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.communication.verify_ranks import verify_ranks
from recompute.compiling.steps import Steps
from recompute.cost import operator_cost
from recompute.errors import UsageError, VerifyError
from recompute.language.ir import Block, Operator
from recompute.ops.communication.base import CommWait
from recompute.ops.communication.messages import Recv, Send
from recompute.passes.pipelines.borders import Stages, homes
from recompute.passes.pipelines.cuts import balanced_cuts, loads
from recompute.passes.pipelines.schedules import BACKWARD, FORWARD, SCHEDULES, WEIGHTS, Pipe, Slot
from recompute.passes.scheduling.schedule import live_peak
from recompute.passes.slicing.slicing import parse_slicing
from recompute.training.parallel import DataParallel

NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2-tiny": {"layers": 4, "hidden": 16, "heads": 2, "vocab": 40, "seq": 8},
    "resnet18": {"width": 4, "blocks": (1, 1, 1, 1), "image": 16, "classes": 3},
}
#: networks of some tests
OTHERS: dict[str, dict[str, Any]] = {
    "llama-tiny": {"layers": 4, "hidden": 16, "inner": 32, "heads": 4, "groups": 4, "vocab": 40, "seq": 8},
}
SIZES = {**NETWORKS, **OTHERS}
BATCH, PIECES = 16, 8


def made(name: str, mesh: Mesh, rank: int, words: str = "", **options: Any) -> tuple[rc.Program, str]:
    """A rank's step, with what `words` say."""
    program = rc.load(rc.models.build(name, seed=0, **SIZES[name]), batch=BATCH)
    loss = rc.losses.cross_entropy(program["logits"])
    found: Any = rc.Adam(1e-2, grad_clip=rc.clip.ClipGradByGlobalNorm(0.1) if "clip" in words else None)
    if "fp16" in words:
        found = rc.MixedPrecision(found, "fp16")
    if "checkpoints" in words:
        found = rc.RecomputeOptimizer(found).set_checkpoints(list(rc.models.info(name, **SIZES[name]).checkpoints))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rc.RecomputeWarning)
        DataParallel(found, mesh, rank, micro_batches=PIECES, batch=BATCH, **options).minimize(loss)
    return program, loss.name


def arrays(program: rc.Program) -> dict[str, np.ndarray]:
    """Copies of a rank's parameters, buffers and state."""
    b = program.block
    return {v.name: np.array(program.data[v.name]) for v in (*b.parameters, *b.buffers, *b.state)}


def fed(mesh: Mesh, block: Block, steps: int) -> Iterator[list[dict[str, np.ndarray]]]:
    """What each rank is fed, in each step: its row's share of the same numbers."""
    draw, share = np.random.default_rng(3), dict(mesh.axes).get("dp", 1)
    for _ in range(steps):
        feeds: list[dict[str, np.ndarray]] = [{} for _ in range(mesh.ranks)]
        for v in block.inputs:
            shape = (BATCH, *v.shape[1:])
            drawn = draw.standard_normal(shape) if v.type.is_float else draw.integers(0, 2, shape)
            for r, feed in enumerate(feeds):
                low = (mesh.coordinate(r, "dp") if share > 1 else 0) * BATCH // share
                feed[v.name] = drawn[low : low + BATCH // share].astype(v.type.numpy)
        yield feeds


def trained(
    name: str, mesh: Mesh, words: str = "", steps: int = 2, **options: Any
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses, and parameters and state of all ranks, which must agree where several have one."""
    programs = [made(name, mesh, r, words, **options) for r in range(mesh.ranks)]
    blocks, loss = [p.block for p, _ in programs], programs[0][1]
    ranks = LockStep(blocks, mesh, [arrays(p) for p, _ in programs])
    losses = []
    for feeds in fed(mesh, blocks[0], steps):
        results = ranks.run(feeds)
        assert all(found[loss] == results[0][loss] for found in results)
        losses.append(float(results[0][loss]))
    state: dict[str, np.ndarray] = {}
    for own in ranks.state:
        for n, array in own.items():
            assert n not in state or np.array_equal(state[n], array), n
            state[n] = array
    return losses, state


PIPELINES = [
    (Mesh.of(pp=2), {}),
    (Mesh.of(pp=4), {"schedule": "zb"}),
    (Mesh.of(pp=2), {"schedule": "interleaved", "chunks": 2}),
    (Mesh.of(dp=2, pp=2), {"schedule": "gpipe"}),
]


@pytest.mark.parametrize("words", ["", "clip checkpoints", "fp16 clip"])
@pytest.mark.parametrize("name", NETWORKS)
def test_bits_are_those_of_one_rank(name: str, words: str) -> None:
    losses, state = trained(name, Mesh.of(dp=1), words)
    for mesh, options in PIPELINES:
        own, found = trained(name, mesh, words, **options)
        assert own[0] == losses[0]
        if name == "resnet18":
            assert own == losses
            assert set(found) == set(state)
            assert all(np.array_equal(found[n], state[n]) for n in state)
        else:  # the gradient of the tied embedding is the sum of two sums, one of each stage
            np.testing.assert_allclose(own, losses, rtol=1e-5)
            assert not [n for n in set(state) - set(found) if not n.endswith(".shape")]


@pytest.mark.parametrize("name", NETWORKS)
def test_running_sums_do_not_depend_on_stages(name: str) -> None:
    """One total of each gradient in place of a tree of sums, in the order of the micro-batches."""
    losses, state = trained(name, Mesh.of(dp=1), accumulate="running")
    own, found = trained(name, Mesh.of(pp=2), accumulate="running")
    np.testing.assert_allclose(losses, trained(name, Mesh.of(dp=1))[0], rtol=1e-5)
    if name == "resnet18":
        assert own == losses
        assert all(np.array_equal(found[n], state[n]) for n in state)
    else:  # the tied embedding
        np.testing.assert_allclose(own, losses, rtol=1e-6)


def test_running_sums_take_less_memory_than_trees() -> None:
    def arena(how: str) -> int:
        block = made("gpt2-tiny", Mesh.of(pp=2), 1, accumulate=how)[0].block
        return live_peak(block)

    assert arena("running") < arena("tree")


def test_a_rank_has_its_own_parameters_alone() -> None:
    program, _ = made("gpt2-tiny", Mesh.of(pp=4), 1)
    names = {v.name for v in program.block.parameters}
    assert names and all(n.startswith("h.1.") for n in names)
    assert all(n.startswith("h.1.") or n in ("step", "learning_rate") for n in {v.name for v in program.block.state})
    assert not any(n.startswith("h.0.") for n in program.data)


def test_cuts_by_name() -> None:
    program, _ = made("gpt2-tiny", Mesh.of(pp=2), 0, cuts=["h.2.out"])
    layers = {v.name.split(".")[1] for v in program.block.parameters if v.name.startswith("h.")}
    assert layers == {"0", "1", "2"}


@pytest.mark.parametrize(
    "options",
    [
        {"cuts": ["h.7.out"]},
        {"cuts": ["h.1.out", "h.2.out"]},
        {"schedule": "2f2b"},
        {"chunks": 2},
        {"sync_batch_norm": True},
        {"accumulate": "heap"},
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        made("gpt2-tiny", Mesh.of(pp=2), 0, **options)


def test_refuses_a_cut_that_nothing_reads_and_cuts_in_the_wrong_order() -> None:
    program = rc.load(rc.models.build("gpt2-tiny", **NETWORKS["gpt2-tiny"]), batch=2)
    with pytest.raises(UsageError, match="does not come after"):
        Stages(("h.2.out", "h.1.out")).run(program.block)
    with pytest.raises(UsageError, match="nothing reads it"):
        Stages(("logits",)).run(program.block)


def work(o: Operator) -> float:
    """Operations and bytes of an operator: its time in cuts that depend on no machine."""
    cost = operator_cost(o)
    return cost.flops + 20 * cost.bytes


def test_what_is_recomputed_runs_where_it_ran_first() -> None:
    """Also where all that it reads is there on every stage."""
    block = rc.parse("""program p {
      input %x: f32[4]
      param %w: f32[4]
      %a: f32[4] = Mul(%x, %w)
      %a.stage_1: f32[4] = Border(%a)
      %b: f32[4] = Exp(%a.stage_1)
      %b.stage_2: f32[4] = Border(%b) {source=1, target=2}
      loss %loss: f32[] = ReduceSum(%b.stage_2) {keepdims=0}
      recompute %a.stage_1@1: f32[4] = Identity(%x)
      recompute %b@1: f32[4] = Exp(%w)
      output %loss
    }""")
    assert homes(block) == {0: 0, 1: 1, 2: 1, 3: 2, 4: 2, 5: 1, 6: 1}


def test_stages_of_a_rank_even_each_other_out() -> None:
    """Ten layers and a head of three layers' time in six stages: ranks' times are nearer than the largest stages'."""
    block = Steps("gpt2-tiny", options={**NETWORKS["gpt2-tiny"], "layers": 10, "vocab": 480}).program(1)[0].block
    found = {ranks: balanced_cuts(block, 6, work, ranks) for ranks in (None, 2)}
    worst = {ranks: max(loads(block, cuts, work, 2)) for ranks, cuts in found.items()}
    assert len(set(found[2])) == 5 and worst[2] < worst[None]
    assert worst[2] < 1.1 * sum(loads(block, found[2], work, 2)) / 2


def test_text_form() -> None:
    text = "micro:0:8@dp=1/2+pp=3/4,interleaved,2"
    found = parse_slicing(text)
    assert str(found) == text
    running = "micro:0:8@dp=1/2/library/running"
    assert str(parse_slicing(running)) == running
    assert found.pipe == Pipe("pp", 4, 3, "interleaved", 2)


# -- schedules --------------------------------------------------------------------------------------------------------


def finished(pipe: Pipe, micro_batches: int, forward: float = 1.0, backward: float = 2.0) -> tuple[float, list[int]]:
    """The time of a step, and on each rank the most micro-batches (times chunks) alive at a time."""
    parts = {FORWARD: forward, BACKWARD: backward, WEIGHTS: backward / 2}
    if pipe.schedule == "zb":
        parts[BACKWARD] = backward / 2
    orders = [pipe.at(r).slots(micro_batches) for r in range(pipe.ranks)]
    done: dict[tuple[str, int, int], float] = {}
    clock, at, last = [0.0] * pipe.ranks, [0] * pipe.ranks, pipe.stages - 1
    alive, most = [0] * pipe.ranks, [0] * pipe.ranks
    while any(at[r] < len(orders[r]) for r in range(pipe.ranks)):
        before = list(at)
        for r in range(pipe.ranks):
            while at[r] < len(orders[r]):
                s = orders[r][at[r]]
                stage = s.chunk * pipe.ranks + r
                need = {FORWARD: (FORWARD, stage - 1, s.micro_batch), BACKWARD: (BACKWARD, stage + 1, s.micro_batch)}
                needs = [need[s.kind]] if s.kind in need and 0 <= need[s.kind][1] <= last else []
                needs += [(FORWARD if s.kind == BACKWARD else BACKWARD, stage, s.micro_batch)] * (s.kind != FORWARD)
                if any(n not in done for n in needs):
                    break
                clock[r] = max([clock[r], *(done[n] for n in needs)]) + parts[s.kind]
                done[s.kind, stage, s.micro_batch] = clock[r]
                alive[r] += (s.kind == FORWARD) - (s.kind == (WEIGHTS if pipe.schedule == "zb" else BACKWARD))
                most[r] = max(most[r], alive[r])
                at[r] += 1
        assert at != before, "the schedule waits for itself"
    return max(clock), most


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pass_runs_once_and_bubbles_are_as_published(schedule: str, ranks: int) -> None:
    for chunks in (1, 2, 4) if schedule == "interleaved" else (1,):
        m = 4 * ranks
        pipe = Pipe("pp", ranks, 0, schedule, chunks)
        for r in range(ranks):
            slots = pipe.at(r).slots(m)
            kinds = (FORWARD, BACKWARD, WEIGHTS) if schedule == "zb" else (FORWARD, BACKWARD)
            assert sorted(slots, key=repr) == sorted(
                (Slot(k, c, i) for k in kinds for c in range(chunks) for i in range(m)), key=repr
            )
        seconds, most = finished(pipe, m)
        ideal = 3.0 * m * chunks
        bubble = (seconds - ideal) / ideal
        if schedule == "zb":
            assert bubble < (ranks - 1) / m
            assert max(most) <= ranks
        else:
            np.testing.assert_allclose(bubble, (ranks - 1) / (m * chunks))
        if schedule == "1f1b":
            assert most == [ranks - r for r in range(ranks)]


def test_micro_batches_of_interleaved_chunks_are_a_multiple_of_the_ranks() -> None:
    with pytest.raises(UsageError, match="no multiple of 4"):
        Pipe("pp", 4, 0, "interleaved", 2).slots(6)


# -- mutations --------------------------------------------------------------------------------------------------------


def blocks_of(mesh: Mesh, **options: Any) -> list[Block]:
    return [made("resnet18", mesh, r, **options)[0].block for r in range(mesh.ranks)]


def blocking(block: Block) -> Block:
    """The naive form: each message is awaited where it begins."""
    ends = {next(o.reads()).name: o for o in block.operators if isinstance(o.op, CommWait)}
    begins = {next(o.writes()).name: o for o in block.operators if isinstance(o.op, (Send, Recv))}
    found: list[Operator] = []
    for o in block.operators:
        if isinstance(o.op, Send):
            found += [o, ends[next(o.writes()).name]]
        elif isinstance(o.op, CommWait) and (begin := begins.get(next(o.reads()).name)) is not None:
            found += [begin, o] if isinstance(begin.op, Recv) else []
        elif not isinstance(o.op, Recv):
            found.append(o)
    return block.with_operators(found)


def test_blocking_sends_are_refused_with_the_circle() -> None:
    mesh = Mesh.of(pp=2)
    blocks = blocks_of(mesh)
    verify_ranks(blocks, mesh)
    with pytest.raises(VerifyError) as e:
        verify_ranks([blocking(b) for b in blocks], mesh)
    text = str(e.value)
    assert "wait for ever" in text and "rank 0 waits for Send" in text and "rank 1 waits for Send" in text


def mutants(blocks: list[Block], rank: int) -> list[tuple[str, list[Block]]]:
    """Each message of a rank, and its wait: left out, of another size, exchanged with the next one of its channel."""
    operators = blocks[rank].operators
    found = []

    def changed(what: str, new: list[Operator]) -> None:
        found.append((what, [b.with_operators(new) if r == rank else b for r, b in enumerate(blocks)]))

    last: dict[str, int] = {}
    for i, o in enumerate(operators):
        if not isinstance(o.op, (Send, Recv)):
            continue
        target = next(o.writes()).name
        wait = next(j for j, w in enumerate(operators) if isinstance(w.op, CommWait) and next(w.reads()).name == target)
        if isinstance(o.op, Send):
            changed("left out", [w for j, w in enumerate(operators) if j not in (i, wait)])
        renamed = dataclasses.replace(o, op=dataclasses.replace(o.op, number=o.op.number + 1000))
        changed("another number", [*operators[:i], renamed, *operators[i + 1 :]])
        other = dataclasses.replace(o, op=dataclasses.replace(o.op, peer=rank))
        changed("another peer", [*operators[:i], other, *operators[i + 1 :]])
        j = last.get(o.op.queue)
        if j is not None:
            new = list(operators)
            first, second = new[j], new[i]
            new[j] = dataclasses.replace(first, op=dataclasses.replace(first.op, number=second.op.number))
            new[i] = dataclasses.replace(second, op=dataclasses.replace(second.op, number=first.op.number))
            changed("exchanged", new)
        last[o.op.queue] = i
    return found


@pytest.mark.parametrize("options", [{}, {"schedule": "gpipe"}, {"schedule": "interleaved", "chunks": 2}])
def test_mutations_are_refused(options: dict[str, Any]) -> None:
    mesh = Mesh.of(pp=2)
    blocks = blocks_of(mesh, **options)
    verify_ranks(blocks, mesh)
    count = 0
    for rank in range(mesh.ranks):
        for what, mutant in mutants(blocks, rank)[:: 3 if options else 1]:
            with pytest.raises(VerifyError):
                verify_ranks(mutant, mesh)
                pytest.fail(what)
            count += 1
    assert count >= 40


@pytest.mark.parametrize(
    "mesh", [Mesh.of(pp=2, tp=2), pytest.param(Mesh.of(dp=2, tp=2, pp=4), marks=pytest.mark.hours)], ids=str
)
@pytest.mark.parametrize("options", [{}, {"sequence": False}], ids=str)
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_stages_whose_operators_are_divided(mesh: Mesh, name: str, options: dict[str, Any]) -> None:
    """All stages add up the same groups of squares for a norm, whichever parameters they have."""
    losses_are_those_of_one_rank(name, mesh, options)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh.of(dp=2, pp=2),
        Mesh.of(dp=2, tp=2, pp=2),
        Mesh.of(dp=2, pp=4),
    ],
    ids=str,
)
def test_zero_in_stages(mesh: Mesh, zero: int) -> None:
    """Each rank has a share of the state of its own stage's parameters, gathers those alone, and has the same bits."""
    plain = made("llama-tiny", mesh, 0, "clip")[0]
    programs = losses_are_those_of_one_rank("llama-tiny", mesh, {"zero": zero, "schedule": "zb"})
    sizes = [sum(v.size for v in (*p.block.parameters, *p.block.state)) for p in (programs[0], plain)]
    assert sizes[0] < 0.55 * sizes[1]


def losses_are_those_of_one_rank(name: str, mesh: Mesh, options: dict[str, Any]) -> list[rc.Program]:
    """Asserts it, to 1e-5, with clipping; the programs of all ranks."""
    losses, _ = trained(name, Mesh.of(dp=1), "clip")
    programs = [made(name, mesh, r, "clip", **options)[0] for r in range(mesh.ranks)]
    assert verify_ranks([p.block for p in programs], mesh) >= mesh.size("pp")
    ranks = LockStep([p.block for p in programs], mesh, [arrays(p) for p in programs])
    found = []
    for feeds in fed(mesh, programs[0].block, 2):
        results = ranks.run(feeds)
        (loss,) = {float(r[programs[0].loss]) for r in results}
        found.append(loss)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    return programs
