"""What portable bits (docs/portable.md) cost: a step's time with them, as a share of the ordinary step's.

python benchmarks/portable_bits.py [--threads 1] [--rounds 5] [NETWORK ...]

Each round runs both in processes of their own, one after the other; the ratio is that of medians over all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

#: network → batch and steps of a round
NETWORKS = {"lenet": (64, 60), "lstm": (32, 40), "gpt2-tiny": (4, 15), "bert-tiny": (8, 15), "mobilenet_v2": (4, 7),
            "resnet18": (2, 7)}  # fmt: skip


def measure(network: str, portable: bool) -> None:
    """Prints milliseconds of the steps."""
    import numpy as np

    import recompute as rc

    if portable:
        rc.portable_bits()
    batch, steps = NETWORKS[network]
    program = rc.load(rc.models.build(network), batch=batch)
    step = rc.compile_step(program, rc.losses.cross_entropy(program).name, rc.Adam(1e-3))
    session, times = rc.Executor().session(step.program), []
    rng = np.random.default_rng(0)
    feed = {
        v.name: rng.random(v.shape, "f4") if v.dtype == "f32" else rng.integers(0, 2, v.shape)
        for v in step.program.inputs
    }
    for _ in range(steps + 2):
        for name, x in feed.items():
            session.feed(name, x)
        begin = time.perf_counter()
        session.run()
        times.append(1e3 * (time.perf_counter() - begin))
    print(json.dumps(times[2:]))


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", choices=("portable", "ordinary"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.networks[0], args.measure == "portable")
        return
    print("| network | ordinary (ms) | portable (ms) | ratio |\n|---|---|---|---|")
    for network in args.networks:
        times: dict[str, list[float]] = {"ordinary": [], "portable": []}
        for _ in range(args.rounds):
            for kind, found in times.items():
                command = [sys.executable, __file__, network, "--measure", kind]
                env = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
                found += json.loads(subprocess.check_output(command, env=env))
        a, b = (statistics.median(found) for found in times.values())
        print(f"| {network}, batch {NETWORKS[network][0]} | {a:.2f} | {b:.2f} | {b / a:.2f} |", flush=True)


if __name__ == "__main__":
    main()
