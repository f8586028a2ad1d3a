"""Plans of networks of full size, made on tensors without contents: seconds of planning, peaks, extra time, bounds.

    python benchmarks/torch_plans.py [--only gpt2,bert,vit,resnet50,unet,llama] [--share .6]

The budget is `share` of the way from the bytes that every plan holds (parameters, inputs, gradients) to the plain
step's peak.  Operators are priced as on one H200; their temporaries, which are measured by running them on a CPU, count
as nothing here.  Seconds are processor seconds: PyTorch's until the joint graph is there, then ours.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_compile_networks import build, llama_8b

from recompute.errors import BudgetError
from recompute.torch.plan.backend import eager
from recompute.torch.plan.partition import Figures, Partitioner, budget_of

NETWORKS = ("gpt2", "bert", "vit", "resnet50", "unet", "llama")


class Timed(Partitioner):
    """Notes when the joint graph is there, and seconds since."""

    begun = spent = 0.0
    nodes = 0

    def __call__(self, module: Any, inputs: Any = (), **options: Any) -> Any:
        self.begun, self.nodes = time.process_time(), len(module.graph.nodes)
        try:
            return super().__call__(module, inputs, **options)
        finally:
            self.spent = time.process_time() - self.begun

    def planned(self, joint: Any) -> Figures:
        """The plan within a share of what is beyond what every plan holds."""
        plain = self.within(joint, None)
        held = joint.held + sum(plain.problem.sizes[v] for v in plain.problem.outputs)
        assert self.budget.share is not None
        return self.within(joint, held + int((plain.peak - held) * self.budget.share))


def main() -> None:
    """Prints one row a network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NETWORKS))
    parser.add_argument("--share", type=float, default=0.6)
    options = parser.parse_args()
    for name in options.only.split(","):
        row(name, options.share)


def row(name: str, share: float) -> None:
    """One network, its parameters and inputs without contents."""
    no_draws = mock.patch.object(torch.nn.init, "trunc_normal_", lambda t, *_, **__: t)  # draws until all are in range
    with FakeTensorMode(), no_draws:
        module, inputs = llama_8b() if name == "llama" else build(name, full=True)
        partition = Timed(budget_of(share), "h200", measure=False)
        torch._dynamo.reset()
        begun = time.process_time()
        call = torch.compile(module, backend=lambda m, i: eager(m, i, partition), dynamic=False, fullgraph=True)
        try:
            call(*inputs)
        except torch._dynamo.exc.BackendCompilerFailed as e:
            if not isinstance(e.inner_exception, BudgetError):
                raise
            print(f"{name:9} {e.inner_exception}", flush=True)
            return
    (f,) = partition.figures
    print(
        f"{name:9} {partition.nodes:6,} nodes {len(f.problem):6,} operators, PyTorch {partition.begun - begun:5.1f} s, "
        f"ours {partition.spent:5.1f} s; plain {f.plain.peak:15,} budget {f.budget:15,} peak {f.peak:15,} "
        f"extra {f.overhead:6.2%} no plan below {(f.bound or 0) / f.plain.cost - 1:6.2%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
