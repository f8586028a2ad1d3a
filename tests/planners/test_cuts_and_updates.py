"""Updates of running statistics, behind the check of the labels, do not change where planners cut a network."""

from __future__ import annotations

import pytest

import recompute as rc
from recompute import models
from recompute.compiling.compiler import plain_fitting
from recompute.compiling.steps import attach_loss
from recompute.cost import device
from recompute.language.ir import Block, Role
from recompute.passes.planners.core.chain import chain_of
from recompute.passes.planners.core.derive import derive


def step_of(network: str) -> Block:
    """A step of few cells of two kinds; inside them, more than one value crosses everywhere."""
    program = rc.load(models.build(network, batch=2, weights=False, cells=6, width=4, image=8))
    loss, _ = attach_loss(program, None)
    target = rc.Target(providers=(), cost=device("v100-16"))
    return plain_fitting(program, loss, rc.SGD(learning_rate=0.1), target).block


def borders(block: Block) -> tuple[list[str], set[str]]:
    """Nodes after which the forward pass is cut, and values that are kept in any case."""
    p = derive(block, lambda op: 1.0).problem
    chain = chain_of(p)
    return [p.nodes[i].name for i in chain.borders], {p.values[v] for v in chain.always}


@pytest.mark.parametrize("network", ["darts", "amoebanet"])
def test_updates_do_not_change_the_cuts(network: str) -> None:
    block = step_of(network)
    forward = [op for op in block.operators if op.role in (Role.FORWARD, Role.LOSS)]
    check = next(i for i, op in enumerate(forward) if any(op.checks()))
    updates = [i for i, op in enumerate(forward) if op.op.updates]
    assert len(updates) > 50 and min(updates) > check
    without = [op for op in block.operators if op.role is not Role.FORWARD or not op.op.updates]
    found = borders(block)
    assert len(found[0]) > 6
    assert found == borders(block.with_operators(without))
