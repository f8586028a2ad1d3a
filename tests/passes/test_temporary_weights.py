"""The pass temporary-weights."""

from __future__ import annotations

import recompute as rc
from recompute.passes import run_passes
from recompute.passes.recomputation.temporary_weights import TemporaryWeights


def block() -> rc.Block:
    program = rc.quantize_frozen(rc.load(rc.models.build("lenet", batch=2)))
    rc.SGD(0.1).minimize(rc.losses.cross_entropy(program["logits"]))
    return program.block


def test_each_backward_product_gets_its_own_weight() -> None:
    before = block()
    after = run_passes(before, [TemporaryWeights()])
    made = [op for op in after.operators if op.role is rc.Role.BACKWARD and any(".int8" in v.name for v in op.reads())]
    assert {next(op.reads()).name for op in made} == {"fc2.weight.int8", "fc3.weight.int8", "fc1.weight.int8"}
    for name in ("fc1.weight", "fc2.weight", "fc3.weight"):
        readers = [op.role for op in after.operators if name in {v.name for v in op.reads()}]
        assert readers == [rc.Role.FORWARD]
    assert len(after.operators) == len(before.operators) + 3 * 3
    assert run_passes(after, [TemporaryWeights()]) is after


def test_other_blocks_stay_themselves() -> None:
    program = rc.load(rc.models.build("lenet", batch=2))
    rc.SGD(0.1).minimize(rc.losses.cross_entropy(program["logits"]))
    assert TemporaryWeights().run(program.block) is program.block
    program = rc.quantize_frozen(rc.load(rc.models.build("lenet", batch=2)))
    assert TemporaryWeights().run(program.block) is program.block  # nothing is read in a backward pass


def test_a_returned_weight_is_made_once() -> None:
    before = block()
    before = before.with_operators(before.operators, outputs=(*before.outputs, "fc2.weight"))
    after = TemporaryWeights().run(before)
    readers = [op.role for op in after.operators if "fc2.weight" in {v.name for v in op.reads()}]
    assert rc.Role.BACKWARD in readers
