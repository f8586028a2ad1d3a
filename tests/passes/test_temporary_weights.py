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


def test_a_parameter_in_16_bits_is_cast_again_for_the_backward_pass() -> None:
    program = rc.load(rc.models.build("lenet", batch=2))
    rc.amp.MixedPrecision(rc.SGD(0.1), "bf16").minimize(rc.losses.cross_entropy(program["logits"]))
    after = run_passes(program.block, [TemporaryWeights()])
    for name in ("fc2.weight", "fc3.weight", "conv2.weight"):
        readers = [op.role for op in after.operators if f"{name}.bf16" in {v.name for v in op.reads()}]
        assert readers == [rc.Role.FORWARD]
        casts = [i for i, op in enumerate(after.operators) if op.op.name == "Cast" and op.inputs[0].name == name]
        assert [after.operators[i].role for i in casts] == [rc.Role.FORWARD, rc.Role.BACKWARD]
        update = next(i for i, op in enumerate(after.operators) if op.op.updates and op.outputs[0].name == name)
        assert casts[-1] < update


def test_nothing_is_cast_again_while_later_micro_batches_read_it() -> None:
    program = rc.load(rc.models.build("lenet", batch=6))
    merged = rc.GradientMerge(rc.amp.MixedPrecision(rc.SGD(0.1), "bf16"), 3, batch=6)
    merged.minimize(rc.losses.cross_entropy(program["logits"]))
    after = run_passes(program.block, [TemporaryWeights()])
    casts = [op.role for op in after.operators if op.op.name == "Cast" and op.inputs[0].name == "fc3.weight"]
    assert casts == [rc.Role.FORWARD, rc.Role.BACKWARD]  # the last micro-batch alone casts it again


def test_operators_without_inputs_stay() -> None:
    text = 'program p { \n param %w: f32[2] \n %one: f32[2] = Fill() {dtype="f32", shape=[2], value=1.0} \n'
    before = rc.parse(text + " %y: f32[2] = Mul(%w, %one) \n output %y \n }")
    assert TemporaryWeights().run(before) is before


def test_bf16_keeps_less_than_float32() -> None:
    small = {"layers": 3, "hidden": 64, "inner": 128, "heads": 2, "groups": 2, "vocab": 64, "seq": 16}
    program = rc.load(rc.models.build("llama-tiny", batch=1, weights=False, **small))
    loss = rc.losses.cross_entropy(program["logits"])
    kept = {}
    for precision in ("fp32", "bf16"):
        step = rc.compile_step(program, loss, rc.AdamW(1e-3), place="cuda:0", precision=precision)
        kept[precision] = step.figures.kept_bytes, step.figures.peak_bytes
    assert kept["bf16"][0] < 0.7 * kept["fp32"][0]
    assert kept["bf16"][1] < kept["fp32"][1]


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
