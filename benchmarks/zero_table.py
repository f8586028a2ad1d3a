"""BERT-large with ZeRO on 2 to 16 ranks beside Paddle's published table of sharding: compiled for CUDA, not run.

    python benchmarks/zero_table.py [--batch 8] [--ranks 2,4,8,16]

Paddle's table (Fleet's documentation of sharding, V100 with 32 GB, BERT-large, amp and recompute; MB a GPU): 8667
without sharding, and 5615, 4841, 4127, 3700 on 2, 4, 8, 16 GPUs.  We do not know the batch a GPU and the length of the
sequence behind it, which checkpoints were used, and whether it counts what was allocated or what was reserved; so
compare what sharding saves, which depends on them little.  Here: sequence 512, `--batch` samples a rank, dropout, fp16
with float32 weights and Adam, and the 48 residual sums as checkpoints.  MB are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import platform
import time

import recompute as rc
from recompute.analysis.ranks import among_ranks
from recompute.compiling.compiler import CompiledStep
from recompute.compiling.steps import Steps
from recompute.cost import device
from recompute.ops.communication.shard import padded_size

#: GPUs → MB
PADDLE = {1: 8667, 2: 5615, 4: 4841, 8: 4127, 16: 3700}


def compiled(ranks: int, zero: int, batch: int) -> tuple[CompiledStep, list[int]]:
    """The step of rank 0, and the sizes of all parameters."""
    steps = Steps(
        "bert-large", options={"seq": 512}, checkpoints=["layer.*.residual"],
        optimizer=among_ranks(rc.optimizers.Adam(), f"dp={ranks}", zero),
        target=rc.Target(place=rc.CUDAPlace(), precision="fp16", cost=device("v100-32")),
    )  # fmt: skip
    step = steps.compile(batch * ranks, steps.asked)
    return step, [v.size for v in steps.program(batch * ranks)[0].block.parameters]


def expected(sizes: list[int], ranks: int) -> int:
    """Bytes of float32 weights and two moments, divided among ranks."""
    return sum(12 * padded_size(n, ranks) // ranks for n in sizes)


def show(ranks: int, zero: int, batch: int, plain: int) -> int:
    """Prints a row; returns its peak."""
    start = time.perf_counter()
    step, sizes = compiled(ranks, zero, batch)
    block, peak = step.program.block, step.figures.peak_bytes
    divided = sum(v.nbytes for v in (*block.parameters, *block.state))
    formula = expected(sizes, ranks if zero else 1)
    rest = divided - formula  # step, learning rate, loss scaling
    theirs = PADDLE.get(ranks) if zero or ranks == 1 else None
    took = f"{time.perf_counter() - start:5.1f} s"
    saved = f"{PADDLE[1] - theirs:6,}" if theirs and ranks > 1 else f"{'':6}"
    ours = f"{(plain - peak) / 1e6:6,.0f}" if plain else f"{'':6}"
    print(
        f"{ranks:5} {zero:5} {theirs or '':>8} {saved} {peak / 1e6:9,.0f} {ours} "
        f"{divided:15,} = {formula:13,} + {rest:2} {step.figures.arena_bytes / 1e6:9,.0f}   {took}",
        flush=True,
    )
    return peak


def main() -> None:
    """Prints the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--batch", type=int, default=8, help="samples a rank (default: 8)")
    p.add_argument("--ranks", default="2,4,8,16", help="numbers of ranks (default: 2,4,8,16)")
    args = p.parse_args()
    print(f"# {time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, batch {args.batch} a rank, sequence 512")
    print("                Paddle              ours        weights and moments              values of")
    print("ranks  zero     MB   saved       MB  saved           bytes   12 Psi/N + scalars   the step MB")
    plain = show(1, 0, args.batch, 0)
    ranks = [int(n) for n in args.ranks.split(",")]
    show(max(ranks), 0, args.batch, plain)
    for n in ranks:
        for zero in (1, 2, 3):
            show(n, zero, args.batch, plain)


if __name__ == "__main__":
    main()
