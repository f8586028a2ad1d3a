"""What passes do with communication: they keep it, once, in its order, and the results stay the same bits."""

from __future__ import annotations

import numpy as np
import pytest

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.communication.verify_ranks import verify_ranks
from recompute.passes import Target
from recompute.passes.communication.tree_sums import TreeSums
from recompute.passes.gradient.autodiff import differentiate
from recompute.passes.planners.core.derive import derive
from recompute.passes.recomputation.recompute import Recompute
from recompute.passes.scheduling.schedule import Schedule
from recompute.passes.sequence import plan_memory

FORWARD = """program p {
  input %x: f32[4]
  param %w: f32[4]
  %a: f32[4] = Mul(%x, %w)
  %b: f32[4] = Exp(%a)
  %s: f32[4] = AllReduce(%b) {axis="dp", ranks=RANKS, number=0}
  %c: f32[4] = CommWait(%s, %b)
  %d: f32[4] = Sin(%c)
  %t: f32[1] = ReduceScatter(%d) {axis="tp", ranks=4, number=0}
  %e: f32[1] = CommWait(%t, %d)
  %f: f32[1] = Exp(%e)
  %g: f32[1] = Mul(%f, %f)
  %loss: f32[] = ReduceSum(%g) {axes=[0], keepdims=0}
  output %loss
}"""
MESH = Mesh.of(dp=2, tp=4)


def step(text: str = FORWARD.replace("RANKS", "2")) -> tuple[rc.Block, str]:
    block, ((_, grad),) = differentiate(rc.verify(rc.parse(text)), "loss")
    return rc.verify(block.with_operators(block.operators, outputs=("loss", grad.name))), grad.name


def bits(block: rc.Block) -> list[dict[str, bytes]]:
    generator = np.random.default_rng(1)
    w = generator.normal(size=4).astype(np.float32)
    feeds = [{"x": generator.normal(size=4).astype(np.float32) * 0.1} for _ in range(MESH.ranks)]
    found = LockStep(block, MESH, {"w": w}).run(feeds)
    return [{n: a.tobytes() for n, a in f.items()} for f in found]


def communications(block: rc.Block) -> list[str]:
    return [f"{o.op.name} {getattr(o.op, 'queue', '')}" for o in block.operators if o.op.communicates]


def test_gradients_are_sent_back() -> None:
    block, _ = step()
    assert verify_ranks([block] * 8, MESH) == 1
    assert communications(block)[4:] == ["AllGather tp.grad", "CommWait ", "AllReduce dp.grad", "CommWait "]


@pytest.mark.parametrize("checkpoints", [("a", "f"), ("f",), ("d", "f"), ("c", "e")])
def test_checkpoints_repeat_no_communication(checkpoints: tuple[str, ...]) -> None:
    block, _ = step()
    after = rc.verify(Recompute(checkpoints).run(block))
    assert communications(after) == communications(block)
    assert bits(after) == bits(block)
    if checkpoints == ("f",):
        repeated = [o.op.name for o in after.operators if o.role is rc.Role.RECOMPUTE]
        assert "Exp" in repeated and "Sin" not in repeated  # its gradient reads the cosine of c, which is kept


def test_planners_may_not_repeat_it() -> None:
    problem = derive(step()[0], lambda op: 1.0).problem
    nodes = {n.name: n.repeatable for n in problem.nodes}
    assert not nodes["s"] and not nodes["t"] and nodes["b"]
    assert not nodes.get("c", False) and not nodes.get("e", False)


def test_orders_keep_communication_in_order() -> None:
    block, _ = step()
    after = rc.verify(Schedule().run(block))
    assert communications(after) == communications(block)
    assert bits(after) == bits(block)


def test_a_planned_program_runs() -> None:
    """With frees and addresses: the buffers of a communication are values in the arena."""
    block, _ = step()
    planned = rc.verify(plan_memory(block, Target(providers=())))
    assert planned.addresses and communications(planned) == communications(TreeSums().run(block))
    assert rc.parse(rc.show(planned)) == planned
    assert bits(planned) == bits(block)
    free = {v.name: i for i, o in enumerate(planned.operators) if o.op.name == "Free" for v in o.reads()}
    wait = next(i for i, o in enumerate(planned.operators) if o.op.name == "CommWait")
    assert free["b"] > wait and free[next(planned.operators[wait].reads()).name] > wait
