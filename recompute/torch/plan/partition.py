"""The partition of AOTAutograd's joint graph by a plan within a budget of the whole forward and backward pass."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from ...budgets import Budget, as_budget
from ...devices import Device
from ...errors import BudgetError
from ...passes.planners import plan
from ...passes.planners.core.bound import bound_of, least_budget
from ...passes.planners.core.problem import RematerialisationProblem
from ...passes.planners.core.simulate import Outcome, sequence_of, simulate
from ...passes.planners.core.watch import WORK, Watch, watching
from .costs import device_kind, machine_of
from .eager_step import storages_of
from .joint import Joint, read_joint
from .problem import problem_of
from .random import open_masks
from .rewrite import cut

#: a plan of a graph of the same structure is taken where its peak is above this share of the budget
_CLOSE = 0.97


@dataclass(frozen=True)
class Figures:
    """Figures of one graph: bytes of its budget, of its peak and of the plain step's, seconds by the cost model.

    `bound`: seconds that no plan within the budget can do without (None: the plan is that of an earlier graph).
    `order`: the operations in order of execution (-1: the backward pass begins).
    """

    problem: RematerialisationProblem
    joint: Joint
    order: tuple[int, ...]
    budget: int
    outcome: Outcome
    plain: Outcome
    bound: float | None

    @property
    def peak(self) -> int:
        """Bytes of parameters, inputs and all that is alive at once, at most."""
        return self.outcome.peak

    @property
    def least(self) -> int:
        """A number of bytes below which no plan exists."""
        return least_budget(self.problem)

    @property
    def overhead(self) -> float:
        """Seconds of what runs again, as a share of the plain step's."""
        return self.outcome.cost / self.plain.cost - 1 if self.plain.cost else 0.0

    @property
    def gap(self) -> float:
        """How far the step's seconds can be above the least that are possible, as a share of these."""
        return max(0.0, self.outcome.cost / self.bound - 1) if self.bound else 0.0


@dataclass
class Partitioner:
    """A `partition_fn` for AOTAutograd: cuts a joint graph in two so that both together keep a budget.

    `budget`: of parameters, buffers, inputs and everything that is alive during forward and backward pass, as bytes or
    a share of the step without recomputation.  `cost`: the device whose rates price operators.  `effort`: of planning,
    1 by default.  `measure`: operators run once for their temporaries, on a CPU.  `figures`: of each graph.
    `plans`: orders of execution that are known, by the structure of their problem.  `unread`: bytes that the compiled
    module holds and its graph does not read.
    """

    budget: Budget
    cost: str | Device | None = None
    effort: float = 1.0
    measure: bool = True
    figures: list[Figures] = field(default_factory=list)
    plans: dict[str, list[list[int]]] = field(default_factory=dict)
    unread: int = 0
    _latest: tuple[Joint, RematerialisationProblem] | None = None

    def __call__(
        self, module: GraphModule, inputs: Any = (), *, num_fwd_outputs: int, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        """The forward and the backward graph.  BudgetError where no plan fits, with the least that one needs."""
        open_masks(module)
        result = self.planned(joint := self.read(module, num_fwd_outputs))
        self.figures.append(result)
        return cut(joint, result.order)

    def read(self, module: GraphModule, forward_outputs: int) -> Joint:
        """The joint graph taken apart, without what nothing reads."""
        module.graph.eliminate_dead_code()
        joint = read_joint(module, forward_outputs)
        joint.held += self.unread
        return joint

    def planned(self, joint: Joint) -> Figures:
        """The plan of a joint graph whose operators run one after the other."""
        plain = self.within(joint, None)
        budget = self.budget.within(plain.peak, joint.held)
        return plain if plain.peak <= budget else self.within(joint, budget)

    def within(self, joint: Joint, budget: int | None) -> Figures:
        """A plan within a budget (None: the step without recomputation), a known one of this structure if it fits.

        BudgetError where none fits.
        """
        problem = self._problem(joint)
        plain = simulate(problem, range(len(problem)))
        plans = self.plans.setdefault(_structure(problem), [])
        sequence, bound = list(range(len(problem))), None
        if budget is not None:
            fitting = [s for s in plans if budget * _CLOSE <= simulate(problem, s).peak <= budget]
            if fitting:
                sequence = min(fitting, key=lambda s: simulate(problem, s).cost)
            else:
                sequence, bound = planned_within(problem, budget, self.effort)
                plans.append(sequence)
        start = sum(o.forward for o in joint.operations)
        order = tuple(i if i < start else -1 if i == start else i - 1 for i in sequence)
        outcome = simulate(problem, sequence)
        return Figures(problem, joint, order, plain.peak if budget is None else budget, outcome, plain, bound)

    def _problem(self, joint: Joint) -> RematerialisationProblem:
        if self._latest is None or self._latest[0] is not joint:
            kind = device_kind(joint.nodes)
            measure = self.measure and kind == "cpu"
            self._latest = joint, problem_of(joint, machine_of(self.cost, kind), measure=measure)
        return self._latest[1]


def planned_within(problem: RematerialisationProblem, budget: int, effort: float = 1.0) -> tuple[list[int], float]:
    """An order of execution within a budget, and the bound of its cost.  BudgetError with the least that is known."""
    with watching(Watch(effort=effort, work=WORK)):
        result = plan(problem, budget=budget)
    if not result.fits:
        raise BudgetError(
            f"{problem.name}: no plan was found within {budget:,} bytes: the lowest one found needs "
            f"{result.outcome.peak:,} (at least {least_budget(problem):,} are needed). Give a larger budget"
        )
    return sequence_of(problem, result.plan), bound_of(problem, budget)


def _structure(problem: RematerialisationProblem) -> str:
    """A digest of what does not change with sizes."""
    text = repr([(n.name, n.reads, n.writes, n.backward, n.repeatable) for n in problem.nodes])
    return hashlib.sha256(text.encode()).hexdigest()


def budget_of(amount: Any) -> Budget:
    """A budget; a number from 0 to 1 is a share of the step without recomputation."""
    if isinstance(amount, float) and 0 < amount <= 1:
        amount = f"{100 * amount:.12g}%"
    return as_budget(amount)


@contextlib.contextmanager
def only(partition: Partitioner) -> Iterator[Partitioner]:
    """Within it, PyTorch's own caches of compiled graphs are off: they know nothing of plans."""
    from torch._functorch import config

    with config.patch(enable_autograd_cache=False):
        yield partition


def unread_bytes(inputs: list[Any]) -> int:
    """Bytes of the modules and arguments that Dynamo is compiling and that are no `inputs` of its graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        compiling = InstructionTranslator.current_tx()
    except AttributeError:  # a graph that did not come from Dynamo
        return 0
    met = [getattr(v, "value", None) for v in compiling.output.side_effects.id_to_variable.values()]
    modules = [m for m in met if isinstance(m, torch.nn.Module)]
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    held = {s._cdata: s.nbytes() for s in storages_of([tensors, compiling.f_locals])}
    return sum(held[key] for key in held.keys() - {s._cdata for s in storages_of(inputs)})
