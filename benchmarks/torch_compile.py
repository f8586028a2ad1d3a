"""Plans inside of torch.compile beside PyTorch's own memory budget, on a CPU.

    python benchmarks/torch_compile.py [--only gpt2,bert] [--budgets 1,.7] [--shares 1,.5,.1] [--skip-run]
    [--skip-compare] [--inner inductor]

First table: the peak that is said and the one that PyTorch's profiler measures, with operators one after the other
(`inner="aot_eager"`), for shares of the plain step, and whether the gradients have the bits of the first row's.  Second
table: PyTorch's partitions at its shares; the seconds of ours at the same peak, and its least peak at the same seconds,
both by one cost model (this CPU's roofline) and one simulation, which the first table tests.
"""

from __future__ import annotations

import argparse
import time

import torch
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
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SMALL))
    parser.add_argument("--budgets", default="1,.7")
    parser.add_argument("--shares", default="1,.5,.1")
    parser.add_argument("--skip-run", action="store_true")
    parser.add_argument("--skip-compare", action="store_true")
    parser.add_argument("--inner", default="aot_eager", choices=["aot_eager", "inductor"])
    options = parser.parse_args()
    for name in options.only.split(","):
        if not options.skip_run:
            said_and_measured(name, [float(b) for b in options.budgets.split(",")], options.inner)
        if not options.skip_compare:
            beside_pytorch(name, [float(s) for s in options.shares.split(",")])


def said_and_measured(name: str, budgets: list[float], inner: str = "aot_eager") -> None:
    """One row a budget."""
    kind, compiler = (FusedPartitioner, inductor) if inner == "inductor" else (Keeping, eager)
    module, inputs = build(name)
    first = None
    for budget in budgets:
        torch._dynamo.reset()
        partition = kind(budget_of(budget))
        call = torch.compile(module, backend=lambda m, i, p=partition: compiler(m, i, p))

        def step(call=call):
            module.zero_grad()
            torch.manual_seed(1)
            loss = call(*inputs)
            loss.backward()
            return loss

        try:
            step()
        except torch._dynamo.exc.BackendCompilerFailed as e:
            print(f"{name:9} {budget:5.0%} {e.inner_exception}")
            continue
        gradients = [p.grad.clone() for p in module.parameters()]
        first = first or gradients
        same = all(torch.equal(a, b) for a, b in zip(first, gradients, strict=True))
        del gradients
        module.zero_grad()
        measured = held_bytes(module, inputs) + peak_bytes(step)
        (f,) = partition.figures
        print(
            f"{name:9} {budget:5.0%} said {f.peak:12,} measured {measured:12,} ({measured / f.peak - 1:+.2%}) budget "
            f"{f.budget:12,} extra {f.overhead:6.2%} gap {f.gap:5.2%} same bits {same}",
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
        theirs = of_pytorch(*partition.original, share)
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
