"""Planned memory against memory taken, for every network of the zoo at its table's batch, plain and recomputed.

    python benchmarks/memory.py [--models a,b] [--batch-scale 0.5] [--limit 8] [--compile-only | --quick] [--json FILE]

Columns, in MiB: `peak` is all that the executor is predicted to take (arena and persistent arrays), `measured` what
the session holds after its steps; `live` is the most bytes of the step's values alive at once, `arena` what they get;
`frag` is arena over live peak, less 1; `RSS` is the growth of the process's resident set from before the session to its
highest point over the steps, in % of what the session allocated (the arena, and copies of persistent arrays).

Each row runs in a process of its own.  Rows that need more than --limit are only compiled.  Exit code 1: measured and
predicted differ, fragmentation above 1 %, or the resident set off by more than 5 % where the peak is above 500 MB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zoo_steps import MIB, headline, machine, row_text, write_json, zoo_batch, zoo_step

import recompute as rc
from recompute import models
from recompute.runtime.communication.memory import ResidentGrowth

#: 1 % of the live peak; 5 % of what was allocated, for rows above 500 MB
MOST_FRAGMENTATION, MOST_RSS, LARGE = 0.01, 0.05, 500_000_000
#: `--quick`: one of each family, small
QUICK = ("mlp", "lenet", "lstm", "bert-tiny", "gpt2-tiny", "resnet18")
WIDTHS = (13, 5, 4, 8, 8, 8, 8, 6, 7, 7)
HEADER = ("model", "batch", "kind", "peak", "measured", "live", "arena", "frag", "RSS", "seconds")


def measure(name: str, batch: int, *, recompute: bool, run: bool, limit: int, steps: int) -> dict[str, Any]:
    """One row, in this process."""
    optimizer = rc.Adam(learning_rate=1e-3)
    step, loss = zoo_step(name, batch, recompute=recompute, optimizer=optimizer, weights=False)
    row: dict[str, Any] = {"model": name, "batch": batch, "kind": "rec" if recompute else "plain"}
    row |= asdict(step.figures)
    live = step.figures.live_peak_bytes - step.figures.persistent_bytes
    row["step_live_bytes"] = live
    row["fragmentation"] = step.figures.arena_bytes / live - 1
    if run and step.figures.peak_bytes <= limit:
        warm_up(name, max(1, batch // 16), recompute)
        row |= run_steps(step, loss, name, steps)
    return row


def warm_up(name: str, batch: int, recompute: bool) -> None:
    """A small step: libraries are loaded, kernels compiled and BLAS has its own buffers before anything is measured."""
    step, loss = zoo_step(name, batch, recompute=recompute, optimizer=rc.Adam(learning_rate=1e-3), weights=False)
    rc.Executor().run(step.program, zoo_batch(step, name), [loss])
    del step
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system, and counts when it is taken again


def run_steps(step: Any, loss: str, name: str, steps: int) -> dict[str, Any]:
    """Runs, and what the process grew by meanwhile: building a model takes memory, too."""
    feed = zoo_batch(step, name)
    new = 0
    for array in step.program.data.values():
        if array.flags.writeable:
            array.reshape(-1)[...] = array.reshape(-1)  # its pages exist from now on
        else:
            new += array.nbytes  # the executor makes a copy
    with ResidentGrowth() as growth:
        executor, start = rc.Executor(), time.perf_counter()
        for _ in range(steps):
            executor.run(step.program, feed, [loss])
        seconds = (time.perf_counter() - start) / steps
    session = executor.session(step.program, [loss])
    allocated = session.arena.nbytes + new
    return {
        "measured_peak_bytes": session.measured_peak_bytes,
        "allocated_bytes": allocated,
        "rss_growth_bytes": growth.peak,
        "rss_deviation": growth.peak / allocated - 1,
        "step_seconds": seconds,
    }


def defects(row: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found = []
    if row["fragmentation"] > MOST_FRAGMENTATION:
        found.append(f"fragmentation {row['fragmentation']:.2%}")
    if "measured_peak_bytes" in row:
        if row["measured_peak_bytes"] != row["peak_bytes"]:
            found.append(f"measured {row['measured_peak_bytes']:,} bytes, predicted {row['peak_bytes']:,}")
        if row["peak_bytes"] > LARGE and abs(row["rss_deviation"]) > MOST_RSS:
            found.append(f"resident set {row['rss_deviation']:+.1%}")
    return found


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    ran = "measured_peak_bytes" in row
    cells = [
        row["model"],
        str(row["batch"]),
        row["kind"],
        f"{row['peak_bytes'] / MIB:.1f}",
        f"{row['measured_peak_bytes'] / MIB:.1f}" if ran else "-",
        f"{row['step_live_bytes'] / MIB:.1f}",
        f"{row['arena_bytes'] / MIB:.1f}",
        f"{row['fragmentation']:.2%}",
        f"{row['rss_deviation']:+.1%}" if ran else "-",
        f"{row['step_seconds']:.2f}" if ran else "-",
    ]
    bad = defects(row)
    note = "  <- " + ", ".join(bad) if bad else ("" if ran else "  compiled only")
    return row_text(cells, WIDTHS) + note


def in_own_process(name: str, batch: int, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row, measured by a new interpreter."""
    command = [sys.executable, __file__, "--one", name, str(batch), kind, "--limit", str(args.limit)]
    command += ["--steps", str(args.steps), *(["--compile-only"] if args.compile_only else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, batch {batch}, {kind}: the process ended with code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", metavar="A,B", help="networks of the zoo (default: all)")
    p.add_argument("--batch-scale", type=float, default=1.0, metavar="F", help="times the table's batch")
    p.add_argument("--limit", type=float, default=8.0, metavar="GIB", help="run rows up to this peak (default: 8)")
    p.add_argument("--steps", type=int, default=1, help="steps to run (default: 1; every page is touched in one)")
    how = p.add_mutually_exclusive_group()
    how.add_argument("--compile-only", action="store_true", help="run nothing")
    how.add_argument("--quick", action="store_true", help="a few small networks, batch 8")
    p.add_argument("--json", type=Path, metavar="FILE")
    p.add_argument("--one", nargs=3, metavar=("MODEL", "BATCH", "KIND"), help=argparse.SUPPRESS)
    return p


def main() -> int:
    """Prints the table; 1 where a row has a defect."""
    args = parser().parse_args()
    if args.one:
        name, batch, kind = args.one
        limit = int(args.limit * (1 << 30))
        run = not args.compile_only
        row = measure(name, int(batch), recompute=kind == "rec", run=run, limit=limit, steps=args.steps)
        print(json.dumps(row))
        return 0
    names = args.models.split(",") if args.models else list(QUICK if args.quick else models.names())
    facts = machine()
    print(headline(facts))
    print(row_text(HEADER, WIDTHS))
    rows = []
    for name in names:
        batch = 8 if args.quick else max(1, round(models.info(name).table_batch * args.batch_scale))
        for kind in ("plain", "rec"):
            rows.append(in_own_process(name, batch, kind, args))
            print(show(rows[-1]), flush=True)
    write_json(args.json, facts, rows)
    return verdict(rows)


def verdict(rows: list[dict[str, Any]]) -> int:
    """The summary, and the exit code."""
    ran = [r for r in rows if "measured_peak_bytes" in r]
    wrong = [r for r in rows if defects(r)]
    large = [abs(r["rss_deviation"]) for r in ran if r["peak_bytes"] > LARGE]
    as_predicted = sum(r["measured_peak_bytes"] == r["peak_bytes"] for r in ran)
    print(f"{len(ran)} of {len(rows)} rows ran, measured = predicted in {as_predicted}")
    print(f"worst fragmentation {max(r['fragmentation'] for r in rows):.2%}")
    print(f"worst resident set of {len(large)} rows above 500 MB: {max(large, default=0.0):.1%} off")
    print(f"{len(wrong)} rows with a defect")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
