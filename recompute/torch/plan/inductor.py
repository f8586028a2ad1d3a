"""Inductor as the inner compiler: its joint graph is cut by a plan, and its scheduler keeps to the plan's order.

Inductor fuses operators and then orders what is fused by its own measure, which starts recomputed operators early: they
read what is saved and wait for nothing.  Here the scheduler's last pass puts each kernel right before what needs it, in
the order of the plan, and fusion across more than `NEAR` operators of that order is barred.  What is said is the peak
of the code that Inductor writes for both graphs; a plan that needs more than the budget is made again within less.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule

from ...errors import BudgetError, UsageError
from .generated import Written, read_code
from .joint import Joint
from .partition import Figures, Partitioner, unread_bytes
from .rewrite import cut

#: kernels further apart than this many operators are not fused
NEAR = 16
#: how often a plan is made again, and which share of the budget is close enough
TRIES, CLOSE = 5, 0.97


class _Stop(Exception):
    """Ends a compilation once its Python code is written: nothing is compiled for figures alone."""


def _late(nodes: list[Any]) -> list[Any]:
    """Each node where its last operator is in the graph, or before the first node that needs it."""
    from torch._inductor.virtualized import V

    renamed = V.graph.scheduler.mutation_renames
    writer = {name: n for n in nodes for name in n.get_buffer_names()}
    done: set[int] = set()
    late: list[Any] = []
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
                    late.append(node)
            else:
                stack += sorted(waits, key=lambda n: -n.max_order)
    return late


@dataclass(frozen=True)
class Fused:
    """A plan whose figures are those of Inductor's kernels.

    `codes`: what Inductor writes for both graphs.  `operators`: the peak in bytes of the same plan with operators one
    after the other.
    """

    figures: Figures
    parts: tuple[GraphModule, GraphModule]
    codes: tuple[Written, Written]
    operators: int

    @property
    def peak(self) -> int:
        """Bytes of parameters, inputs and all that the kernels have alive at once."""
        return self.figures.peak


@dataclass
class FusedPartitioner(Partitioner):
    """A partition whose peak is that of Inductor's kernels; a share is of their step without recomputation.

    `chosen`: the plan of the latest graph; `forward`: the code of its forward pass, once it is compiled.
    """

    chosen: Fused | None = None
    forward: Written | None = None

    def __call__(
        self, module: GraphModule, inputs: Any = (), *, num_fwd_outputs: int, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        """The forward and the backward graph.  BudgetError where no plan's kernels fit."""
        joint = self.read(module, num_fwd_outputs)
        if joint.symbolic:
            raise UsageError("torch.compile: inner='inductor' needs fixed sizes: torch.compile(..., dynamic=False)")
        fused = self.fitting(joint)
        self.figures.append(fused.figures)
        self.chosen = fused
        return fused.parts

    def check(self, code: str) -> None:
        """BudgetError for code of the forward or the backward graph that needs more than was said of it."""
        from torch._inductor.virtualized import V

        if (fused := self.chosen) is None:  # a graph without a backward pass
            return
        if self.forward is None or not V.graph.is_backward:
            needed = self.forward = read_code(code)
        else:  # AOTAutograd has taken tokens of effects out of both graphs
            tokens = len(fused.codes[0].returned) - len(self.forward.returned)
            results = fused.figures.joint.forward_outputs - tokens
            needed = read_code(code, self.forward, results, _sources(*fused.parts))
        said = fused.codes[V.graph.is_backward]
        if needed.most > said.most:
            raise BudgetError(
                f"torch.compile: Inductor's kernels need {needed.most:,} bytes beside parameters and inputs, and "
                f"{said.most:,} were planned. Use inner='aot_eager'"
            )

    def fitting(self, joint: Joint) -> Fused:
        """The plan of least time whose kernels, as Inductor writes them, stay within the budget."""
        plain = self._tried(joint, None)
        limit = self.budget.within(plain.peak, joint.held)
        wanted, within = limit + plain.operators - plain.peak, plain.operators
        tried = [plain]
        for _ in range(TRIES if plain.peak > limit else 0):
            try:
                fused = self._tried(joint, wanted)
            except BudgetError:  # too little for operators that are not fused
                wanted = (wanted + within) // 2
                continue
            tried.append(fused)
            if CLOSE * limit <= fused.peak <= limit:
                break
            within = min(wanted, fused.operators)
            wanted = within + round((limit if fused.peak > limit else (1 + CLOSE) / 2 * limit) - fused.peak)
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
        planned = self.within(joint, budget)
        parts = cut(joint, planned.order)
        inputs, sources = parts[1].graph.find_nodes(op="placeholder"), _sources(*parts)
        others = {v for n in (*joint.ends[0], *joint.ends[1]) if n is not None for v in joint.values(n)}
        others.update((-1, *joint.tangents))
        free = [i for i, n in enumerate(inputs) if others.isdisjoint(joint.values(n))]
        first = written(parts[0], read_code)
        laid = [None if i is None else first.strides[i] for i in sources]
        second = written(parts[1], lambda code: read_code(code, first, joint.forward_outputs, sources), free, laid)
        peak = joint.held + max(first.most, second.most + sum(joint.sizes[v] for v in joint.tangents))
        outcome = replace(planned.outcome, peak=peak)
        return Fused(replace(planned, outcome=outcome), parts, (first, second), planned.peak)


def _sources(forward: GraphModule, backward: GraphModule) -> list[int | None]:
    """Which result of the forward graph each input of the backward graph is (None: a tangent)."""
    (end,) = forward.graph.find_nodes(op="output")
    returned = {n: i for i, n in enumerate(getattr(a, "name", None) for a in end.args[0])}
    return [returned.get(n.name) for n in backward.graph.find_nodes(op="placeholder")]


def written(
    graph: GraphModule, read: Callable[[str], Written], free: list[int] | None = None, laid: Sequence[Any] = ()
) -> Written:
    """The code of one graph, as `read` reads it: Inductor compiles the graph up to this code.

    `free`: of a backward graph, positions of the inputs that it may overwrite (None: a forward graph).  `laid`: strides
    of its inputs, as the forward graph's kernels leave them (None: as they are).
    """
    from torch._functorch import config
    from torch._inductor import graph as lowering
    from torch._inductor.compile_fx import compile_fx_inner

    codes: list[Written] = []

    def stop(code: str) -> None:
        codes.append(read(code))
        raise _Stop

    graph = copy.deepcopy(graph)
    places = graph.graph.find_nodes(op="placeholder")
    for node, strides in zip(places, laid, strict=False):
        value = node.meta["val"]
        if strides is not None and strides != value.stride():
            with value.fake_mode:
                node.meta["val"] = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    inputs = [n.meta["val"] for n in places]
    donated = free if config.donated_buffer else None
    with _reading(stop), mock.patch.object(lowering, "get_donated_idxs", lambda: donated):
        try:
            compile_fx_inner(graph, inputs, is_backward=free is not None, static_input_idxs=range(len(inputs)))
        except Exception:
            if not codes:
                raise
    return codes[0] if codes else _of_no_kernels(graph)


def _of_no_kernels(graph: GraphModule) -> Written:
    """A graph without operators, which Inductor does not compile."""
    (end,) = graph.graph.find_nodes(op="output")
    if any(n.op == "call_function" for n in graph.graph.nodes):
        raise UsageError("torch.compile: Inductor wrote no Python code to read a peak from: use inner='aot_eager'")
    return Written(0, [], [()] * len(end.args[0]), [None] * len(end.args[0]))


def _reading(read: Callable[[str], None]) -> Any:
    """Within it, `read` is given the code of each graph that Inductor has written."""
    from torch._inductor.graph import GraphLowering

    return mock.patch.object(GraphLowering, "save_output_code", staticmethod(read))


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
        """The partition function that Inductor calls instead of its own."""

        def __call__(self, gm: GraphModule, joint_inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
            return partition(gm, joint_inputs, **options)

        def uuid(self) -> None:
            """No cache: it would know nothing of plans."""

    def inner(*args: Any, **options: Any) -> Any:
        with _near(), _reading(partition.check):
            return compile_fx_inner(*args, **options)

    partition.unread = unread_bytes(inputs)
    patches = {
        "custom_partitioner_fn": Cut(),
        "_post_fusion_custom_pass": _late,
        "reorder_for_peak_memory": False,
        "allow_buffer_reuse": False,
        "fx_graph_cache": False,
    }
    with _near():
        return compile_fx(module, inputs, inner_compile=inner, config_patches=patches)
