"""Steps with one, two and more threads, and what share of a step is the work of one thread alone.

    python benchmarks/cpu_threads.py [--networks resnet50,bert] [--threads 1,2] [--rounds 3] [--text FILE]

The networks, batches and optimizers are those of benchmarks/cpu.py.  Each number of threads is a process, in turns, and
the median of all steps counts; a step takes no more threads than there are processors.  The share: every call of a step
is timed by itself, with as many threads as there are processors; calls whose work is not split, and operators without a
kernel, are one thread's.  Exit code 1 where ResNet-50 is less than 1.85 times as fast with two threads as with one, or
a share is above 2 %.  Needs a quiet machine with two processors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpu import Output
from cpu_networks import NETWORKS
from cpu_pool import Worker
from zoo_steps import headline, machine

FOLDER = Path(__file__).resolve().parent
FASTER, SHARE = 1.85, 0.02


def shares(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step's calls by how they run; for a process of its own."""
    import cpu_ours
    import numpy as np

    import recompute as rc
    from recompute import models
    from recompute.compiling.compiler import compile_step
    from recompute.runtime.cpu.device.native import Table
    from recompute.training import losses

    program = rc.load(models.build(spec["network"], batch=spec["batch"], seed=spec["seed"], **spec["options"]))
    kind, _ = losses.natural_loss(program)
    loss = getattr(losses, kind)(program).name
    step = compile_step(program, loss, cpu_ours.optimizer_of(spec))
    arrays = np.load(spec["data"])
    session = rc.Executor().session(step.program, [loss])
    best: dict[tuple[int, int], float] = {}
    kinds: dict[tuple[int, int], str] = {}
    for _ in range(5):
        for name in spec["feed"]:
            session.feed(name, arrays[f"feed/{name}"])
        for i, s in enumerate(session.steps):
            runs = [(Table([c]).run, "own" if c.own_threads else "split" if c.parallel and c.work > 1 else "alone")
                    for c in s.calls] or [(s.run, "alone")]  # fmt: skip
            for k, (run, how) in enumerate(runs):
                begin = time.perf_counter()
                run()
                seconds = time.perf_counter() - begin
                best[i, k] = min(best.get((i, k), seconds), seconds)
                kinds[i, k] = how
    total = {how: sum(t for at, t in best.items() if kinds[at] == how) for how in ("own", "split", "alone")}
    return {**total, "calls": len(best)}


def measured(job: str, counts: Sequence[int], rounds: int, seconds: float) -> dict[int, float]:
    """Median seconds of a step by threads; they take turns."""
    command = [sys.executable, str(FOLDER / "cpu_ours.py"), job]
    workers = {n: Worker(command, {"OMP_NUM_THREADS": str(n)}, 600) for n in counts}
    found: dict[int, list[float]] = {n: [] for n in counts}
    try:
        for worker in workers.values():
            worker.start()
        for _ in range(rounds):
            for n, worker in workers.items():
                found[n] += worker.times(seconds, 3)
    finally:
        for worker in workers.values():
            worker.end()
    return {n: statistics.median(times) for n, times in found.items()}


def main() -> int:
    """Measures and reports."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--networks", default="resnet50,bert")
    p.add_argument("--threads", default="1,2")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--seconds", type=float, default=4, help="length of a turn")
    p.add_argument("--shares", help=argparse.SUPPRESS)
    p.add_argument("--text", type=Path)
    args = p.parse_args()
    if args.shares:
        print(json.dumps(shares(json.loads(args.shares))))
        return 0
    say, good = Output(), True
    say(headline(machine()))
    for net in NETWORKS:
        if net.name not in args.networks.split(","):
            continue
        with tempfile.TemporaryDirectory() as folder:
            job = json.dumps(net.job(folder, variant="ours"))
            median = measured(job, [int(n) for n in args.threads.split(",")], args.rounds, args.seconds)
            done = subprocess.run(
                [sys.executable, __file__, "--shares", job], capture_output=True, text=True, check=True,
                env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count() or 1)},
            )  # fmt: skip
        one = median[min(median)]
        cells = [f"{n} threads {1e3 * t:.1f} ms" + (f" ({one / t:.2f} x)" if n > 1 else "") for n, t in median.items()]
        found = json.loads(done.stdout.splitlines()[-1])
        calls = found.pop("calls")
        share = found["alone"] / sum(found.values())
        say(f"{net.name}: {', '.join(cells)}; {found['own'] / sum(found.values()):.1%} by libraries' threads, "
            f"{share:.2%} by one thread alone, of {calls:,} calls")  # fmt: skip
        good &= share <= SHARE and (net.name != "resnet50" or 2 not in median or one / median[2] >= FASTER)
    if args.text:
        args.text.write_text("\n".join(say.lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
