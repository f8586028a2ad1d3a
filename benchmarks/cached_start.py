"""Starts of a process until a training step can run: compiled, and from its file (`rc.cached_step`, docs/library.md).

python benchmarks/cached_start.py [NETWORK:BATCH ...]  # needs a C compiler

Processor milliseconds after `import recompute`, the least of three processes each, which find their native code in the
user's cache folder; and those of the import itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

NETWORKS = ("lenet:32", "mobilenet_v2:2", "bert-tiny:4")
_BEGIN = """
import sys, time
begin = time.process_time()
import recompute as rc
name, batch, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
imported = time.process_time()
"""
_END = """
print(imported - begin, time.process_time() - imported)
"""
COMPILED = f"""{_BEGIN}
program = rc.load(rc.models.build(name), batch=batch)
step = rc.compile_step(program, rc.losses.cross_entropy(program).name, rc.Adam(1e-3))
session = rc.Executor().session(step.program)
{_END}"""
KEPT = f"""{_BEGIN}
step = rc.cached_step(name, "Adam", learning_rate=1e-3, batch=batch, cache=folder)
{_END}"""


def least(script: str, *given: str) -> tuple[float, float]:
    """Milliseconds of the import, and of what follows; the first process, which fills caches, does not count."""
    found = []
    for _ in range(4):
        command = [sys.executable, "-c", script, *given]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        found.append([float(x) * 1e3 for x in shown.split()])
    first, rest = zip(*found[1:], strict=True)
    return min(first), min(rest)


def main() -> None:
    """The script."""
    print("| network | import | rc.load, rc.compile_step, rc.Executor | rc.cached_step |\n|---|---|---|---|")
    for name, batch in (text.split(":") for text in sys.argv[1:] or NETWORKS):
        with tempfile.TemporaryDirectory() as folder:
            (imported, compiled), (_, kept) = (least(s, name, batch, folder) for s in (COMPILED, KEPT))
        print(f"| {name}, batch {batch} | {imported:.0f} | {compiled:,.0f} | {kept:.0f} |", flush=True)


if __name__ == "__main__":
    main()
