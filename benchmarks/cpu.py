"""Step times side by side with PyTorch on this machine's CPU, in alternating processes.

    python benchmarks/cpu.py [--pytorch PATH] [--networks resnet18,bert] [--quick] [--text FILE] [--json FILE]

Both sides take the same training steps: the same network, weights, batch and optimizer (dropout off); the losses of
step 1 must agree.  Each variant is a process with two threads; they take turns of about a second, and the median of
all its steps counts.  Beside the times: peak memory (ours as predicted and measured, PyTorch's by its profiler), and
what issue 6 asks for.  Exit code 1 where a target is missed or losses differ.

--pytorch: an interpreter with PyTorch (default: the environment that memory_pytorch.py makes); --ort: one with
onnxruntime-training-cpu 1.19.2, numpy < 2 and onnx 1.16.2 (default: no such row).  A quiet machine is needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cpu_ours
from cpu_networks import BEST, NETWORKS, QUICK, RECOMPUTED, WITHOUT_ONEDNN, Network
from cpu_pool import Failed, Pool, Worker, available_memory
from memory_pytorch import torch_environment
from zoo_steps import MIB, headline, machine, row_text

FOLDER = Path(__file__).resolve().parent
#: relative difference of the losses of step 1 that different orders of summation may make
AGREE = 1e-4
#: of the peak of the step by the operators' own numerics: kernels may take scratch, half a percent is none
MEMORY = 1.005
#: freed memory stays with the process, and no block is mapped by itself
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26)}
#: variants that take one turn: no target is about their time
MINOR = ("checkpoint", "numpy", "onnxruntime")
#: rounds that are made however long they take (--most)
LEAST_ROUNDS = 2
#: variants of PyTorch whose best our step is compared with
PYTORCH = ("pytorch", "channels_last", "malloc", "preload", "tuned", "compile")
WIDTHS = (14, 9, 9, 9, 11, 8, 12, 9)


@dataclass
class Row:
    """A variant of a network: seconds of its steps, or why there are none; peak bytes."""

    network: str
    variant: str
    seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    peak: int | None = None
    error: str = ""

    @property
    def median(self) -> float:
        """Of all steps; not a number where it failed."""
        return statistics.median(self.seconds) if self.seconds else math.nan

    def as_json(self) -> dict[str, Any]:
        """For --json; times in milliseconds."""
        ms = [round(s * 1e3, 3) for s in self.seconds]
        found: dict[str, Any] = {"network": self.network, "variant": self.variant}
        if ms:
            found |= {"ms": round(self.median * 1e3, 3), "low_ms": min(ms), "high_ms": max(ms), "steps_ms": ms}
        return {**found, "peak_bytes": self.peak, **({"error": self.error} if self.error else {}), **self.facts}


@dataclass(frozen=True)
class Verdict:
    """A target: `value` is to be at most `limit`."""

    network: str
    what: str
    value: float
    limit: float

    @property
    def hit(self) -> bool:
        """False for what could not be measured, too."""
        return self.value <= self.limit

    def line(self) -> str:
        """For people."""
        how = "hit" if self.hit else "MISS" if self.value == self.value else "not measured"
        return f"{self.network:<14}  {self.what:<44} {self.value:7.3f}  target {self.limit:5.3f}  {how}"


class Session:
    """One network: its data in a folder, its processes, and its rows."""

    def __init__(self, net: Network, args: argparse.Namespace, folder: Path, python: str) -> None:
        self.net, self.args, self.folder, self.python = net, args, folder, python
        self.job = net.job(folder, with_model=args.ort is not None, threads=args.threads)
        self.rows: dict[str, Row] = {}

    def workers(self) -> dict[str, Worker]:
        """All variants in the order of their turns, ours among PyTorch's."""
        found = {name: self.torch(name) for name in torch_variants(self.net, self.args)}
        seen: dict[tuple[str, ...], str] = {}
        for variant in self.args.ours:
            providers = cpu_ours.select(variant)
            if variant not in cpu_ours.RECOMPUTING and seen.setdefault(providers, variant) != variant:
                self.rows[variant] = Row(self.net.name, variant, error=f"the same as '{seen[providers]}' here")
                continue
            found[variant] = self._worker(sys.executable, "cpu_ours.py", {"variant": variant}, {})
        if self.args.ort is not None:
            found["onnxruntime"] = self._worker(self.args.ort, "cpu_ort.py", {"folder": str(self.folder)}, {})
        if self.args.variants:
            found = {n: w for n, w in found.items() if n in self.args.variants}
        ours, theirs = [n for n in found if n in self.args.ours], [n for n in found if n not in self.args.ours]
        return {n: found[n] for pair in itertools.zip_longest(theirs, ours) for n in pair if n is not None}

    def torch(self, name: str) -> Worker:
        """PyTorch's process of a variant."""
        flags, environment = torch_variants(self.net, self.args)[name]
        return self._worker(self.python, "cpu_torch.py", {"flags": list(flags)}, environment)

    def _worker(self, python: str, script: str, more: dict[str, Any], environment: dict[str, str]) -> Worker:
        threads = str(self.args.threads)
        names = ("OMP", "MKL", "OPENBLAS", "NUMBA")
        environment = {**{f"{n}_NUM_THREADS": threads for n in names}, **environment}
        return Worker([python, str(FOLDER / script), json.dumps(self.job | more)], environment, self.args.limit)

    def measure(self) -> None:
        """Turns of all variants, round by round; who fails leaves."""
        workers = self.workers()
        pool = Pool(workers, int(self.args.memory * available_memory()))
        left, begin = list(workers), time.perf_counter()
        try:
            for turn in range(self.args.rounds):
                if turn >= LEAST_ROUNDS and time.perf_counter() - begin > self.args.most:
                    break
                for name in [n for n in left if turn == 0 or n not in MINOR]:
                    row = self.rows.setdefault(name, Row(self.net.name, name))
                    self.say(f"round {turn + 1} of {self.args.rounds}: {name}")
                    try:
                        row.seconds += pool.times(name, self.args.seconds, 1)
                        row.facts = workers[name].facts
                    except Failed as e:
                        row.error = str(e)
                        left.remove(name)
        finally:
            pool.end()

    def peaks(self) -> None:
        """Peak memory of all sides; ours is among their facts."""
        for name, row in self.rows.items():
            row.peak = row.facts.get("peak_bytes")
            if name in ("pytorch", "checkpoint") and row.seconds and not self.args.no_peaks:
                self.say(f"memory of {name}")
                command = [*self.torch(name).command, "--peak"]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    row.error = "no peak: " + done.stderr.strip().splitlines()[-1][:200]
                else:
                    row.peak = json.loads(done.stdout.splitlines()[-1])["peak_bytes"]

    def say(self, text: str) -> None:
        """Progress, on standard error."""
        ending, clear = ("", "\r\033[K") if sys.stderr.isatty() else ("\n", "")
        print(f"{clear}{self.net.name}: {text}", end=ending, file=sys.stderr, flush=True)


def torch_variants(net: Network, args: argparse.Namespace) -> dict[str, tuple[tuple[str, ...], dict[str, str]]]:
    """Variant of PyTorch → flags of cpu_torch.py, environment."""
    layout = ("channels_last",) if net.images else ()
    best = (*layout, "fused", "sdpa")
    found: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {"pytorch": ((), {}), "malloc": ((), MALLOC)}
    if net.images:
        found["channels_last"] = (layout, {})
    if args.preload:
        found["preload"] = ((), {"LD_PRELOAD": args.preload})
    found["tuned"] = (best, MALLOC)
    if not args.no_compile:
        found["compile"] = ((*best, "compile"), MALLOC)
    found["checkpoint"] = (("checkpoint",), {})
    return found


# -- what comes out ---------------------------------------------------------------------------------------------------


def ratio(a: float | None, b: float | None) -> float:
    """Not a number where one is missing."""
    return a / b if a and b else math.nan


def best_of(rows: dict[str, Row]) -> float:
    """Seconds of PyTorch's fastest variant."""
    return min((rows[n].median for n in PYTORCH if n in rows and rows[n].seconds), default=math.nan)


def table(net: Network, rows: dict[str, Row]) -> list[str]:
    """The rows of a network as text."""
    base, best = rows.get("pytorch", Row("", "")), best_of(rows)
    plain = rows.get("ours", Row("", ""))
    found = [f"{net.name}: batch {net.batch}, {net.optimizer}"]
    heads = ("", "ms", "least", "most", "/ installed", "/ best", "peak MiB", "/ theirs")
    found.append(row_text(heads, WIDTHS))
    for name, row in rows.items():
        if not row.seconds:
            found.append(f"{name:<{WIDTHS[0]}}  {row.error}")
            continue
        ms = [x * 1e3 for x in (row.median, min(row.seconds), max(row.seconds))]
        partner = rows.get("checkpoint" if name in cpu_ours.RECOMPUTING else "pytorch", base)
        memory = ("", "") if row.peak is None else (f"{row.peak / MIB:.1f}", f"{ratio(row.peak, partner.peak):.3f}")
        cells = (name, *(f"{x:.1f}" for x in ms), f"{ratio(row.median, base.median):.3f}",
                 f"{ratio(row.median, best):.3f}", *memory)  # fmt: skip
        note = f"  {row.error}" if row.error else ""
        if name in cpu_ours.RECOMPUTING:
            note += f"  {row.facts['kept_share']:.0%} kept, {ratio(row.median, plain.median):.3f} of ours"
        if name == "checkpoint":
            note += f"  {ratio(row.median, base.median):.3f} of pytorch"
        found.append(row_text(cells, WIDTHS) + note)
    return [*found, agreement(rows)[1], *(f"{r.variant} ran kernels of: {', '.join(r.facts['kernels'])}"
            for r in rows.values() if "kernels" in r.facts)]  # fmt: skip


def agreement(rows: dict[str, Row]) -> tuple[bool, str]:
    """Whether all losses of step 1 are the same, and by how much they differ then and at the last warm-up step."""
    losses = {n: r.facts["losses"] for n, r in rows.items() if r.facts.get("losses")}
    if len(losses) < 2:
        return True, "losses: nothing to compare"
    base = losses.get("pytorch") or next(iter(losses.values()))
    off = {n: [abs(x - y) / max(abs(y), 1e-9) for x, y in zip(found, base, strict=True)] for n, found in losses.items()}
    wrong = [n for n, x in off.items() if not x[0] <= AGREE]
    text = f"losses agree: {base[0]:.6g} at step 1, off by {max(x[0] for x in off.values()):.1e}"
    text += f"; {base[-1]:.6g} at step {len(base)}, off by {max(x[-1] for x in off.values()):.1e}"
    if wrong:
        text = "LOSSES DIFFER at step 1: " + ", ".join(f"{n} {losses[n][0]:.8g}" for n in ("pytorch", *wrong))
    return not wrong, text


def verdicts(net: Network, rows: dict[str, Row]) -> list[Verdict]:
    """Issue 6's targets for a network."""
    seconds = {n: r.median for n, r in rows.items() if r.seconds}
    ours, base = seconds.get("ours"), seconds.get("pytorch")
    bare = seconds.get("no-onednn") or (seconds.get("ours") if "no-onednn" in rows else None)
    asked = (
        (("ours", "pytorch"), "ours / PyTorch as installed", ratio(ours, base), net.installed),
        (("ours", "pytorch"), "ours / PyTorch's best", ratio(ours, best_of(rows)), BEST),
        (("no-onednn", "pytorch"), "without oneDNN / PyTorch as installed", ratio(bare, base), WITHOUT_ONEDNN),
        (("recompute", "ours"), "recomputed / ours plain", ratio(seconds.get("recompute"), ours), RECOMPUTED),
        (
            ("planned", "ours"),
            "planned for the same peak / ours plain",
            ratio(seconds.get("planned"), ours),
            RECOMPUTED,
        ),
    )
    found = [Verdict(net.name, *words) for needed, *words in asked if all(n in rows for n in needed)]
    if all(n in rows and rows[n].peak for n in ("ours", "numpy")):
        found.append(Verdict(net.name, "memory of ours / of the operators' own numerics",
                             ratio(rows["ours"].peak, rows["numpy"].peak), MEMORY))  # fmt: skip
    for name, row in rows.items():
        if "measured_peak_bytes" in row.facts:
            share = ratio(row.facts["measured_peak_bytes"], row.peak)
            found.append(Verdict(net.name, f"{name}: peak, measured / predicted", share, 1.0))
    return found


class Output:
    """Lines on standard output, kept for --text."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, *lines: str) -> None:
        clear = "\r\033[K" if sys.stderr.isatty() else ""
        sys.stderr.write(clear)
        for line in lines:
            print(line, flush=True)
        self.lines += lines


def chosen(args: argparse.Namespace, p: argparse.ArgumentParser) -> list[Network]:
    """The networks asked for, small ones with --quick."""
    names = args.networks.split(",") if args.networks else [n.name for n in NETWORKS]
    known = {n.name: n for n in NETWORKS}
    if unknown := [n for n in names if n not in known]:
        p.error(f"--networks knows {', '.join(known)}, not {', '.join(unknown)}")
    found = [known[n] for n in names]
    if args.quick:
        found = [replace(n, batch=QUICK[n.name][0], options={**n.options, **QUICK[n.name][1]}) for n in found]
    return found


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pytorch", metavar="PATH", help="an interpreter that has PyTorch (default: one of our own)")
    p.add_argument("--ort", metavar="PATH", help="an interpreter that has onnxruntime-training-cpu")
    p.add_argument("--networks", metavar="A,B,...", help="some of the networks (default: all)")
    p.add_argument("--ours", metavar="A,B,...", default=",".join(cpu_ours.VARIANTS), help="variants of our side")
    p.add_argument("--variants", metavar="A,B,...", help="some of all variants (pytorch, tuned, ours, ...)")
    p.add_argument("--quick", action="store_true", help="small batches and two rounds, without torch.compile")
    p.add_argument("--rounds", type=int, metavar="N", help="turns of each variant (default: 5)")
    p.add_argument("--seconds", type=float, default=1.0, metavar="S", help="length of a turn (default: 1)")
    p.add_argument("--most", type=float, default=100, metavar="S", help="no third round of a network after this long")
    p.add_argument("--threads", type=int, default=2, metavar="N", help="threads of each process (default: 2)")
    p.add_argument("--limit", type=float, default=300, metavar="S", help="how long a process may warm up or compile")
    p.add_argument("--memory", type=float, default=0.75, metavar="SHARE", help="of free memory, for waiting processes")
    p.add_argument("--preload", metavar="LIB", help="PyTorch with another malloc, jemalloc say (LD_PRELOAD)")
    p.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    p.add_argument("--no-peaks", action="store_true", help="leave PyTorch's memory out")
    p.add_argument("--text", type=Path, metavar="FILE", help="what is printed, as a file")
    p.add_argument("--json", type=Path, metavar="FILE", help="all times, for machines")
    return p


def main() -> int:
    """Prints the tables; 1 where a target is missed or losses differ."""
    p = arguments()
    args = p.parse_args()
    networks = chosen(args, p)
    args.ours = args.ours.split(",")
    args.variants = args.variants.split(",") if args.variants else []
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.no_compile |= args.quick
    if unknown := [v for v in args.ours if v not in cpu_ours.VARIANTS]:
        p.error(f"--ours knows {', '.join(cpu_ours.VARIANTS)}, not {', '.join(unknown)}")
    python = args.pytorch or torch_environment()
    facts = {**machine(), "threads": args.threads, "load": round(os.getloadavg()[0], 2)}
    out = Output()
    out(headline(facts), f"a training step in ms, median over {args.rounds} turns{', small' if args.quick else ''}")
    if facts["load"] > 0.5:
        out(f"THE MACHINE IS BUSY (load {facts['load']}): times are noisy")
    begin, rows, judged, agreed = time.perf_counter(), [], [], True
    for net in networks:
        with tempfile.TemporaryDirectory() as folder:
            session = Session(net, args, Path(folder), python)
            session.measure()
            session.peaks()
        out("", *table(net, session.rows))
        rows += session.rows.values()
        judged += verdicts(net, session.rows)
        agreed &= agreement(session.rows)[0]
    out("", *(v.line() for v in judged if "peak," not in v.what or not v.hit))
    missed = [v for v in judged if not v.hit]
    out(f"{len(judged) - len(missed)} of {len(judged)} targets hit, in {time.perf_counter() - begin:.0f} s; "
        f"versions: {versions(rows)}")  # fmt: skip
    if args.text is not None:
        args.text.write_text("\n".join(out.lines) + "\n")
    if args.json is not None:
        found = {**facts, "versions": versions(rows), "rows": [r.as_json() for r in rows],
                 "targets": [{**vars(v), "hit": v.hit} for v in judged]}  # fmt: skip
        args.json.write_text(json.dumps(found, indent=1).replace("NaN", "null") + "\n")
    return 1 if missed or not agreed else 0


def versions(rows: Sequence[Row]) -> str:
    """Of what ran."""
    kinds = {r.variant if r.variant == "onnxruntime" else "ours" if "kernels" in r.facts else "torch":
             r.facts["version"] for r in rows if "version" in r.facts}  # fmt: skip
    return ", ".join(f"{k} {v}" for k, v in sorted(kinds.items()))


if __name__ == "__main__":
    sys.exit(main())
