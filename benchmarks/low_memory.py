"""Bytes a parameter, and losses, of precisions and moments in fewer bits.

    python benchmarks/low_memory.py [--steps 300] > benchmarks/results/low_memory.txt

Bytes: the predicted peak of a step (which is what the executor allocates) of a LLaMA-like network of 36 million
parameters, 128 tokens, and of one of 518 million, 1,024 tokens, with its layers as checkpoints; batch 1, compiled for a
CUDA device and for this CPU, divided by the parameters.
`--largest SIZE`: instead, the largest network of layers of width 3,072 (batch 1, 1,024 tokens, its layers as
checkpoints, a CUDA device) whose step takes no more than SIZE.
Losses: a LLaMA-like network of 845 thousand parameters learns the bytes of this project's docs/, by AdamW.
"""

from __future__ import annotations

import argparse
import functools
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import recompute as rc
from recompute.budgets import as_bytes

#: what is compared: a name, the precision, options of AdamW
KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("fp32", "fp32", {}),
    ("fp32, 8-bit moments", "fp32", {"moments": "8-bit"}),
    ("bf16", "bf16", {}),
    ("bf16, 8-bit moments", "bf16", {"moments": "8-bit"}),
    ("bf16-pure", "bf16-pure", {}),
    ("bf16-pure, 8-bit moments", "bf16-pure", {"moments": "8-bit"}),
)
NETWORKS = {
    "36 million": {"layers": 8, "hidden": 512, "inner": 1536, "heads": 8, "groups": 8, "vocab": 8192, "seq": 128},
    "518 million": {
        "layers": 24,
        "hidden": 1280,
        "inner": 3456,
        "heads": 20,
        "groups": 20,
        "vocab": 16384,
        "seq": 1024,
    },
}
WIDE = {"hidden": 3072, "inner": 8192, "heads": 24, "groups": 24, "vocab": 32000}
LEARNER = {"layers": 4, "hidden": 128, "inner": 352, "heads": 4, "groups": 4, "vocab": 256, "seq": 128}
BATCH, TOLD = 8, (1, 50, 100, 200, 300)


def bytes_table() -> Iterator[str]:
    """A line for each network, place and kind."""
    for name, options in NETWORKS.items():
        program = rc.load(rc.models.build("llama-tiny", batch=1, weights=False, **options))
        loss = rc.losses.cross_entropy(program["logits"]).name
        kept = "layers.*.out" if options["seq"] == 1024 else None
        count = sum(p.value.size for p in program.parameters)
        for place in ("cuda:0", "cpu"):
            for kind, precision, more in KINDS:
                optimizer = rc.AdamW(1e-3, **more)
                step = rc.compile_step(program, loss, optimizer, checkpoints=kept, place=place, precision=precision)
                figures = step.figures
                state, peak = figures.persistent_bytes / count, figures.peak_bytes / count
                yield f"{name:12} {count:>12,} {place:7} {kind:26} {state:10.2f} {peak:10.2f}"


def largest_table(budget: int) -> Iterator[str]:
    """A line for each kind: the layers that fit, the parameters, the peak."""
    for kind, precision, more in KINDS:
        layers, found = 0, (0, 0)
        for step in (16, 4, 1):
            while (now := sizes(layers + step, precision, more))[1] <= budget:
                layers, found = layers + step, now
        count, peak = found
        yield f"{kind:26} {layers:>6} {count:>14,} {peak / 2**30:9.2f} {peak / count:10.2f}"


def sizes(layers: int, precision: str, more: dict[str, Any]) -> tuple[int, int]:
    """Parameters and peak of a network of so many layers."""
    program = rc.load(rc.models.build("llama-tiny", batch=1, weights=False, layers=layers, seq=1024, **WIDE))
    loss, optimizer = rc.losses.cross_entropy(program["logits"]).name, rc.AdamW(1e-3, **more)
    step = rc.compile_step(program, loss, optimizer, checkpoints="layers.*.out", place="cuda:0", precision=precision)
    return sum(p.value.size for p in program.parameters), step.figures.peak_bytes


@functools.cache
def text() -> np.ndarray:
    """The bytes of this project's pages."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    return np.frombuffer(b"\n".join(p.read_bytes() for p in pages), np.uint8).astype(np.int64)


def losses(precision: str, more: dict[str, Any], steps: int) -> list[float]:
    """The loss of each step."""
    program = rc.load(rc.models.build("llama-tiny", batch=BATCH, **LEARNER))
    loss = rc.losses.cross_entropy(program["logits"]).name
    step = rc.compile_step(program, loss, rc.AdamW(1e-3, **more), precision=precision)
    executor, data, draw = rc.Executor(), text(), np.random.default_rng(0)
    found = []
    for _ in range(steps):
        rows = data[draw.integers(0, len(data) - 129, BATCH)[:, None] + np.arange(129)]
        feed = {"input_ids": rows[:, :-1], "label": rows[:, 1:]}
        found.append(float(executor.run(step.program, feed, [loss])[0]))
    return found


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps of the losses")
    parser.add_argument("--largest", metavar="SIZE", help="the largest network that fits (22GiB), and nothing else")
    args = parser.parse_args()
    if args.largest:
        print(f"python benchmarks/low_memory.py --largest {args.largest}\n")
        print(f"{'':26} {'layers':>6} {'parameters':>14} {'peak GiB':>9} {'peak B/par':>10}")
        for line in largest_table(as_bytes(args.largest)):
            print(line, flush=True)
        return
    steps = args.steps
    print(f"python benchmarks/low_memory.py --steps {steps}  ({platform.machine()}, AdamW)\n")
    print(f"{'network':12} {'parameters':>12} {'place':7} {'':26} {'kept B/par':>10} {'peak B/par':>10}")
    for line in bytes_table():
        print(line, flush=True)
    told = [n for n in TOLD if n <= steps]
    print(f"\n{'mean loss of the 10 steps up to':26} " + " ".join(f"{n:>8}" for n in told))
    for kind, precision, more in KINDS:
        found = losses(precision, more, steps)
        print(f"{kind:31} " + " ".join(f"{np.mean(found[max(n - 10, 0) : n]):8.4f}" for n in told), flush=True)


if __name__ == "__main__":
    main()
