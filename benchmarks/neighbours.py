"""Training steps on a machine that is busy with other things: ours, and PyTorch's, alone and beside neighbours.

    python benchmarks/neighbours.py [--pytorch PATH] [--networks resnet18,bert] [--rounds 3] [--text FILE]

The networks, batches and optimizers are those of benchmarks/cpu.py.  Each side is a process with two threads; a
neighbour is a process that counts in a loop: none, one (one busy thread), four (two jobs of two threads).  On two
processors that are shared fairly a step takes 1, 1.5 and 3 times as long.  Median of all steps, in turns; exit code 1
where ours takes more than 1.7 or 3.5 times as long.  In brackets, what the neighbours took of the two processors in
ours' turns: with the rest, a step that loses nothing takes 2 / (2 - that) times as long.  Needs a quiet machine with
two processors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cpu import MALLOC, Output
from cpu_networks import NETWORKS, Network
from cpu_pool import Worker, processor_seconds
from memory_pytorch import torch_environment
from zoo_steps import headline, machine

FOLDER = Path(__file__).resolve().parent
#: neighbours, and how many times as long a step may take
ASKED = {0: 1.0, 1: 1.7, 4: 3.5}


@dataclass
class Turns:
    """Seconds of a side's steps, and processors that the neighbours took in each turn."""

    seconds: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[list[int]]:
    """So many processes that are busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [process.pid for process in busy]
    finally:
        for process in busy:
            process.kill()
            process.wait()


def workers(net: Network, folder: str, pytorch: str | None, *, with_pytorch: bool) -> dict[str, Worker]:
    """The processes of a network, by who they are."""
    flags = ["channels_last"] * net.images + ["fused", "sdpa"]
    job = json.dumps(net.job(folder, threads=2, variant="ours", flags=flags))
    threads = {"OMP_NUM_THREADS": "2"}
    sides = {"ours": Worker([sys.executable, str(FOLDER / "cpu_ours.py"), job], threads, 600)}
    if with_pytorch:
        command = [pytorch or str(torch_environment()), str(FOLDER / "cpu_torch.py"), job]
        sides["pytorch"] = Worker(command, threads | MALLOC, 600)
    return sides


def measured(sides: Mapping[str, Worker], rounds: int, seconds: float) -> dict[tuple[str, int], Turns]:
    """Steps of each worker beside so many neighbours."""
    found: dict[tuple[str, int], Turns] = {(name, count): Turns() for name in sides for count in ASKED}
    for worker in sides.values():
        worker.start()
    try:
        for _ in range(rounds):
            for count in ASKED:
                with neighbours(count) as busy:
                    for name, worker in sides.items():
                        turns = found[name, count]
                        before, start = sum(map(processor_seconds, busy)), time.perf_counter()
                        turns.seconds += worker.times(seconds, 3)
                        spent = sum(map(processor_seconds, busy)) - before
                        turns.taken.append(spent / (time.perf_counter() - start))
    finally:
        for worker in sides.values():
            worker.end()
    return found


def row(name: str, found: Mapping[tuple[str, int], Turns]) -> tuple[str, bool]:
    """One side's times as text, and whether they are as asked."""
    alone, good, cells = statistics.median(found[name, 0].seconds), True, []
    for count, most in ASKED.items():
        step = statistics.median(found[name, count].seconds)
        cell = f"{count} neighbours {1e3 * step:7.1f} ms"
        if count:
            cell += f" {step / alone:5.2f} [{statistics.mean(found[name, count].taken):.2f}]"
        if name == "ours" and count:
            good &= step <= most * alone
            cell += f" (target {most}, {'hit' if step <= most * alone else 'MISS'})"
        cells.append(cell)
    return f"{name:<8} {';  '.join(cells)}", good


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
            sides = workers(net, folder, args.pytorch, with_pytorch=not args.no_pytorch)
            found = measured(sides, args.rounds, args.seconds)
        for name in sides:
            text, hit = row(name, found)
            good &= hit
            say(f"{net.name:<10} {text}")
    if args.text:
        args.text.write_text("\n".join(say.lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
