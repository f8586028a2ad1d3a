"""Updates: what the verifier refuses of them, for every operator that updates; arrays that share memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import recompute as rc
from recompute import parse, verify
from recompute.errors import UsageError, VerifyError
from recompute.language.ir import Block, Constant, Operator, Role, Value
from recompute.language.op import REGISTRY
from recompute.language.types import TensorType
from recompute.testing import cases

UPDATING = sorted({c.op.name: c for cls in list(REGISTRY.values()) if cls.updates for c in cases(cls)})
CASES = {name: cases(REGISTRY[name]) for name in UPDATING}


def of_case(case) -> Block:
    """A block of one update: what it writes is state, all else inputs."""
    ins = [None if a is None else Value(f"v{i}", TensorType.of(np.asarray(a))) for i, a in enumerate(case.inputs)]
    types = case.op.infer(*(None if v is None else v.type for v in ins))
    outs = [ins[at] if at < len(ins) else None for at in case.op.updates[: len(types)]]
    state = tuple(v for v in outs if v is not None)
    others = tuple(v for v in ins if v is not None and v not in state)
    op = Operator(case.op, tuple(ins), tuple(outs), Role.OPTIMIZE)
    return Block("p", inputs=others, state=state, operators=(op,))


def refused(block: Block, why: str) -> None:
    with pytest.raises(VerifyError, match=why):
        verify(block)


def changed(block: Block, **changes) -> Block:
    return dataclasses.replace(block, operators=(dataclasses.replace(block.operators[0], **changes),))


def test_all_that_update_are_here():
    assert {"SGDUpdate", "AdamUpdate", "LambUpdate", "Increment", "RunningUpdate", "AverageUpdate"} <= set(UPDATING)


@pytest.mark.parametrize("name", UPDATING)
def test_one_array_twice_constants_inputs_and_absent_state(name):
    for case in CASES[name]:
        block = verify(of_case(case))
        op, ins, outs = case.op, block.operators[0].inputs, block.operators[0].outputs
        for i, out in enumerate(outs):
            if out is None:
                continue
            at = op.updates[i]
            for k, v in enumerate(ins):  # another input that is the same array
                if k != at and v is not None and v.type == out.type:
                    again = tuple(out if j == k else w for j, w in enumerate(ins))
                    names = tuple(out if o == v else o for o in outs)
                    refused(changed(block, inputs=again, outputs=names), f"updates %{out.name} in place and reads it")
            rest = tuple(v for v in block.state if v != out)
            moved = dataclasses.replace(block, state=rest, inputs=(*block.inputs, out))
            refused(moved, f"in place, but %{out.name} is an input")
            if out.size < 10:
                zeros = Constant.of(out.name, np.zeros(out.shape, out.type.numpy))
                refused(
                    dataclasses.replace(block, state=rest, constants=(zeros,)),
                    f"in place, but %{out.name} is a constant",
                )
            left = tuple(None if o == out else o for o in outs)
            refused(changed(block, outputs=left), "required|must be that parameter")
            without = changed(block, inputs=tuple(None if j == at else v for j, v in enumerate(ins)), outputs=left)
            if i < op.required_outputs:
                refused(without, f"{op.name}")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("%w: f32[1] = RMSPropUpdate(%w, %g, _, %lr)", "input 2, its state, is absent"),
        ("%w: f32[1], %m: f32[1] = RMSPropUpdate(%w, %g, %m, %lr) {momentum=0.5}", "the state of its momentum"),
        ("%w: f32[1], %m: f32[1] = MomentumUpdate(%w, %g, %m, %lr) {dampening=0.5}", "its step counter, is absent"),
        ("%w: f32[1] = SGDUpdate(%w, %g)", "its learning rate, is absent"),
        ("%w: f32[1] = SGDUpdate(%w, %g, %lr, %lr, %lr)", "takes 4 inputs at most"),
    ],
)
def test_what_an_update_needs(line, why):
    head = "  param %w: f32[1]\n  state %m: f32[1]\n  state %lr: f32[]\n  input %g: f32[1]\n"
    refused(parse(f"program p {{\n{head}  optimize {line}\n  output %w\n}}"), why)


def test_arrays_with_memory_in_common():
    """Overlapping parts of one array too; arrays that only follow each other, and what nothing updates, are fine."""
    text = """program p {
  param %w: f32[4]
  state %m: f32[4]
  buffer %a: f32[4]
  buffer %b: f32[4]
  state %lr: f32[]
  input %g: f32[4]
  optimize %w: f32[4], %m: f32[4] = MomentumUpdate(%w, %g, %m, %lr)
  %y: f32[4] = Add(%a, %b)
  output %w, %y
}"""
    whole = np.ones(16, np.float32)

    def run(w, m, a):
        data = {"w": w, "m": m, "a": a, "b": whole[12:], "lr": np.array(0.5, np.float32)}
        feed = {"g": np.ones(4, np.float32)}
        return rc.Executor().run(rc.Program(verify(parse(text)), data), feed, ["w"])[0]

    for w, m in ((whole[:4], whole[:4]), (whole[:4], whole[3:7]), (whole[:4], whole[12:])):
        with pytest.raises(UsageError, match="have memory in common"):
            run(w, m, np.ones(4, np.float32))
    np.testing.assert_allclose(run(whole[:4], whole[4:8], whole[12:]), 1 - 0.5 * (0.9 + 1), rtol=1e-6)
