"""Packs instances of static memory allocation: files of `id,lower,upper,size`, alive from lower until before upper.

    python benchmarks/packing.py DIR --seconds 60             # NAME.CAPACITY.csv: below the capacity; others: smallest
    python benchmarks/packing.py DIR --seconds 60 --smallest  # the smallest of each, with the proven bound

MiniMalloc's instances: github.com/google/minimalloc, benchmarks/challenging; idealloc: github.com/cappadokes/idealloc.
Exits with 1 if a given capacity is not met.  Seconds are processor seconds of one core.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path

import recompute as rc
import recompute.planning.step  # compiled packers, where numba is installed
from recompute.passes.memory.branching import IMPOSSIBLE
from recompute.passes.memory.packing import Lifetime, height, lower_bound, pack
from recompute.passes.memory.packing_exact import Branching, check_plan, pack_exact

#: more allocations are packed by the heuristics alone
_EXACT = 2_000


def read(path: Path) -> list[Lifetime]:
    """The allocations of a file.  UsageError where a line is not four numbers, or one lives for no time."""
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if number == 1:
                continue
            try:
                name, (lower, upper, size) = row[0], (int(k) for k in row[1:4])
            except (ValueError, IndexError):
                raise rc.UsageError(f"{path}, line {number}: 'id,lower,upper,size' is expected") from None
            if upper <= lower or size < 0:
                raise rc.UsageError(f"{path}, line {number}: {size} bytes from {lower} until {upper}")
            found.append(Lifetime(name, size, lower, upper - 1))
    if len({x.name for x in found}) < len(found):
        raise rc.UsageError(f"{path}: two allocations have the same id")
    return found


def below(items: list[Lifetime], capacity: int, seconds: float) -> tuple[bool, str]:
    """(whether a plan below the capacity was found, what to print)."""
    search = Branching(items, seconds)
    outcome, plan = search.below(capacity)
    if plan is None:
        return False, "impossible" if outcome == IMPOSSIBLE else "not found"
    check_plan(items, plan)
    return True, f"{height(items, plan):>14,}"


def smallest(items: list[Lifetime], seconds: float) -> str:
    """The smallest arena found, the proven bound and their ratio."""
    if len(items) > _EXACT:
        plan, bound = pack(items), lower_bound(items)
    else:
        plan, bound = pack_exact(items, seconds=seconds)
    check_plan(items, plan)
    top = height(items, plan)
    return f"{top:>14,} {bound:>14,} {top / bound:.4f}" + (" proven" if top == bound else "")


def main() -> int:
    """Prints a row an instance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path, help="a folder of CSV files, or one file")
    parser.add_argument("--seconds", type=float, default=60.0, help="processor seconds for an instance")
    parser.add_argument("--smallest", action="store_true", help="the smallest arena, whatever capacity is given")
    options = parser.parse_args()
    files = sorted(options.dir.glob("*.csv")) if options.dir.is_dir() else [options.dir]
    missed = 0
    pack_exact([Lifetime(str(i), i % 3 + 1, i, i + 3) for i in range(9)], seconds=1)  # compiles
    Branching([Lifetime("a", 1, 0, 0)], 1).below(1)
    for path in files:
        items = read(path)
        capacity = path.stem.rpartition(".")[2]
        start = time.process_time()
        if capacity.isdigit() and not options.smallest:
            met, text = below(items, int(capacity), options.seconds)
            missed += not met
        else:
            text = smallest(items, options.seconds)
        seconds = time.process_time() - start
        print(f"{path.stem:24} {len(items):>6} {lower_bound(items):>14,} {text} {seconds:8.2f} s", flush=True)
    return 1 if missed or not files else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except rc.RecomputeError as error:
        sys.exit(f"packing.py: {error}")
