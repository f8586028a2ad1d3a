"""Small cases of what public reports say goes wrong with ONNX files and around them, tried here.

    python benchmarks/small_cases/files.py            all of them; writes benchmarks/results/small_cases_files.json
    python benchmarks/small_cases/files.py lstm       those whose name has "lstm", and writes nothing

Each case builds a tiny model (or data file), and compares with ONNX Runtime, NumPy's or the documented rule's values,
and gradients with central differences in float64.  Verdicts: right; refused (one message that says why); wrong.
Ends with 1 where a case is wrong.  Needs onnxruntime and pillow.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import element_files
import operator_files
import structure_files
import training_files
from checks import judged

CASES = {**operator_files.CASES, **element_files.CASES, **structure_files.CASES, **training_files.CASES}


def main() -> int:
    """Runs the cases whose name has the argument, prints a row for each; 1 if one is wrong."""
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    rows = []
    for name, (source, said, case) in CASES.items():
        if part in name:
            verdict, note = judged(case)
            rows.append({"name": name, "source": source, "said": said, "verdict": verdict, "note": note})
            print(f"{verdict:8} {name:44} {note[:110]}")
    counts = {v: sum(r["verdict"] == v for r in rows) for v in ("right", "refused", "wrong")}
    print(f"{len(rows)} cases: " + ", ".join(f"{n} {v}" for v, n in counts.items()))
    if not part:
        path = Path(__file__).parents[1] / "results" / "small_cases_files.json"
        path.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
