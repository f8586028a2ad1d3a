"""Processor and wall seconds from the start of a process to the end of its first training step.

    python benchmarks/cold_start.py [--rows resnet50:16,gpt2-small:1]

Each row is a network of the zoo with Adam, in fresh processes: first with an empty cache of kernels (cold), then with
the kernels that the first has left there (warm).  What is printed adds up: import, building the network, loading it,
`minimize`, and the first step, of which compiling and binding take what a second step does not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from zoo_steps import headline, machine

#: (network, batch, options of the zoo)
ROWS: tuple[tuple[str, int, dict[str, Any]], ...] = (("resnet50", 16, {}), ("gpt2-small", 1, {"seq": 1024}))
PHASES = ("import", "build", "load", "minimize", "first step", "second step")
_STEP = """
import json, sys, time
marks = [(time.process_time(), time.perf_counter())]

def mark():
    marks.append((time.process_time(), time.perf_counter()))

import numpy as np
import recompute as rc
mark()
name, batch, options = json.loads(sys.argv[1])
model = rc.models.build(name, **options)
mark()
program = rc.load(model, batch=batch)
loss = rc.losses.cross_entropy(program)
mark()
rc.Adam().minimize(loss)
mark()
g, executor = np.random.default_rng(0), rc.Executor()
feed = {
    v.name: g.standard_normal(v.shape).astype("f") if v.dtype == "f32" else g.integers(0, 10, v.shape)
    for v in program.inputs
}
for _ in range(2):
    executor.run(program, feed)
    mark()
marks[0] = (0.0, marks[0][1])
print(json.dumps([(b[0] - a[0], b[1] - a[1]) for a, b in zip(marks, marks[1:])]))
"""


def measured(row: tuple[str, int, dict[str, Any]], cache: str) -> list[tuple[float, float]]:
    """(processor seconds, wall seconds) of each phase."""
    code = [sys.executable, "-c", _STEP, json.dumps(row)]
    given = {**os.environ, "XDG_CACHE_HOME": cache}
    made = subprocess.run(code, env=given, check=True, stdout=subprocess.PIPE, text=True)
    return [(cpu, wall) for cpu, wall in json.loads(made.stdout.splitlines()[-1])]


def main() -> None:
    """The table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", default="", help="NETWORK:BATCH,... instead of the table's")
    args = p.parse_args()
    known = {name: options for name, _, options in ROWS}
    pairs = [part.partition(":") for part in args.rows.split(",") if part]
    rows = [(name, int(batch), known.get(name, {})) for name, _, batch in pairs] or list(ROWS)
    print(headline(machine()))
    print("processor seconds (wall seconds)")
    print(f"{'':18}" + "".join(f"{phase:>16}" for phase in (*PHASES[:5], "to its end")))
    for row in rows:
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                found = measured(row, cache)
                total = [sum(x) for x in zip(*found[:5], strict=True)]
                cells = "".join(f"{f'{cpu:.2f} ({wall:.2f})':>16}" for cpu, wall in (*found[:5], total))
                print(f"{row[0]} b{row[1]} {kind}".ljust(18) + cells + f"   second step {found[5][0]:.2f}")


if __name__ == "__main__":
    main()
