"""The planning problem of a joint graph."""

from __future__ import annotations

from ...devices import Device
from ...passes.planners.core.problem import Node, RematerialisationProblem
from .costs import seconds
from .joint import Joint
from .random import DRAWN
from .scratch import Call, scratch


def problem_of(joint: Joint, machine: Device, measure: bool = False) -> RematerialisationProblem:
    """Operations as nodes, storages as values; parameters, buffers and inputs are `fixed`.

    The gradients that come with the backward pass are there from its start to its end.  `measure`: operators run once
    for the bytes of their temporaries, which count as 0 without.
    """
    nodes: list[Node] = []
    of_masks = {o.node.meta[DRAWN]: seconds(o.node, machine) for o in joint.operations if DRAWN in o.node.meta}
    beside = scratch([Call.of(o.node) for o in joint.operations], measure)
    for o, temporary in zip(joint.operations, beside, strict=True):
        nodes.append(
            Node(
                name=o.node.name,
                cost=max(0.0, seconds(o.node, machine) - of_masks.get(o.node, 0.0)),
                reads=o.reads,
                writes=o.writes,
                scratch=temporary,
                backward=not o.forward,
                repeatable=o.forward and not o.why,
            )
        )
    start = sum(o.forward for o in joint.operations)
    nodes.insert(start, Node("tangents", 0.0, (), joint.tangents, backward=True, repeatable=False))
    return RematerialisationProblem(
        nodes=tuple(nodes),
        sizes=tuple(joint.sizes),
        values=tuple(joint.names),
        outputs=tuple(dict.fromkeys((*joint.outputs, *joint.tangents))),
        fixed=joint.held,
        name="torch.compile",
    )
