"""Inductor as the inner compiler: its joint graph is cut by a plan, and its scheduler keeps to the plan's order.

Inductor fuses operators and then orders what is fused by its own measure, which starts recomputed operators early: they
read what is saved and wait for nothing.  Here the scheduler's last pass puts each kernel right before what needs it, in
the order of the plan, and fusion across more than `NEAR` operators of that order is barred.  What is said is the peak
of Inductor's own buffers after fusion; a plan whose kernels need more than the budget is made again within less.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...errors import BudgetError, UsageError
from .joint import Joint, read_joint
from .partition import Figures, Partitioner
from .rewrite import cut

if TYPE_CHECKING:
    from torch.fx import GraphModule

#: kernels further apart than this many operators are not fused
NEAR = 16
#: how often a plan is made again, and which share of the budget is close enough
TRIES, CLOSE = 5, 0.97


class _Stop(Exception):
    """Ends a compilation after scheduling: no code is generated for figures alone."""


@dataclass
class Order:
    """A pass over Inductor's scheduler: kernels in the order of the graph, each as late as what it is for.

    `peaks`: bytes of each graph that was scheduled, of its buffers and of what its inputs are (without parameters,
    buffers and inputs of the step), temporaries of operators of PyTorch's libraries included.  `stop`: at figures.
    `limit`: BudgetError for a graph with more.
    """

    peaks: list[int] = field(default_factory=list)
    stop: bool = False
    limit: int | None = None

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Nodes of the scheduler in another order, with the same dependencies."""
        nodes = _late(nodes)
        self.peaks.append(_peak(nodes))
        if self.stop:
            raise _Stop
        if self.limit is not None and self.peaks[-1] > self.limit:
            raise BudgetError(
                f"torch.compile: Inductor's kernels need {self.peaks[-1]:,} bytes beside parameters and inputs, and "
                f"{self.limit:,} were planned. Use inner='aot_eager'"
            )
        return nodes


def _late(nodes: list[Any]) -> list[Any]:
    """Each node where its last operator is in the graph, or before the first node that needs it."""
    from torch._inductor.virtualized import V

    renamed = V.graph.scheduler.mutation_renames
    writer = {name: n for n in nodes for name in n.get_buffer_names()}
    done: set[int] = set()
    found: list[Any] = []
    for last in sorted(nodes, key=lambda n: n.max_order):
        stack = [last]
        while stack:
            node = stack[-1]
            reads = {writer.get(d.name) or writer.get(renamed.get(d.name, "")) for d in node.unmet_dependencies}
            waits = [n for n in reads if n is not None and n is not node and id(n) not in done]
            if id(node) in done or not waits:
                stack.pop()
                if id(node) not in done:
                    done.add(id(node))
                    found.append(node)
            else:
                stack += sorted(waits, key=lambda n: -n.max_order)
    return found


def _peak(nodes: list[Any]) -> int:
    """Most bytes alive at once, by Inductor's own lifetimes of buffers and saved inputs; temporaries included."""
    from torch._inductor import memory
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    inputs, outputs = OrderedSet(V.graph.graph_inputs), OrderedSet(V.graph.get_output_names())
    scheduler = V.graph.scheduler
    _, saved = memory.prepare_planning_info(nodes, scheduler.name_to_buf, scheduler.name_to_fused_node, inputs, outputs)
    lifetimes, *_ = memory.compute_memory_timeline(nodes, saved, outputs)
    change = [0] * (len(nodes) + 1)
    for b in lifetimes:
        if b.start_step == b.end_step and _is_inside(b.buffer.get_name(), nodes[b.end_step]):
            continue
        change[b.start_step] += b.size_alloc
        if b.end_step >= 0:
            change[b.end_step + 1] -= b.size_free
    live = itertools.accumulate(change)
    return max((bytes_ + _beside(n) for bytes_, n in zip(live, nodes, strict=False)), default=0)


def _is_inside(name: str, node: Any) -> bool:
    """Whether a buffer is only a variable within a kernel that was fused."""
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    if len(node.get_nodes()) < 2:
        return False
    return V.graph.scheduler.can_buffer_be_removed_through_fusion(name, OrderedSet(node.get_operation_names()))


def _beside(node: Any) -> int:
    """Bytes that an operator of a library takes while it runs; 0 of a kernel of Inductor's."""
    import torch

    from .scratch import Call, scratch

    most = 0
    for part in node.get_nodes():
        origin = part.node.get_origin_node() if part.is_extern() and part.node is not None else None
        if origin is not None and isinstance(origin.target, torch._ops.OpOverload):
            most = max(most, *scratch([Call.of(origin)], measure=False))
    return most


@dataclass
class FusedPartitioner(Partitioner):
    """A partition whose peak is that of Inductor's kernels; a share is of their step without recomputation."""

    order: Order = field(default_factory=Order)

    def __call__(
        self, module: GraphModule, inputs: Any = (), *, num_fwd_outputs: int, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        """The forward and the backward graph.  BudgetError where no plan's kernels fit."""
        module.graph.eliminate_dead_code()
        joint = read_joint(module, num_fwd_outputs)
        if joint.symbolic:
            raise UsageError("torch.compile: inner='inductor' needs fixed sizes: torch.compile(..., dynamic=False)")
        found, parts = self.fitting(joint)
        self.figures.append(found)
        self.order.limit = found.peak - joint.held
        return parts

    def fitting(self, joint: Joint) -> tuple[Figures, tuple[GraphModule, GraphModule]]:
        """The plan of least time whose kernels, as Inductor has scheduled them, stay within the budget."""
        plain, parts, most = self._tried(joint, None)
        limit = self.budget.within(most, joint.held)
        wanted, lowest = limit + plain.peak - most, most
        best: tuple[Figures, tuple[GraphModule, GraphModule]] | None = None
        if most <= limit:
            return plain, parts
        within = plain.peak
        for _ in range(TRIES):
            try:
                found, parts, peak = self._tried(joint, wanted)
            except BudgetError:  # too little for operators that are not fused
                wanted = (wanted + within) // 2
                continue
            within, lowest = wanted, min(lowest, peak)
            found = replace(found, budget=limit, plain=replace(plain.outcome, cost=found.plain.cost))
            if peak <= limit and (best is None or found.overhead < best[0].overhead):
                best = found, parts
            if CLOSE * limit <= peak <= limit:
                break
            wanted += round((limit if peak > limit else (1 + CLOSE) / 2 * limit) - peak)
        if best is None:
            raise BudgetError(
                f"torch.compile: no plan was found whose kernels of Inductor stay within {limit:,} bytes: the lowest "
                f"needs {lowest:,}. Give a larger budget, or inner='aot_eager'"
            )
        return best

    def _tried(self, joint: Joint, budget: int | None) -> tuple[Figures, tuple[GraphModule, GraphModule], int]:
        """A plan by operators, both graphs, and the peak of both graphs' kernels."""
        found = self.within(joint, budget)
        parts = cut(joint, found.order)
        beside = {v for n in joint.ends[0] if n is not None for v in joint.values(n) if v >= 0} | set(joint.tangents)
        backward = scheduled(parts[1], True) + sum(joint.sizes[v] for v in beside)
        peak = joint.held + max(scheduled(parts[0], False), backward)
        return replace(found, outcome=replace(found.outcome, peak=peak)), parts, peak


def scheduled(graph: GraphModule, backward: bool) -> int:
    """Bytes of the kernels of one graph: Inductor compiles it up to the order of its kernels."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    order = Order(stop=True)
    inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    with config.patch({"_post_fusion_custom_pass": order}):
        try:
            compile_fx_inner(copy.deepcopy(graph), inputs, is_backward=backward, static_input_idxs=range(len(inputs)))
        except Exception:
            if not order.peaks:
                raise
    return order.peaks[0] if order.peaks else 0


@contextlib.contextmanager
def _near() -> Iterator[None]:
    """Within it, Inductor fuses no kernels that are far apart in the plan's order."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class Near(InductorChoices):
        """Inductor's own heuristics, within a distance."""

        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            """Whether two kernels may become one."""
            apart = max(node1.min_order, node2.min_order) - min(node1.max_order, node2.max_order)
            return apart <= NEAR and InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    with V.set_choices_handler(Near()):
        yield


def inductor(module: GraphModule, inputs: list[Any], partition: FusedPartitioner) -> Callable:
    """The compiled graph: Inductor's own pipeline around the partition, with the order of its kernels given."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Cut(CustomPartitionerFn):
        """What Inductor asks for in the place of its own partition."""

        def __call__(self, gm: GraphModule, joint_inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
            return partition(gm, joint_inputs, **options)

        def uuid(self) -> None:
            """No cache: it would know nothing of plans."""

    def inner(*args: Any, **options: Any) -> Any:
        with _near():
            return compile_fx_inner(*args, **options)

    patches = {
        "custom_partitioner_fn": Cut(),
        "_post_fusion_custom_pass": partition.order,
        "reorder_for_peak_memory": False,
        "fx_graph_cache": False,
    }
    with _near():
        return compile_fx(module, inputs, inner_compile=inner, config_patches=patches)
