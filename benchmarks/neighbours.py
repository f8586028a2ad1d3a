"""Training steps on a machine that is busy with other things: ours, and PyTorch's, alone and beside neighbours.

    python benchmarks/neighbours.py [--pytorch PATH] [--networks resnet18,bert] [--rounds 3] [--text FILE]

The networks, batches and optimizers are those of benchmarks/cpu.py.  Each side is a process with two threads; a
neighbour is a process that counts in a loop: none, one (one busy thread), four (two jobs of two threads).  On two
processors that are shared fairly a step takes 1, 1.5 and 3 times as long.  Median of all steps, in turns; exit code 1
where ours takes more than 1.7 or 3.5 times as long.  Needs a quiet machine with two processors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cpu import MALLOC, RATE, SEED, Output
from cpu_networks import NETWORKS
from cpu_pool import Worker
from memory_pytorch import torch_environment
from zoo_steps import headline, machine, write_data

FOLDER = Path(__file__).resolve().parent
#: neighbours, and how many times as long a step may take
ASKED = {0: 1.0, 1: 1.7, 4: 3.5}


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that are busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    """Measures and reports."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pytorch", help="an interpreter with PyTorch (default: the environment of memory_pytorch.py)")
    p.add_argument("--networks", default="resnet18,bert")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--seconds", type=float, default=8, help="length of a turn")
    p.add_argument("--no-pytorch", action="store_true", help="ours alone")
    p.add_argument("--text", type=Path)
    args = p.parse_args()
    say, good = Output(), True
    say(headline(machine()), "milliseconds of a step, and how many times as long as alone")
    for net in NETWORKS:
        if net.name not in args.networks.split(","):
            continue
        with tempfile.TemporaryDirectory() as folder:
            _, feed = write_data(net.zoo, net.batch, SEED, Path(folder), with_model=False, **net.options)
            spec = {
                "network": net.zoo, "batch": net.batch, "options": net.options, "seed": SEED, "kept": net.kept,
                "optimizer": net.optimizer, "learning_rate": RATE, "feed": feed, "data": f"{folder}/data.npz",
                "threads": 2, "variant": "ours", "flags": ["channels_last"] * net.images + ["fused", "sdpa"],
            }  # fmt: skip
            threads = {"OMP_NUM_THREADS": "2"}
            sides = {"ours": Worker([sys.executable, str(FOLDER / "cpu_ours.py"), json.dumps(spec)], threads, 600)}
            if not args.no_pytorch:
                python = args.pytorch or str(torch_environment())
                command = [python, str(FOLDER / "cpu_torch.py"), json.dumps(spec)]
                sides["pytorch"] = Worker(command, threads | MALLOC, 600)
            found: dict[tuple[str, int], list[float]] = {}
            for worker in sides.values():
                worker.start()
            try:
                for _ in range(args.rounds):
                    for count in ASKED:
                        with neighbours(count):
                            for name, worker in sides.items():
                                found.setdefault((name, count), []).extend(worker.times(args.seconds, 3))
            finally:
                for worker in sides.values():
                    worker.end()
        for name in sides:
            alone = statistics.median(found[name, 0])
            cells = []
            for count, most in ASKED.items():
                time = statistics.median(found[name, count])
                cells.append(f"{count} neighbours {1e3 * time:7.1f} ms" + (f" {time / alone:5.2f}" if count else ""))
                if name == "ours" and count:
                    good &= time <= most * alone
                    cells[-1] += f" (target {most}, {'hit' if time <= most * alone else 'MISS'})"
            say(f"{net.name:<10} {name:<8} {';  '.join(cells)}")
    if args.text:
        args.text.write_text("\n".join(say.lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
