"""The verifier of all ranks: correct programs are accepted, each mutation of one rank's is refused."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Iterator

import pytest

import recompute as rc
from recompute.communication import verify_ranks as verification
from recompute.communication.mesh import Mesh
from recompute.communication.verify_ranks import verify_ranks
from recompute.ops.communication.base import Communication
from recompute.ops.communication.collectives import AllReduce, Broadcast, Rooted
from recompute.ops.communication.messages import Message, Send


def collective(i: int, kind: str, axis: str, ranks: int, more: str = "") -> list[str]:
    """A begin and a wait of its own input."""
    out = {"ReduceScatter": f"f32[{24 // ranks},3]", "AllGather": f"f32[{24 * ranks},3]"}.get(kind, "f32[24,3]")
    return [
        f'communicate %s{i}: {out} = {kind}(%x{i}) {{axis="{axis}", ranks={ranks}, number={i}{more}}}',
        f"communicate %t{i}: {out} = CommWait(%s{i}, %x{i})",
    ]


def program(lines: list[str], inputs: int) -> rc.Block:
    declared = [f"input %x{i}: f32[24,3]" for i in range(inputs)]
    return rc.verify(rc.parse("\n".join(["program p {", *declared, *lines, "}"])))


def data_parallel(ranks: int = 4) -> list[rc.Block]:
    """All kinds of collectives, two in flight at a time, on two channels."""
    kinds = ("Broadcast", "AllReduce", "ReduceScatter", "AllGather", "AllToAll", "Reduce", "AllReduce", "AllGather")
    pairs = [collective(i, k, "dp", ranks, ', channel="w"' if i % 3 == 2 else "") for i, k in enumerate(kinds)]
    lines = [pairs[0][0]]
    for (_, wait), (begin, _) in itertools.pairwise(pairs):
        lines += [begin, wait]
    return [program([*lines, pairs[-1][1]], len(pairs))] * ranks


def message(i: int, kind: str, stages: int, peer: int, channel: str) -> list[str]:
    tail = f'axis="pp", ranks={stages}, number={i}, channel="{channel}", peer={peer}'
    name = f"{channel}{i}"
    if kind == "Send":
        begin = f"communicate %{name}: u8[1] = Send(%x{i}) {{{tail}}}"
        return [begin, f"communicate %{name}.t: u8[1] = CommWait(%{name}, %x{i})"]
    begin = f'communicate %{name}: f32[24,3] = Recv() {{{tail}, shape=[24,3], dtype="f32"}}'
    return [begin, f"communicate %{name}.t: f32[24,3] = CommWait(%{name})"]


def pipeline(stages: int = 3, data: int = 2, batches: int = 4) -> tuple[list[rc.Block], Mesh]:
    """1F1B: each stage runs forward passes ahead, then one of each in turn; a channel for each pair and direction,
    sends are awaited at the end; gradients are then summed over the replicas of a stage."""
    found = []
    for stage in range(stages):
        lines: list[str] = []
        late: list[str] = []

        def forward(i: int, stage: int = stage, lines: list[str] = lines, late: list[str] = late) -> None:
            if stage > 0:
                lines += message(i, "Recv", stages, stage - 1, f"f{stage - 1}")
            if stage < stages - 1:
                begin, wait = message(i, "Send", stages, stage + 1, f"f{stage}")
                lines.append(begin)
                late.append(wait)

        def backward(i: int, stage: int = stage, lines: list[str] = lines, late: list[str] = late) -> None:
            if stage < stages - 1:
                lines += message(i, "Recv", stages, stage + 1, f"b{stage + 1}")
            if stage > 0:
                begin, wait = message(i, "Send", stages, stage - 1, f"b{stage}")
                lines.append(begin)
                late.append(wait)

        ahead = min(stages - 1 - stage, batches)
        for i in range(ahead):
            forward(i)
        for i in range(batches):
            if i + ahead < batches:
                forward(i + ahead)
            backward(i)
        found.append(program([*lines, *late, *collective(0, "AllReduce", "dp", data)], batches))
    mesh = Mesh.of(dp=data, pp=stages)
    return [found[mesh.coordinate(r, "pp")] for r in range(mesh.ranks)], mesh


def changed(block: rc.Block, at: int, **fields: object) -> rc.Block:
    """The block with another operator in place of one, whose results' types follow."""
    o = block.operators[at]
    return retyped(block, at, dataclasses.replace(o.op, **fields), o.inputs)


def retyped(block: rc.Block, at: int, op: object, inputs: tuple) -> rc.Block:
    """The block with an operator and inputs in place of one, its results' types and those of its wait."""
    o = block.operators[at]
    (out,) = op.infer(*(v.type for v in inputs if v is not None))
    target = rc.Value(o.outputs[0].name, out)
    operators = list(block.operators)
    operators[at] = rc.Operator(op, inputs, (target,), o.role)
    wait = next(i for i, w in enumerate(operators) if w.op.name == "CommWait" and w.inputs[0].name == target.name)
    other = rc.Value(operators[wait].outputs[0].name, out)
    operators[wait] = rc.Operator(operators[wait].op, (target, *inputs), (other,), o.role)
    return block.with_operators(operators)


def with_input(block: rc.Block, at: int, t: str) -> rc.Block:
    """The block with another type of the input that a communication sends, or asks for."""
    o = block.operators[at]
    wanted = rc.TensorType.parse(t)
    if not o.inputs:
        return changed(block, at, shape=wanted.shape, dtype=wanted.dtype)
    new = rc.Value("other", wanted)
    block = dataclasses.replace(block, inputs=(*block.inputs, new))
    return retyped(block, at, o.op, (new,))


def without(block: rc.Block, at: int) -> rc.Block:
    """The block without a communication and its wait."""
    name = block.operators[at].outputs[0].name
    kept = [o for o in block.operators if name not in {v.name for v in (*o.reads(), *o.writes())}]
    return block.with_operators(kept)


def mutations(block: rc.Block, ranks: int) -> Iterator[tuple[str, rc.Block]]:
    """Each makes a program that is correct for itself, and wrong beside the others."""
    begins = [i for i, o in enumerate(block.operators) if isinstance(o.op, Communication)]
    for i in begins:
        op = block.operators[i].op
        yield f"{i}: delete", without(block, i)
        yield f"{i}: resize", with_input(block, i, "f32[48,3]")
        yield f"{i}: reshape", with_input(block, i, "f32[24,1,3]")
        yield f"{i}: retype", with_input(block, i, "i32[24,3]")
        yield f"{i}: halves", with_input(block, i, "f16[24,3]")
        yield f"{i}: number", changed(block, i, number=99)
        yield f"{i}: channel", changed(block, i, channel="other")
        more = op.ranks + 1 if isinstance(op, Message) else 2 * op.ranks
        yield f"{i}: ranks", changed(block, i, ranks=more, channel="other")
        yield f"{i}: order", changed(block, i, order="library")
        if isinstance(op, Message):
            yield f"{i}: peer", changed(block, i, peer=next(p for p in range(ranks) if p != op.peer))
        else:
            kind = Broadcast if isinstance(op, AllReduce) else AllReduce
            inputs = block.operators[i].inputs
            yield f"{i}: kind", retyped(block, i, kind(op.axis, op.ranks, op.number, op.channel), inputs)
            yield f"{i}: axis", changed(block, i, axis="tp", channel="other")
        if isinstance(op, Rooted):
            yield f"{i}: root", changed(block, i, root=op.ranks - 1)
        later = [j for j in begins if j > i and block.operators[j].op.queue == op.queue]
        if later:
            yield f"{i}: swap with {later[0]}", numbers_swapped(block, i, later[0])


def numbers_swapped(block: rc.Block, i: int, j: int) -> rc.Block:
    """Two communications of a channel in the other order: each takes the other's number."""
    first, second = block.operators[i].op, block.operators[j].op
    return changed(changed(block, i, number=second.number), j, number=first.number)


DP = data_parallel(), Mesh.of(dp=4)
CASES = [
    (f"{name}, rank {rank}, {what}", blocks, mesh, rank, mutant)
    for name, (blocks, mesh), ranks in (("data", DP, (0, 3)), ("pipeline", pipeline(), (0, 1, 5)))
    for rank in ranks
    for what, mutant in mutations(blocks[rank], 3)
]


def test_correct_programs_are_accepted() -> None:
    assert verify_ranks(*DP) == 1
    assert verify_ranks(*pipeline()) == 3
    assert verify_ranks(*pipeline(stages=4, data=1, batches=2)) == 4


def test_there_are_200_mutations() -> None:
    assert len(CASES) >= 200


@pytest.mark.parametrize(("blocks", "mesh", "rank", "mutant"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_mutations_are_refused(blocks: list[rc.Block], mesh: Mesh, rank: int, mutant: rc.Block) -> None:
    rc.verify(mutant)  # nothing is wrong with it alone
    with pytest.raises(rc.VerifyError):
        verify_ranks([*blocks[:rank], mutant, *blocks[rank + 1 :]], mesh)


def test_the_same_change_on_all_ranks_is_accepted() -> None:
    """Mutations are wrong because one rank differs: a number, a type, a root and a channel that all have are right."""
    for what, mutant in mutations(DP[0][0], 3):
        if what.partition(": ")[2].partition(" ")[0] not in ("ranks", "axis"):  # which the mesh does not have
            assert verify_ranks([mutant] * 4, DP[1]) == 1, what


def order_of(*names: str) -> rc.Block:
    """Collectives that are awaited at once, each on a channel of its own."""
    lines = [line for n in names for line in collective(int(n), "AllReduce", "dp", 2, f', channel="c{n}"')]
    return program(lines, 3)


def test_waits_in_circles_are_refused() -> None:
    with pytest.raises(rc.VerifyError, match="would wait for ever") as e:
        verify_ranks([order_of("0", "1"), order_of("1", "0")], Mesh.of(dp=2))
    assert "rank 0 waits for AllReduce number 0 on channel 'c0' (operator 0), and rank 1 does not take part" in str(
        e.value
    )
    assert "rank 1 waits for AllReduce number 1 on channel 'c1'" in str(e.value)
    assert verify_ranks([order_of("0", "1"), order_of("0", "1")], Mesh.of(dp=2)) == 1
    with pytest.raises(rc.VerifyError, match="rank 1 has ended"):
        verify_ranks([order_of("0", "1"), order_of("0")], Mesh.of(dp=2))


def test_begins_of_different_channels_may_have_any_order() -> None:
    a = [collective(i, "AllReduce", "dp", 2, f', channel="c{i}"') for i in range(2)]
    begins, waits = [p[0] for p in a], [p[1] for p in a]
    blocks = [program([*begins, *waits], 2), program([*begins[::-1], *waits], 2)]
    assert verify_ranks(blocks, Mesh.of(dp=2)) == 2


def test_both_send_first() -> None:
    """Send, wait, receive, on both sides: blocking messages, as a naive 1F1B has them."""
    blocks = []
    for rank in range(2):
        send, receive = message(0, "Send", 2, 1 - rank, f"to{1 - rank}"), message(0, "Recv", 2, 1 - rank, f"to{rank}")
        blocks.append(program([*send, *receive], 1))
    with pytest.raises(rc.VerifyError, match="would wait for ever"):
        verify_ranks(blocks, Mesh.of(pp=2))
    for rank in range(2):
        send, receive = message(0, "Send", 2, 1 - rank, f"to{1 - rank}"), message(0, "Recv", 2, 1 - rank, f"to{rank}")
        blocks[rank] = program([send[0], *receive, send[1]], 1)
    assert verify_ranks(blocks, Mesh.of(pp=2)) == 2


def test_a_rank_sends_nothing_to_itself() -> None:
    block = program(message(0, "Send", 2, 0, "a"), 1)
    with pytest.raises(rc.VerifyError, match="sends nothing to itself"):
        verify_ranks([block, block], Mesh.of(pp=2))


def test_a_channel_has_messages_or_collectives() -> None:
    sends = program(message(0, "Send", 3, 1, "a"), 1)
    receives = program(message(0, "Recv", 3, 0, "a"), 1)
    collects = program(collective(0, "AllReduce", "pp", 3, ', channel="a"'), 1)
    with pytest.raises(rc.VerifyError, match="either messages or collectives"):
        verify_ranks([sends, receives, collects], Mesh.of(pp=3))


def test_as_many_programs_as_ranks() -> None:
    with pytest.raises(rc.UsageError, match="has 4 ranks, but there are 3 programs"):
        verify_ranks(DP[0][:3], DP[1])


def test_thousand_ranks_are_checked_quickly() -> None:
    """dp 32 × pp 32, 64 micro-batches; with one wrong rank among them, too."""
    blocks, mesh = pipeline(stages=32, data=32, batches=64)
    assert mesh.ranks == 1024
    start = time.process_time()
    assert verify_ranks(blocks, mesh) == 32
    wrong = without(blocks[500], next(i for i, o in enumerate(blocks[500].operators) if isinstance(o.op, Send)))
    with pytest.raises(rc.VerifyError):
        verify_ranks([*blocks[:500], wrong, *blocks[501:]], mesh)
    assert time.process_time() - start < 15


def accepted(blocks: list[rc.Block], mesh: Mesh) -> bool:
    try:
        verify_ranks(blocks, mesh)
    except rc.VerifyError:
        return False
    return True


def test_classes_decide_as_all_ranks_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators moved at random, to right programs and wrong ones: with classes, and each rank by itself."""
    generator = random.Random(7)
    blocks, mesh = pipeline(stages=3, data=3, batches=2)
    drawn = []
    for _ in range(300):
        stage = generator.randrange(3)
        operators = list(blocks[stage].operators)
        for _ in range(generator.randint(1, 16)):
            i = generator.randrange(len(operators) - 1)
            operators[i : i + 2] = operators[i : i + 2][::-1]
        moved = blocks[stage].with_operators(operators)
        all_replicas = generator.random() < 0.5
        drawn.append([moved if r % 3 == stage and (all_replicas or r < 3) else b for r, b in enumerate(blocks)])
    drawn = [d for d in drawn if all(well_formed(b) for b in d)]
    found = [accepted(d, mesh) for d in drawn]
    monkeypatch.setattr(verification, "classes_of", lambda programs, mesh: list(range(mesh.ranks)))
    assert found == [accepted(d, mesh) for d in drawn]
    assert found.count(True) > 5 and found.count(False) > 5


def well_formed(block: rc.Block) -> bool:
    """Whether nothing is wrong with a program alone."""
    try:
        rc.verify(block)
    except rc.VerifyError:
        return False
    return True
