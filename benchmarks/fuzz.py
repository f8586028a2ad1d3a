"""Gives damaged files of every kind to whatever reads them: each is refused in one clear error, or it runs.

    python benchmarks/fuzz.py --count 200000 --workers 2          200,000 files of all kinds, from both fuzzers
    python benchmarks/fuzz.py --kind text,step --fuzzer structure --count 1000 --seed 7 --json found.json
    python benchmarks/fuzz.py --replay text/structure/7/123       one file, with its traceback

Kinds: ONNX models (`onnx`), programs' text (`text`), compiled steps (`step`), saved plans and planners' problems
(`plan`), states (`state`), data for `--run` (`data`).  Fuzzers: `bytes` changes bytes, characters and lines without
understanding; `structure` changes fields, types, attributes, names, addresses, headers.  File k of a seed depends on
kind, fuzzer, seed and k alone (and on the version of onnx, whose own test models are among the originals, and on which
kernels this machine has).  Every file goes the whole way: loaded, verified, planned, run, in memory that ends at pages
that nobody may touch; programs that bring their own plan must give what a plan of ours gives.

Children work on batches, with limited memory (RLIMIT_AS) and processor time a file.  Counted as findings: a process
that ends (a signal, an abort, the limit of time), any error that is no RecomputeError, memory beyond the budget, wrong
results, and refusals in words that only a programmer understands.  Ends with 1 where there is a finding.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
for _library in ("OMP", "OPENBLAS", "MKL", "NUMBA"):  # before NumPy is imported
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
#: bytes that the process may grow by while one file is worked on
BUDGET = 1 << 30
#: how many files of each kind there are, beside each other
SHARE = {"onnx": 5, "text": 5, "step": 4, "plan": 2, "state": 2, "data": 2}
#: files that a child works on, at the most
BATCH = 250
#: what happened that is no finding
GOOD = ("ran", "loaded", "refused")


@dataclass
class Part:
    """Files of one kind from one fuzzer: which is next, how many there are."""

    kind: str
    fuzzer: str
    last: int
    next: int = 0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)


def one(part: Part, number: int, args: argparse.Namespace, folder: Path) -> str:
    """What becomes of one file, in this process."""
    from fuzzing.files import SUFFIX, damaged, outcome

    name, data = damaged(part.kind, part.fuzzer, args.seed, number, not args.small)
    path = folder / f"file{SUFFIX[part.kind]}"
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = outcome(part.kind, path, number, name)
    except BaseException as e:
        found = f"{type(e).__name__} at {_place(e)}: {' '.join(str(e).split())}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return found if grown < BUDGET or found not in GOOD else f"memory grew by {grown >> 20} MiB, then {found}"


def _place(e: BaseException) -> str:
    """Where an error was raised: the last line of ours on the way."""
    frames = traceback.extract_tb(e.__traceback__)
    ours = [f for f in frames if str(ROOT) in f.filename and "fuzz" not in f.filename] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"


def work(part: Part, numbers: range, args: argparse.Namespace, out: int, errors: Path) -> None:
    """A child: a line before and after each file."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = errors.open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    for number in (signal.SIGPROF, signal.SIGALRM):
        faulthandler.register(number, log, chain=True)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + args.memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            os.write(out, f"> {number}\n".encode())
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, args.seconds)
            signal.setitimer(signal.ITIMER_REAL, 20 * args.seconds)  # a busy machine is no finding, waiting for ever is
            found = one(part, number, args, Path(folder))
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            line = f"< {number} {time.process_time() - began:.3f} {found}"
            os.write(out, line.encode("utf-8", "replace")[:2000] + b"\n")


class Lane:
    """A child at work, and what it said last."""

    def __init__(self, part: Part, args: argparse.Namespace, errors: Path) -> None:
        self.part, self.errors, self.pending, self.number = part, errors, b"", -1
        self.numbers = range(part.next, min(part.last, part.next + BATCH))
        part.next = self.numbers.stop
        self.out, inlet = os.pipe()
        sys.stdout.flush()
        self.process = os.fork()
        if self.process == 0:
            code = 1
            try:
                os.close(self.out)
                work(part, self.numbers, args, inlet, errors)
                code = 0
            except BaseException:  # a fault of the fuzzer
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(inlet)

    def lines(self) -> list[str]:
        """What it has said since; [] at its end."""
        text = os.read(self.out, 1 << 16)
        self.pending += text
        *whole, self.pending = self.pending.split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole] if text else []

    def end(self) -> str:
        """How it ended: "" where all is well."""
        os.close(self.out)
        _, status = os.waitpid(self.process, 0)
        if status == 0:
            return ""
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM):
            return f"took too long, at {self.stack()}"
        if not os.WIFSIGNALED(status):
            print(self.errors.read_text(errors="replace")[-2000:])
        how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        return f"the process ended: {how}, at {self.stack()}"

    def stack(self) -> str:
        """The innermost lines of ours where it ended."""
        log = self.errors.read_text(errors="replace")
        lines = re.findall(r'File "([^"]*)", line (\d+)', log)
        ours = [f"{Path(name).name}:{line}" for name, line in lines if str(ROOT) in name] or ["?"]
        return " < ".join(ours[:3])


class Run:
    """All children, and what they found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        whole = sum(SHARE[k] for k in args.kind) * len(args.fuzzer)
        self.parts = [Part(k, f, args.count * SHARE[k] // whole) for k in args.kind for f in args.fuzzer]
        self.found: dict[str, list[str]] = {}
        self.slowest = (0.0, "")
        self.seconds: collections.Counter[str] = collections.Counter()

    def go(self, folder: Path) -> None:
        """Until all files are done."""
        lanes: list[Lane] = []
        try:
            self.work(lanes, folder)
        finally:  # nobody waits for their results any more
            for lane in lanes:
                os.kill(lane.process, signal.SIGKILL)

    def work(self, lanes: list[Lane], folder: Path) -> None:
        """Starts children, and listens to them."""
        free = [folder / f"errors{i}" for i in range(self.args.workers)]
        while True:
            while free and (part := self.wanting()) is not None:
                lanes.append(Lane(part, self.args, free.pop()))
            if not lanes:
                return
            ready, _, _ = select.select([lane.out for lane in lanes], [], [])
            for lane in [x for x in lanes if x.out in ready]:
                lines = lane.lines()
                for line in lines:
                    self.note(lane, line)
                if not lines and not lane.pending:
                    self.finish(lane)
                    lanes.remove(lane)
                    free.append(lane.errors)

    def wanting(self) -> Part | None:
        """The part that is furthest behind; None where all have begun."""
        left = [p for p in self.parts if p.next < p.last]
        return min(left, key=lambda p: p.next / p.last, default=None)

    def note(self, lane: Lane, line: str) -> None:
        """One line of a child."""
        if line.startswith("> "):
            lane.number = int(line[2:])
            return
        _, number, seconds, found = line.split(" ", 3)
        self.slowest = max(self.slowest, (float(seconds), self.name(lane.part, number)))
        self.seconds[lane.part.kind] += float(seconds)  # type: ignore[assignment]
        self.count(lane.part, number, found)

    def finish(self, lane: Lane) -> None:
        """A child has ended: what it ended at is a finding, and the files behind that are for another child."""
        how = lane.end()
        if how:
            self.count(lane.part, str(lane.number), how)
            behind = Part(lane.part.kind, lane.part.fuzzer, lane.numbers.stop, lane.number + 1)
            behind.counts = lane.part.counts
            self.parts.append(behind)

    def count(self, part: Part, number: str, found: str) -> None:
        """One file's outcome."""
        part.counts[found if found in GOOD else "wrong"] += 1
        if found not in GOOD:
            key = re.sub(r"/tmp/\S+|\d{2,}|'[^']*'|%\S+", "_", found)[:160]
            self.found.setdefault(key, []).append(self.name(part, number))
            if len(self.found[key]) == 1 and not self.args.quiet:
                print(f"{self.name(part, number)}: {found[:400]}", flush=True)
            if self.args.save and len(self.found[key]) <= 3:
                save(part, int(number), found, self.args)

    def name(self, part: Part, number: str | int) -> str:
        """How `--replay` calls a file."""
        return f"{part.kind}/{part.fuzzer}/{self.args.seed}/{number}"

    def table(self) -> list[dict[str, Any]]:
        """Counts by kind and fuzzer."""
        rows: dict[tuple[str, str], collections.Counter[str]] = {(p.kind, p.fuzzer): p.counts for p in self.parts}
        return [{"kind": k, "fuzzer": f, **{n: c[n] for n in (*GOOD, "wrong")}} for (k, f), c in rows.items()]


def save(part: Part, number: int, found: str, args: argparse.Namespace) -> None:
    """Keeps a file with what was found."""
    from fuzzing.files import SUFFIX, damaged

    try:
        _, data = damaged(part.kind, part.fuzzer, args.seed, number, not args.small)
    except Exception as e:  # a fault of the fuzzer
        data = str(e).encode()
    stem = f"{part.kind}_{part.fuzzer}_{args.seed}_{number}"
    args.save.mkdir(parents=True, exist_ok=True)
    (args.save / (stem + SUFFIX[part.kind])).write_bytes(data)
    (args.save / (stem + ".txt")).write_text(found + "\n")


def replay(text: str, args: argparse.Namespace) -> int:
    """One file in this process: shown, and all that is raised with its traceback."""
    from fuzzing.files import SUFFIX, damaged, outcome

    kind, fuzzer, seed, number = text.split("/")
    name, data = damaged(kind, fuzzer, int(seed), int(number), not args.small)
    print(f"{text}, from '{name}', {len(data):,} bytes")
    if kind in ("text", "plan"):
        print(data.decode("utf-8", "backslashreplace")[:20_000])
    faulthandler.enable()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"file{SUFFIX[kind]}")
        path.write_bytes(data)
        if args.save:
            args.save.mkdir(parents=True, exist_ok=True)
            (args.save / f"{text.replace('/', '_')}{SUFFIX[kind]}").write_bytes(data)
        try:
            found = outcome(kind, path, int(number), name)
        except Exception:
            traceback.print_exc()
            return 1
    print(found)
    return 0 if found in GOOD else 1


def main() -> int:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kind", default="onnx,text,step,plan,state,data")
    p.add_argument("--fuzzer", default="bytes,structure")
    p.add_argument("--count", type=int, default=12_000, help="files in all (default: 12,000)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--workers", type=int, default=1, help="children at once (default: 1)")
    p.add_argument("--seconds", type=float, default=10, help="processor time of a file, at the most (default: 10)")
    p.add_argument(
        "--memory", type=int, default=3 << 30, help="bytes of address space of a child's own (default: 3 GiB)"
    )
    p.add_argument("--small", action="store_true", help="few originals: begins sooner")
    p.add_argument("--json", type=Path, help="write counts and findings")
    p.add_argument("--save", type=Path, metavar="FOLDER", help="keep the files of findings")
    p.add_argument("--replay", metavar="KIND/FUZZER/SEED/NUMBER", help="one file")
    p.add_argument("-q", "--quiet", action="store_true")
    args = p.parse_args()
    args.kind, args.fuzzer = args.kind.split(","), args.fuzzer.split(",")
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the folder of kernels is removed, and the children end
    with tempfile.TemporaryDirectory(prefix="recompute-fuzz-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # thousands of kernels that nobody wants again
        return replay(args.replay, args) if args.replay else fuzz(args, Path(folder))


def fuzz(args: argparse.Namespace, folder: Path) -> int:
    """All files; prints a table and what was found."""
    from fuzzing import seeds, warm

    began = time.monotonic()
    for kind in args.kind:
        seeds.corpus(kind, not args.small)
    warm.up()
    prepared, run = time.monotonic(), Run(args)
    run.go(folder)
    seconds, rows = time.monotonic() - prepared, run.table()
    total = sum(sum(p[n] for n in (*GOOD, "wrong")) for p in rows)
    print(f"{total:,} files in {seconds:.0f} s ({total / seconds:.0f} a second; {prepared - began:.0f} s to prepare)")
    print(f"slowest {run.slowest[0]:.1f} s: {run.slowest[1]}; processor seconds " +
          ", ".join(f"{k} {s:.0f}" for k, s in run.seconds.items()))  # fmt: skip
    for row in rows:
        print("  ".join(f"{row[n]:>9}" if n in ("kind", "fuzzer") else f"{row[n]:>8,} {n}" for n in row))
    for what, files in sorted(run.found.items(), key=lambda item: -len(item[1])):
        print(f"{len(files):6} {what}   e.g. {', '.join(files[:3])}")
    if args.json:
        report = {"seed": args.seed, "files": total, "seconds": round(seconds), "parts": rows, "findings": run.found}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if run.found else 0


if __name__ == "__main__":
    sys.exit(main())
