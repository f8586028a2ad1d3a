"""Selective checkpoints for eager PyTorch: said and measured peaks and times, on a CPU.

    python benchmarks/torch_policy.py [--only gpt2,bert,vit] [--budgets .8,.6,.45]

Networks are the small ones of `torch_compile_networks.py`.  Peaks are those of PyTorch's profiler; seconds are
processor seconds, the median of seven steps, beside the step without checkpoints in turns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch_compile_networks import build
from torch_memory import held_bytes, peak_bytes

from recompute.errors import BudgetError
from recompute.torch import policy


def main() -> None:
    """Prints one row a network and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="gpt2,bert,vit")
    parser.add_argument("--budgets", default=".8,.6,.45")
    options = parser.parse_args()
    for name in options.only.split(","):
        for budget in options.budgets.split(","):
            row(name, float(budget))


def row(name: str, budget: float) -> None:
    """One network within one share of its plain step."""
    plain, inputs = build(name)
    begun = time.process_time()
    try:
        found = policy(plain, inputs, budget=budget)
    except BudgetError as e:
        print(f"{name:5} {budget:4.0%} {e}", flush=True)
        return
    planning = time.process_time() - begun
    ours = found.apply(copy.deepcopy(plain))
    steps = [step_of(m, inputs) for m in (plain, ours)]
    for step in steps:
        step()
    same = all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    taken: list[list[float]] = [[], []]
    for _ in range(7):
        for step, seconds in zip(steps, taken, strict=True):
            begun = time.process_time()
            step()
            seconds.append(time.process_time() - begun)
    extra = statistics.median(taken[1]) / statistics.median(taken[0]) - 1
    ours.zero_grad()
    measured = held_bytes(ours, inputs) + peak_bytes(steps[1])
    print(
        f"{name:5} {budget:4.0%} said {found.peak:11,} measured {measured:11,} ({measured / found.peak - 1:+.3%}) "
        f"budget {found.budget:11,} least {found.least:11,} extra {found.overhead:6.2%} measured {extra:6.1%} "
        f"same bits {same} checkpointed {len(found.blocks)} of {len(found.regions)}, planned in {planning:.0f} s",
        flush=True,
    )


def step_of(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """A step with the same random numbers each time."""

    def step() -> Any:
        module.zero_grad()
        torch.manual_seed(1)
        loss = module(*inputs)
        loss.backward()
        return loss

    return step


if __name__ == "__main__":
    main()
