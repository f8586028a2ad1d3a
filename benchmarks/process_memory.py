"""Memory as the operating system counts it, of whole processes that train a network, side by side with PyTorch.

    python benchmarks/process_memory.py [--torch-python PATH] [--rows resnet18:8,vgg16:4]

Each side is a process of its own: three steps of Adam on one batch, then VmHWM.  `predicted` is `rc.estimate`'s
`process_bytes`, from a third process; kernels are compiled by a run before.  `import`: VmHWM after PyTorch is imported.
Targets: .7 of PyTorch's in every row, predicted within 5 %; exit code 1 where one is missed.

Without --torch-python the environment of memory_pytorch.py is taken.  Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from memory_pytorch import torch_environment
from zoo_steps import headline, machine, row_text, write_data

MIB = 1 << 20
TARGET, NEAR = 0.7, 0.05
#: (network, batch, options of the zoo)
ROWS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("resnet18", 8, {}),
    ("resnet50", 16, {}),
    ("vgg16", 16, {}),
    ("mobilenet_v2", 16, {}),
    ("vit-base", 4, {}),
    ("vit-small", 8, {}),
    ("bert-base", 4, {}),
    ("gpt2-mini", 4, {}),
    ("gpt2-small", 1, {"seq": 1024}),
    ("lstm", 32, {}),
)
WIDTHS = (14, 5, 9, 9, 7, 9, 9, 6)
_HIGH = r"int(re.search(r'VmHWM:\s+(\d+)', open('/proc/self/status').read())[1]) << 10"
_ESTIMATE = "import recompute as rc; print(rc.estimate({name!r}, batch={batch}, options={options}).process_bytes)"
_OURS = f"""
import re, sys
import numpy as np
import recompute as rc
from recompute.compiling.sources import Loading
from recompute.compiling.steps import Steps
arrays = np.load(sys.argv[1])
steps = Steps({{name!r}}, options={{options}}, loading=Loading(weights=True))
step = steps.compile({{batch}}).program
del steps
executor = rc.Executor()
for _ in range(3):
    executor.run(step, {{{{v.name: arrays[f"feed/{{{{v.name}}}}"] for v in step.inputs}}}})
print({_HIGH})
"""
_TORCH = f"""
import json, re, sys
import torch
imported = {_HIGH}
from cpu_torch import start
spec = json.loads(sys.argv[1])
torch.manual_seed(0)
facts, step, _ = start(spec)
for _ in range(3):
    step()
print(imported, {_HIGH}, facts["version"])
"""


def main() -> int:
    """The table, and the exit code."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--torch-python", help="an interpreter that has PyTorch")
    p.add_argument("--rows", default="", help="NETWORK:BATCH,... instead of the table's")
    args = p.parse_args()
    python = args.torch_python or torch_environment()
    known = {name: options for name, _, options in ROWS}
    asked = [(n, int(b), known.get(n, {})) for n, _, b in (r.partition(":") for r in args.rows.split(",") if r)]
    print(f"{headline(machine())}\nVmHWM in MiB of three steps of Adam")
    print(row_text(("model", "batch", "predicted", "ours", "apart", "PyTorch", "import", "ratio"), WIDTHS))
    met, version, rows = 0, "", asked or list(ROWS)
    for name, batch, options in rows:
        predicted, ours, imported, theirs, version = measured(python, name, batch, options)
        apart, ratio = predicted / ours - 1, ours / theirs
        met += abs(apart) <= NEAR and ratio <= TARGET
        cells = (name, str(batch), f"{predicted / MIB:.0f}", f"{ours / MIB:.0f}", f"{apart:+.1%}",
                 f"{theirs / MIB:.0f}", f"{imported / MIB:.0f}", f"{ratio:.2f}")  # fmt: skip
        print(row_text(cells, WIDTHS), flush=True)
    print(f"torch {version}; {met} of {len(rows)} rows at {TARGET} of PyTorch's or less, predicted within {NEAR:.0%}")
    return int(met < len(rows))


def measured(python: str, name: str, batch: int, options: dict[str, Any]) -> tuple[int, int, int, int, str]:
    """Bytes: predicted, ours, PyTorch after its import and after its steps; PyTorch's version."""
    given = {"name": name, "batch": batch, "options": options}
    with tempfile.TemporaryDirectory() as folder:
        data, order = write_data(name, batch, 0, Path(folder), **options)
        for _ in range(2):
            ours = int(output(sys.executable, _OURS.format(**given), str(data)))
        predicted = int(output(sys.executable, _ESTIMATE.format(**given)))
        spec = {"network": name, "options": options, "data": str(data), "feed": order, "optimizer": "adam",
                "learning_rate": 1e-3, "threads": os.cpu_count(), "flags": []}  # fmt: skip
        imported, theirs, version = output(python, _TORCH, json.dumps(spec)).split()
    return predicted, ours, int(imported), int(theirs), version


def output(python: str, code: str, *arguments: str) -> str:
    """What a process prints."""
    here = str(Path(__file__).parent)
    done = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, cwd=here, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
