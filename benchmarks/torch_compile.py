"""Plans inside of torch.compile beside PyTorch's own memory budget, on a CPU.

    python benchmarks/torch_compile.py [--only gpt2,bert] [--budgets 1,.7] [--shares 1,.5,.1] [--skip-run]
    [--skip-compare] [--inner inductor] [--ladder] [--times 7] [--dropout 0]

First table: the peak that is said and the one that PyTorch's profiler measures, with operators one after the other
(`inner="aot_eager"`), for shares of the plain step, and whether the gradients have the bits of the first row's; with
`--inner inductor`, of Inductor's kernels, and whether the bits are those of `torch.compile(model)` too.  Second table:
PyTorch's partitions at its shares; the seconds of ours at the same peak, and its least peak at the same seconds, both
by one cost model (this CPU's roofline) and one simulation, which the first table tests.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch._functorch import config
from torch_compile_networks import SMALL, build
from torch_memory import held_bytes, peak_bytes

from recompute.errors import BudgetError
from recompute.passes.planners.core.simulate import simulate
from recompute.passes.planners.methods.auto import quick_frontier_of
from recompute.torch.plan.backend import eager
from recompute.torch.plan.explain import Keeping
from recompute.torch.plan.inductor import FusedPartitioner, inductor
from recompute.torch.plan.judge import of_pytorch
from recompute.torch.plan.partition import budget_of, planned_within


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SMALL))
    parser.add_argument("--budgets", default="1,.7")
    parser.add_argument("--ladder", action="store_true", help="100, 95, ... 5 %% as far as plans are found")
    parser.add_argument("--shares", default="1,.5,.1")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--times", type=int, default=0, help="steps of each that are timed, instead of tables")
    parser.add_argument("--skip-run", action="store_true")
    parser.add_argument("--skip-compare", action="store_true")
    parser.add_argument("--inner", default="aot_eager", choices=["aot_eager", "inductor"])
    options = parser.parse_args()
    budgets = [b / 100 for b in range(100, 0, -5)] if options.ladder else [float(b) for b in options.budgets.split(",")]
    for name in options.only.split(","):
        if options.times:
            timed(name, options.times, options.dropout)
            continue
        if not options.skip_run:
            rows = said_and_measured(name, budgets, options.inner, options.dropout)
            if options.ladder:
                print(f"{name:9} {verdict(rows)}", flush=True)
        if not options.skip_compare and not options.ladder:
            beside_pytorch(name, [float(s) for s in options.shares.split(",")])


def verdict(rows: list[tuple[int, int, int]]) -> str:
    """What holds of (budget, said, measured) of falling budgets, in bytes."""
    peaks = [measured for _, _, measured in rows]
    off = max(abs(measured / said - 1) for _, said, measured in rows)
    above = sum(measured > budget for budget, _, measured in rows)
    rises = sum(b > a for a, b in itertools.pairwise(peaks))
    return f"{len(rows)} plans: said and measured differ by {off:.3%} at most, {above} above the budget, {rises} rises"


def said_and_measured(name: str, budgets: list[float], inner: str, dropout: float) -> list[tuple[int, int, int]]:
    """One row a budget; returns (budget, said, measured) in bytes of those that have a plan."""
    kind, compiler = (FusedPartitioner, inductor) if inner == "inductor" else (Keeping, eager)
    module, inputs = build(name, dropout=dropout)
    reference, rows = gradients_of(module, module, inputs), []
    theirs = gradients_of(torch.compile(module), module, inputs) if inner == "inductor" else None
    first = None
    for budget in budgets:
        torch._dynamo.reset()
        partition = kind(budget_of(budget))
        call = torch.compile(module, backend=lambda m, i, p=partition: compiler(m, i, p))
        try:
            gradients = gradients_of(call, module, inputs)
        except torch._dynamo.exc.BackendCompilerFailed as e:
            print(f"{name:9} {budget:5.0%} {e.inner_exception}", flush=True)
            break  # less is not tried
        first = first or gradients
        same = str(equal(first, gradients))
        if theirs is not None:
            same += f", torch.compile's {equal(theirs, gradients)}"
        flat = [torch.cat([g.flatten() for g in of]).double() for of in (reference, gradients)]
        off = float((flat[1] - flat[0]).norm() / flat[0].norm())
        del gradients, flat
        module.zero_grad()
        measured = held_bytes(module, inputs) + peak_bytes(lambda call=call: step(call, module, inputs))
        (f,) = partition.figures
        rows.append((f.budget, f.peak, measured))
        print(
            f"{name:9} {budget:5.0%} said {f.peak:12,} measured {measured:12,} ({measured / f.peak - 1:+.2%}) budget "
            f"{f.budget:12,} extra {f.overhead:6.2%} gap {f.gap:5.2%} same bits {same}, eager's within {off:.1e}",
            flush=True,
        )
    return rows


def step(call: Callable, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A forward and a backward pass from no gradients, with the same random numbers each time; returns the loss."""
    module.zero_grad()
    torch.manual_seed(1)
    loss = call(*inputs)
    loss.backward()
    return loss


def gradients_of(call: Callable, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Copies of the gradients of one step; buffers are as before it."""
    before = [b.clone() for b in module.buffers()]
    step(call, module, inputs)
    for b, old in zip(module.buffers(), before, strict=True):
        b.copy_(old)
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether all have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def timed(name: str, steps: int, dropout: float, share: float = 0.5) -> None:
    """Processor seconds of a step without recomputation, of PyTorch's at its share, and of ours at its measured peak.

    The three take turns; medians.
    """
    module, inputs = build(name, dropout=dropout)
    calls, peaks = {}, {}
    torch._dynamo.reset()
    for who in ("plain", "PyTorch", "ours"):
        partition = Keeping(budget_of(peaks["PyTorch"] if who == "ours" else 1.0))
        backend = "aot_eager" if who == "PyTorch" else lambda m, i, p=partition: eager(m, i, p)
        calls[who] = torch.compile(module, backend=backend)
        with config.patch(activation_memory_budget=share, enable_autograd_cache=False):
            step(calls[who], module, inputs)  # compiles
        module.zero_grad()
        peaks[who] = held_bytes(module, inputs) + peak_bytes(lambda who=who: step(calls[who], module, inputs))
    seconds = {who: [] for who in calls}
    for _ in range(steps):
        for who, call in calls.items():
            begun = time.process_time()
            step(call, module, inputs)
            seconds[who].append(time.process_time() - begun)
    plain, theirs, ours = (statistics.median(seconds[who]) for who in calls)
    print(
        f"{name:9} peaks: plain {peaks['plain']:12,} PyTorch {share} {peaks['PyTorch']:12,} ours {peaks['ours']:12,}; "
        f"plain {plain:.3f} s, PyTorch {theirs / plain - 1:+.1%}, ours {ours / plain - 1:+.1%}; ours / PyTorch's step "
        f"{ours / theirs:.3f}, of its extra time {(ours - plain) / (theirs - plain):.2f}",
        flush=True,
    )


def beside_pytorch(name: str, shares: list[float]) -> None:
    """One row a share of PyTorch's."""
    module, inputs = build(name)
    torch._dynamo.reset()
    partition = Keeping(budget_of(1.0))
    torch.compile(module, backend=lambda m, i: eager(m, i, partition))(*inputs)
    problem, plain = partition.figures[0].problem, partition.figures[0].plain
    for share in shares:
        theirs = of_pytorch(*partition.original, share, unread=partition.unread)
        begun = time.process_time()
        try:
            ours = simulate(problem, planned_within(problem, theirs.peak)[0])
        except BudgetError as e:
            print(f"{name:9} PyTorch {share:4} peak {theirs.peak:12,}: {e}")
            continue
        least = min(p.peak for p in quick_frontier_of(problem) if p.cost <= theirs.cost)
        print(
            f"{name:9} PyTorch {share:4} peak {theirs.peak:12,} extra {theirs.cost / plain.cost - 1:6.2%}; ours there "
            f"{ours.cost / plain.cost - 1:6.2%}; at the same time {least / theirs.peak:.2f} x its peak "
            f"({time.process_time() - begun:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
