"""A solver for PyTorch's own memory budget: which candidates to save, by the cost of all that their lack runs again.

PyTorch's solvers take the time to recompute a value as its own operator's, whatever that reads; this one counts what
has to run before it, too, as the model of Checkmate (Jain et al. 2020, arXiv 1910.02653) without memory over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import load_extra
from .costs import device_kind, machine_of, seconds

if TYPE_CHECKING:
    from torch.fx import Graph, Node

#: CP-SAT's deterministic seconds, at most
_EFFORT = 5.0


def solver(cost: str | None = None) -> Any:
    """An object for `torch._functorch.config.activation_memory_budget_solver`.

    `cost`: the device whose rates price operators (default: what the tensors lie on).  It keeps PyTorch's protocol, so
    that the budget stays PyTorch's share of saved bytes, no peak.  MissingExtraError without `onnx-recompute[plan]`.
    """
    from torch._inductor.custom_graph_pass import CustomKnapsackSolver

    class Solver(CustomKnapsackSolver):
        """Saved and recomputed candidates, by their numbers."""

        def __call__(
            self, memory: list[float], joint_graph: Graph, max_memory: float, node_info: Any, candidates: list[Node]
        ) -> tuple[list[int], list[int]]:
            saved = saved_within(memory, joint_graph, max_memory, node_info, candidates, cost)
            return sorted(saved), sorted(set(range(len(candidates))) - saved)

        def uuid(self) -> str:
            return f"recompute-solver-1-{cost}"

    return Solver()


def saved_within(
    memory: Sequence[float], graph: Graph, limit: float, info: Any, candidates: Sequence[Node], cost: str | None
) -> set[int]:
    """Numbers of the candidates to save: their `memory` is at most `limit`, and the least seconds run again."""
    cp_model = load_extra("ortools.sat.python.cp_model", "plan", "the solver")
    machine = machine_of(cost, device_kind(list(graph.nodes)))
    model = cp_model.CpModel()
    again = {n: model.new_bool_var(n.name) for n in graph.nodes if info.is_required_fw(n) and n.op == "call_function"}
    saved = {n: model.new_bool_var(f"save {n.name}") for n in candidates}
    for node, runs in again.items():
        for read in node.all_input_nodes:
            if read in again:
                model.add_bool_or([runs.negated(), again[read], *([saved[read]] if read in saved else [])])
        if node in saved and any(not info.is_required_fw(u) for u in node.users):
            model.add_bool_or([runs, saved[node]])
    scale = 1_000_000
    weights = [round(scale * m) for m in memory]
    model.add(sum(w * saved[n] for w, n in zip(weights, candidates, strict=True)) <= int(scale * limit))
    model.minimize(sum(round(1e9 * seconds(n, machine)) * runs for n, runs in again.items()))
    search = cp_model.CpSolver()
    search.parameters.num_workers = 1
    search.parameters.max_deterministic_time = _EFFORT
    if search.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return set()
    return {i for i, n in enumerate(candidates) if search.boolean_value(saved[n])}
