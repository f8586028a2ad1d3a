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
from .joint import Joint, is_mutable, read_joint, storages
from .partition import Figures, Partitioner
from .rewrite import cut
from .scratch import Call, scratch

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

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
    `most`: bytes that were said of the forward and of the backward graph; BudgetError for a graph with more.
    """

    peaks: list[int] = field(default_factory=list)
    stop: bool = False
    most: tuple[int, int] | None = None

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Nodes of the scheduler in another order, with the same dependencies."""
        from torch._inductor.virtualized import V

        nodes = _late(nodes)
        self.peaks.append(_peak(nodes))
        if self.stop:
            raise _Stop
        if self.most is not None and self.peaks[-1] > (most := self.most[V.graph.is_backward]):
            raise BudgetError(
                f"torch.compile: Inductor's kernels need {self.peaks[-1]:,} bytes beside parameters and inputs, and "
                f"{most:,} were planned. Use inner='aot_eager'"
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
    together = _together(nodes)
    first = {o: min(b.start_step for b in of) for o, of in _parts(lifetimes).items()}
    for b in lifetimes:
        name, start, end = b.buffer.get_name(), b.start_step, b.end_step
        if _owner(b.buffer) or (start == end and _is_inside(name, nodes[end])):
            continue
        if name in first:  # the code of Inductor keeps names of its parts to its end
            start, end = min(start, first[name]), len(nodes) - 1 if end >= 0 else end
        change[together[start][0]] += b.size_alloc
        if end >= 0:
            change[together[end][1] + 1] -= b.size_free
    live = itertools.accumulate(change)
    return max((bytes_ + _beside(n) for bytes_, n in zip(live, nodes, strict=False)), default=0)


def _together(nodes: list[Any]) -> list[tuple[int, int]]:
    """The first and the last node that each one runs with: Inductor's C++ calls neighbours at once.

    Before the call all that they write is allocated; what they read is freed after it.
    """
    apart = [n.is_extern() or n.is_template() or n.get_device() is None or n.get_device().type != "cpu" for n in nodes]
    runs: list[tuple[int, int]] = []
    for alone, run in itertools.groupby(range(len(nodes)), key=apart.__getitem__):
        steps = list(run)
        runs += [(i, i) for i in steps] if alone else [(steps[0], steps[-1])] * len(steps)
    return runs


def _parts(lifetimes: list[Any]) -> dict[str, list[Any]]:
    """Lifetimes of buffers that lie within a larger one (what is joined is written into the result), by its name."""
    found: dict[str, list[Any]] = {}
    for b in lifetimes:
        if owner := _owner(b.buffer):
            found.setdefault(owner, []).append(b)
    return found


def _owner(buffer: Any) -> str:
    """The name of the buffer that another one lies in; "" of one by itself."""
    from torch._inductor.ir import NonOwningLayout

    layout = getattr(getattr(buffer, "node", None), "layout", None)
    return str(layout.view.get_name()) if isinstance(layout, NonOwningLayout) else ""


def _is_inside(name: str, node: Any) -> bool:
    """Whether a buffer is only a variable within a kernel that was fused."""
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    if len(node.get_nodes()) < 2:
        return False
    return V.graph.scheduler.can_buffer_be_removed_through_fusion(name, OrderedSet(node.get_operation_names()))


def _beside(node: Any) -> int:
    """Bytes that an operator of a library takes while it runs, beside its results that are read; 0 of other kernels."""
    most = 0
    for part in node.get_nodes():
        origin = _origin(part.node) if part.is_extern() else None
        if origin is not None and not is_mutable(origin):
            written = sum(s.nbytes() for s in dict(storages(origin)).values())
            (temporaries,) = scratch([Call.of(origin)], measure=part.node.get_device().type == "cpu")
            counted = sum(b.mpi_buffer.size_alloc for b in part.get_outputs())
            most = max(most, temporaries + max(0, written - counted))
    return most


def _origin(kernel: Any) -> Node | None:
    """The node of the graph that a call of a library's operator stands for."""
    import torch

    found = kernel.get_origin_node()
    if found is None and (called := getattr(kernel, "op_overload", None)) is not None:
        found = next((n for n in kernel.get_origins() if n.target is called), None)
    return found if found is not None and isinstance(found.target, torch._ops.OpOverload) else None


@dataclass(frozen=True)
class Fused:
    """A plan whose figures are those of Inductor's kernels.

    `kernels`: bytes of the forward and of the backward graph, beside parameters and inputs; `operators`: the peak in
    bytes of the same plan with operators one after the other.
    """

    figures: Figures
    parts: tuple[GraphModule, GraphModule]
    kernels: tuple[int, int]
    operators: int

    @property
    def peak(self) -> int:
        """Bytes of parameters, inputs and all that the kernels have alive at once."""
        return self.figures.peak


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
        found = self.fitting(joint)
        self.figures.append(found.figures)
        self.order.most = found.kernels
        return found.parts

    def fitting(self, joint: Joint) -> Fused:
        """The plan of least time whose kernels, as Inductor has scheduled them, stay within the budget."""
        plain = self._tried(joint, None)
        limit = self.budget.within(plain.peak, joint.held)
        wanted, within = limit + plain.operators - plain.peak, plain.operators
        tried = [plain]
        for _ in range(TRIES if plain.peak > limit else 0):
            try:
                found = self._tried(joint, wanted)
            except BudgetError:  # too little for operators that are not fused
                wanted = (wanted + within) // 2
                continue
            tried.append(found)
            if CLOSE * limit <= found.peak <= limit:
                break
            within = min(wanted, found.operators)
            wanted = within + round((limit if found.peak > limit else (1 + CLOSE) / 2 * limit) - found.peak)
        fitting = [f for f in tried if f.peak <= limit]
        if not fitting:
            raise BudgetError(
                f"torch.compile: no plan was found whose kernels of Inductor stay within {limit:,} bytes: the lowest "
                f"needs {min(f.peak for f in tried):,}. Give a larger budget, or inner='aot_eager'"
            )
        best = min(fitting, key=lambda f: f.figures.overhead)
        of_kernels = replace(plain.figures.plain, peak=plain.peak)
        return replace(best, figures=replace(best.figures, budget=limit, plain=of_kernels, bound=None))

    def _tried(self, joint: Joint, budget: int | None) -> Fused:
        """A plan by operators, whose peak is then that of both graphs' kernels."""
        found = self.within(joint, budget)
        parts = cut(joint, found.order)
        beside = {v for n in joint.ends[0] if n is not None for v in joint.values(n) if v >= 0} | set(joint.tangents)
        kernels = scheduled(parts[0], False), scheduled(parts[1], True)
        peak = joint.held + max(kernels[0], kernels[1] + sum(joint.sizes[v] for v in beside))
        return Fused(replace(found, outcome=replace(found.outcome, peak=peak)), parts, kernels, found.peak)


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
        "allow_buffer_reuse": False,
        "fx_graph_cache": False,
    }
    with _near():
        return compile_fx(module, inputs, inner_compile=inner, config_patches=patches)
