"""Loads damaged models: every one must be refused with our own error or make a program that passes the verifier.

    python benchmarks/fuzz_import.py --files 100000 --workers 2        100,000 files from seed 0 on
    python benchmarks/fuzz_import.py --only 4711                       one file, with its traceback

Each worker is a process with limited memory (RLIMIT_AS) that says before each file which one it begins.  One that dies
or is silent for too long is counted against its file, ended, and another begins at the next file.  A file is also
counted where the process grew by more than `max_bytes` allows.  Ends with 1 where any file was counted.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import os
import re
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
MAX_BYTES = 1 << 28  # of one tensor, and of all that is folded
GROWTH = 3 * MAX_BYTES  # of the process while one file is loaded


def load_one(seed: int, path: Path) -> str:
    """What became of one file: loaded, refused, or what went wrong."""
    from mutations import corpus, damaged

    from recompute import RecomputeError, load, verify

    name, raw = damaged(seed, corpus())
    path.write_bytes(raw)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    try:
        program = load(path, batch=2, max_bytes=MAX_BYTES, unroll=seed % 3 == 0)
        verify(program.block)
        outcome = "loaded"
    except RecomputeError as e:
        outcome = "refused" if str(e) else "an error without a text"
    except BaseException as e:
        place = traceback.extract_tb(e.__traceback__)[-1]
        outcome = f"{type(e).__name__} at {Path(place.filename).name}:{place.lineno}: {e}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    seconds = time.perf_counter() - began
    if outcome in ("loaded", "refused") and grown > GROWTH:
        outcome = f"memory grew by {grown:,} bytes"
    return f"{seconds:.2f} {name.replace(' ', '_')} {' '.join(outcome.split())}"


def work(first: int, last: int, step: int, memory: int) -> None:
    """One worker: files first, first + step, ... below last; a line before and after each."""
    warnings.simplefilter("ignore")
    faulthandler.enable()
    from mutations import corpus

    import recompute.onnx_import  # noqa: F401  before the limit

    corpus()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, last, step):
            print(f"> {seed}", flush=True)
            print(f"< {seed} {load_one(seed, Path(folder) / 'damaged.onnx')}", flush=True)


class Worker:
    """A process and what it said last."""

    def __init__(self, number: int, first: int, args: argparse.Namespace) -> None:
        self.number, self.seed, self.pending = number, first, b""
        command = [sys.executable, __file__, "--worker", f"{first},{args.first + args.files},{args.workers}"]
        command += ["--memory", str(args.memory)]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        self.heard = time.monotonic()
        self.started = self.ended = False

    def lines(self) -> list[str]:
        """What it has said since."""
        assert self.process.stdout is not None
        text = os.read(self.process.stdout.fileno(), 1 << 16)
        self.ended = not text
        self.pending += text
        *whole, self.pending = self.pending.split(b"\n")
        self.heard = time.monotonic()
        return [line.decode("utf-8", "replace") for line in whole]


def run(args: argparse.Namespace) -> int:
    """All workers until all files are done; prints a table and what was counted."""
    counts: collections.Counter[str] = collections.Counter()
    wrong: dict[str, list[str]] = {}
    began, slowest = time.monotonic(), (0.0, "")
    workers = [Worker(i, args.first + i, args) for i in range(args.workers)]
    while workers:
        ready, _, _ = select.select([w.process.stdout for w in workers], [], [], 1.0)
        for w in list(workers):
            if w.process.stdout in ready:
                for line in w.lines():
                    w.started = True
                    if line.startswith("> "):
                        w.seed = int(line[2:])
                    else:
                        slowest = max(slowest, note(line, counts, wrong))
            late = time.monotonic() - w.heard > (args.seconds if w.started else 120)
            if w.ended or late:
                workers.remove(w)
                if late:
                    w.process.kill()
                if w.process.wait() != 0:
                    what = "took too long" if late else f"the process ended with {w.process.returncode}"
                    counts["wrong"] += 1
                    wrong.setdefault(what, []).append(str(w.seed))
                    if w.seed + args.workers < args.first + args.files:
                        workers.append(Worker(w.number, w.seed + args.workers, args))
    total, seconds = sum(counts.values()), time.monotonic() - began
    print(f"{total:,} files in {seconds:.0f} s ({total / seconds:.0f} a second): {counts['loaded']:,} loaded,")
    print(f"{counts['refused']:,} refused, {counts['wrong']:,} wrong; slowest {slowest[0]:.1f} s ({slowest[1]})")
    for what, seeds in sorted(wrong.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds):6} {what[:300]}   e.g. {', '.join(seeds[:4])}")
    return 1 if wrong else 0


def note(line: str, counts: collections.Counter[str], wrong: dict[str, list[str]]) -> tuple[float, str]:
    """Counts one line of a worker; its seconds and file."""
    _, seed, seconds, name, outcome = line.split(" ", 4)
    if outcome in ("loaded", "refused"):
        counts[outcome] += 1
    else:
        counts["wrong"] += 1
        wrong.setdefault(re.sub(r"\d{3,}|'[^']*'", "_", outcome), []).append(seed)
    return float(seconds), f"{name}, file {seed}"


def main() -> int:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--files", type=int, default=10_000)
    p.add_argument("--first", type=int, default=0, help="the first seed")
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    p.add_argument("--seconds", type=float, default=60, help="a file that takes longer is counted (default: 60)")
    p.add_argument("--memory", type=int, default=4 << 30, help="bytes of address space of a worker (default: 4 GiB)")
    p.add_argument("--only", type=int, help="one seed, in this process")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    args: Any = p.parse_args()
    if args.worker:
        work(*map(int, args.worker.split(",")), args.memory)
        return 0
    if args.only is not None:
        return show(args.only)
    return run(args)


def show(seed: int) -> int:
    """One file, with what is raised."""
    import onnx
    from mutations import corpus, damaged

    from recompute import load, verify

    name, raw = damaged(seed, corpus())
    print(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.onnx"
        path.write_bytes(raw)
        try:
            print(onnx.printer.to_text(onnx.load_from_string(raw))[:20_000])
        except Exception as e:
            print(f"(it cannot be printed: {e})")
        program = load(path, batch=2, max_bytes=MAX_BYTES, unroll=seed % 3 == 0)
        print(verify(program.block))
    return 0


if __name__ == "__main__":
    sys.exit(main())
