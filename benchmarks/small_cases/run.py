"""Runs a table of small cases after public reports of wrong numbers, a row a case.

    python benchmarks/small_cases/run.py TABLE [PART ...]

TABLE is a file beside this one, without its ending: `modules` or `files`; PART: only cases whose name has it.  It has
`CASES`, objects with `name`, `source` (the report's address) and `said` (what it reports), and `run(case)`, which
returns a verdict and a note: "right"; "refused" with the error's text; or "wrong", silent or misleading.  Without PART
the rows are also written to
benchmarks/results/small_cases_TABLE.json.  Exit code 1 where one is wrong.
"""

from __future__ import annotations

import collections
import importlib
import json
import sys
from pathlib import Path

_RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    """The rows, their counts, and the exit code."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    table, *parts = sys.argv[1:]
    module = importlib.import_module(table)
    cases = [c for c in module.CASES if not parts or any(part in c.name for part in parts)]
    if not cases:
        sys.exit(f"{table} has no case whose name has {' or '.join(parts)}")
    rows = []
    for case in cases:
        verdict, note = module.run(case)
        note = " ".join(note.split())
        rows.append({"name": case.name, "source": case.source, "said": case.said, "verdict": verdict, "note": note})
        print(f"{verdict:8} {case.name:36} {note}", flush=True)
    print("; ".join(f"{n} {v}" for v, n in collections.Counter(r["verdict"] for r in rows).items()))
    if not parts:
        text = json.dumps(rows, indent=1, ensure_ascii=False)
        (_RESULTS / f"small_cases_{table}.json").write_text(text + "\n", encoding="utf-8")
    return any(r["verdict"] == "wrong" for r in rows)


if __name__ == "__main__":
    sys.exit(main())
