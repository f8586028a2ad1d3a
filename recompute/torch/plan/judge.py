"""Memory and time of any partition of a joint graph, PyTorch's own included, by our plans' costs and sizes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ...devices import Device
from ...passes.planners.core.simulate import Outcome, simulate
from .costs import device_kind, machine_of
from .joint import read_joint
from .problem import problem_of

if TYPE_CHECKING:
    from torch.fx import GraphModule


def of_pytorch(
    module: GraphModule, num_fwd_outputs: int, share: float, cost: str | Device | None = None, solver: Any = None,
    unread: int = 0,
) -> Outcome:  # fmt: skip
    """Peak and seconds of PyTorch's own partition of a joint graph at an `activation_memory_budget`.

    `solver`: a name or an object for `activation_memory_budget_solver` (None: as configured).  `unread`: bytes that are
    held and that the graph does not read.
    """
    from torch._functorch import config, partitioners

    joint = copy.deepcopy(module)
    options = {
        "activation_memory_budget": share,
        **({} if solver is None else {"activation_memory_budget_solver": solver}),
    }
    with config.patch(options):
        parts = partitioners.min_cut_rematerialization_partition(joint, (), num_fwd_outputs=num_fwd_outputs)
    return judged(joint, parts, num_fwd_outputs, cost, unread)


def judged(
    module: GraphModule, parts: tuple[GraphModule, GraphModule], num_fwd_outputs: int, cost: str | Device | None = None,
    unread: int = 0,
) -> Outcome:  # fmt: skip
    """Peak and seconds of a partition whose nodes have the names of the joint graph's."""
    joint = read_joint(module, num_fwd_outputs)
    joint.held += unread
    problem = problem_of(joint, machine_of(cost, device_kind(joint.nodes)))
    start = sum(o.forward for o in joint.operations)
    at = {o.node.name: i + (i >= start) for i, o in enumerate(joint.operations)}
    forward, backward = ([at[n.name] for n in part.graph.nodes if n.name in at] for part in parts)
    return simulate(problem, [*forward, start, *backward])
