"""The problem that a program is to its planners, and the judge of plans: what they say is what is compiled."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

import recompute as rc
from recompute.compiling.steps import attach_loss
from recompute.errors import UsageError
from recompute.language.ir import Block, Operator, Role
from recompute.passes import DeadCode
from recompute.passes.planners import (
    Node,
    RematerialisationProblem,
    load_problem,
    plan_of,
    planner,
    sequence_of,
    simulate,
)
from recompute.passes.planners.core.derive import Derived, derive
from recompute.passes.planners.core.problem import checked_sequence
from recompute.passes.planners.core.schedules import keep_schedule
from recompute.passes.planners.core.simulate import pruned
from recompute.passes.recomputation.recompute import apply
from recompute.passes.scheduling.schedule import live_peak

NETWORKS = (
    "mlp",
    "lenet",
    "resnet18",
    "bert-tiny",
    "lstm",
    "vgg16",
)


def step_of(network: str, batch: int = 2) -> Block:
    """A plain training step without frees."""
    program = rc.load(rc.models.build(network, batch=batch, weights=False))
    loss, _ = attach_loss(program, None)
    rc.Adam().minimize(program[loss])
    return DeadCode().run(program.block)


def reruns(block: Block) -> list[Operator]:
    return [op for op in block.operators if op.role is Role.RECOMPUTE]


def derived(network: str) -> Derived:
    return derive(step_of(network), lambda op: float(1 + len(op.inputs)))


@pytest.mark.parametrize("network", NETWORKS)
def test_judge_says_what_is_compiled(network: str) -> None:
    """Simulated peak = live bytes of the compiled program, for random sets of kept values."""
    d = derived(network)
    p = d.problem
    assert simulate(p, range(len(p))).peak - p.fixed == live_peak(d.block)
    draw = random.Random(network)
    for share in (0.0, 0.3, 0.8):
        kept = {v for v in p.saved if draw.random() < share}
        sequence = keep_schedule(p, kept)
        checked_sequence(p, sequence)
        assert pruned(p, sequence) == sequence
        plan = plan_of(sequence)
        assert sequence_of(p, plan) == sequence
        applied = apply(d.block, d.for_block(plan))
        block = DeadCode().run(applied)  # a view is dead where its readers come after a rerun
        assert reruns(block) == reruns(applied)
        if not p.shared:
            assert simulate(p, sequence).peak - p.fixed == live_peak(block)
        else:  # parts of a Concat may be written in place, which the judge does not count on
            assert simulate(p, sequence).peak - p.fixed >= live_peak(block)


def test_overwriting_saves_a_buffer_only_where_the_input_dies() -> None:
    nodes = (
        Node("a", 1.0, (), (0,)),
        Node("b", 1.0, (0,), (1,), overwrites=(0,)),
        Node("c", 1.0, (1,), (2,), overwrites=(1,)),
        Node("d", 1.0, (1, 2), (3,), backward=True, repeatable=False),
    )
    p = RematerialisationProblem(nodes, (64, 64, 64, 8), ("a", "b", "c", "d"), fixed=1000)
    assert simulate(p, range(4)).peak == 1000 + 64 + 64 + 8
    again = [0, 1, 2, 0, 1, 3]
    assert simulate(p, again).peak == 1000 + 64 + 64 + 8
    assert simulate(p, again).cost == 6.0


def test_inputs_die_and_outputs_stay() -> None:
    nodes = (Node("a", 1.0, (0,), (1,)), Node("b", 1.0, (1,), (2,)), Node("c", 1.0, (2,), (3,)))
    p = RematerialisationProblem(nodes, (10, 20, 40, 80), ("x", "a", "b", "c"), inputs=(0,), outputs=(1,))
    assert simulate(p, range(3)).peak == 20 + 40 + 80


def test_what_a_node_reads_twice_is_there_once(tmp_path: Path) -> None:
    """Bound and local search count what a node reads: a value named twice would be there twice."""
    twice = (Node("a", 1.0, (), (0,)), Node("b", 1.0, (0, 0), (1,)))
    p = RematerialisationProblem(twice, (8, 8), ("a", "b"))
    assert p == RematerialisationProblem((twice[0], replace(twice[1], reads=(0,))), (8, 8), ("a", "b"))
    text = json.dumps(p.to_dict()).replace('"reads": [0]', '"reads": [0, 0]')
    (tmp_path / "p.json").write_text(text)
    assert load_problem(tmp_path / "p.json") == p


def test_problem_survives_its_file(tmp_path: Path) -> None:
    p = derived("lenet").problem
    p.save(tmp_path / "p.json")
    assert load_problem(tmp_path / "p.json") == p


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "not a JSON object"),
        ("{", "is not JSON"),
        ('{"format": "x"}', "is no problem of format"),
        ('{"format": "recompute-problem-1"}', "lacks the field 'values'"),
        ('{"format": "recompute-problem-1", "values": [], "nodes": [{"cost": 1, "reads": [0], "writes": []}]}', "0"),
        ('{"format": "recompute-problem-1", "values": [], "nodes": 3}', "wrong kind"),
        ('{"format": "recompute-problem-1", "values": [], "nodes": [3]}', r"nodes\[0\] is of the wrong kind"),
        ('{"format": "recompute-problem-1", "values": [], "nodes": [{"cost": "x"}]}', "'cost' is of the wrong kind"),
        ('{"format": "recompute-problem-1", "fixed": 9223372036854775808, "values": [], "nodes": []}', r"2\^63 bytes"),
        ('{"format": "recompute-problem-1", "values": [{"bytes": true}], "nodes": []}', "is not a whole number"),
    ],
)  # fmt: skip
def test_files_that_are_no_problem(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_problem(tmp_path / "p.json")


def test_unknown_strategies_and_options() -> None:
    with pytest.raises(UsageError, match="there is no strategy 'chem'"):
        planner("chem")
