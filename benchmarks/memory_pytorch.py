"""Peak memory of a training step, side by side with PyTorch on this machine's CPU.

    python benchmarks/memory_pytorch.py [--torch-python PATH] [--rows resnet18:8,vgg16:4] [--json FILE]

Same networks, batches and optimizer (SGD with momentum) on both sides, plain and with the same checkpoints
(`torch.utils.checkpoint` on the segments between them).  PyTorch's peak: the memory events of its profiler over the
second step, with parameters, gradients, momentum and batch.  Ours: the compiler's figure, which the executor's arrays
are checked against after a step.  The target is 0.9 of PyTorch's peak in every row; exit code 1 where one misses it.

Without --torch-python the benchmark makes an environment for PyTorch in a cache folder (pip, about 200 MB once).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from zoo_steps import MIB, headline, machine, row_text, write_json, zoo_batch, zoo_step

import recompute as rc

TORCH = "2.13.0"
TARGET = 0.9
#: (network, batch, options of the zoo, options of torch_peak.py)
ROWS: tuple[tuple[str, int, dict[str, Any], tuple[str, ...]], ...] = (
    ("resnet18", 8, {}, ()),
    ("resnet18", 32, {}, ()),
    ("resnet50", 16, {}, ()),
    ("bert-base", 8, {"layers": 2, "seq": 128}, ("--layers", "2", "--seq", "128")),
    ("vgg16", 4, {}, ()),
)
WIDTHS = (10, 5, 10, 9, 9, 6)


def torch_environment() -> str:
    """The interpreter of the benchmark's own environment, made at the first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "onnx-recompute" / f"torch-{TORCH}"
    python = folder / "bin" / "python"
    done = folder / "ready"
    if not done.exists():
        print(f"installing torch {TORCH} into the benchmark's cache, once", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", f"torch=={TORCH}", "numpy"], check=True)
        done.touch()
    return str(python)


def theirs(python: str, name: str, batch: int, options: tuple[str, ...], *, recompute: bool) -> dict[str, Any]:
    """PyTorch's peak, from its own interpreter."""
    script = Path(__file__).with_name("torch_peak.py")
    command = [python, str(script), name, str(batch), *options, *(["--recompute"] if recompute else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script.name} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if found["peak_bytes"] != found["summed_bytes"]:
        raise SystemExit("the profiler's totals and the sum of its events differ")
    return found


def ours(name: str, batch: int, options: dict[str, Any], *, recompute: bool, run: bool) -> dict[str, Any]:
    """Our peak; with `run`, checked against the executor after two steps."""
    optimizer = rc.Momentum(learning_rate=1e-3, momentum=0.9)
    step, loss = zoo_step(name, batch, recompute=recompute, optimizer=optimizer, **options)
    found: dict[str, Any] = {
        "parameters": sum(v.size for v in step.program.block.parameters),
        "peak_bytes": step.figures.peak_bytes,
        "arena_bytes": step.figures.arena_bytes,
    }
    if run:
        executor, feed = rc.Executor(), zoo_batch(step, name, **options)
        found["losses"] = [float(executor.run(step.program, feed, [loss])[0].reshape(())) for _ in range(2)]
        measured = executor.session(step.program, [loss]).measured_peak_bytes
        if measured != step.figures.peak_bytes:
            raise SystemExit(f"{name}: measured {measured:,} bytes, predicted {step.figures.peak_bytes:,}")
    return found


def compare(python: str, row: tuple[str, int, dict[str, Any], tuple[str, ...]], *, run: bool) -> list[dict[str, Any]]:
    """The plain and the recomputed row of a network."""
    name, batch, options, torch_options = row
    found = []
    for recompute in (False, True):
        a = ours(name, batch, options, recompute=recompute, run=run)
        b = theirs(python, name, batch, torch_options, recompute=recompute)
        if a["parameters"] != b["parameters"]:
            raise SystemExit(f"{name}: {a['parameters']:,} parameters here, {b['parameters']:,} in PyTorch")
        ratio = a["peak_bytes"] / b["peak_bytes"]
        kind = "recompute" if recompute else "plain"
        found.append({"model": name, "batch": batch, "options": options, "kind": kind, "ours": a, "pytorch": b})
        found[-1]["ratio"] = ratio
        cells = [name, str(batch), kind, f"{a['peak_bytes'] / MIB:.1f}", f"{b['peak_bytes'] / MIB:.1f}", f"{ratio:.3f}"]
        print(row_text(cells, WIDTHS) + ("" if ratio <= TARGET else "  <- above 0.9"), flush=True)
    return found


def main() -> int:
    """Prints the table; 1 where a row misses the target."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--torch-python", metavar="PATH", help="an interpreter that has PyTorch (default: one of our own)")
    p.add_argument("--rows", metavar="NAME:BATCH,...", help="some of the rows (default: all)")
    p.add_argument("--no-run", action="store_true", help="do not run our side: take the compiler's word")
    p.add_argument("--json", type=Path, metavar="FILE")
    args = p.parse_args()
    wanted = [r for r in ROWS if not args.rows or f"{r[0]}:{r[1]}" in args.rows.split(",")]
    if not wanted:
        p.error(f"--rows knows {', '.join(f'{r[0]}:{r[1]}' for r in ROWS)}")
    python = args.torch_python or torch_environment()
    facts = machine()
    print(headline(facts))
    print("peak of a training step in MiB; SGD with momentum")
    print(row_text(("model", "batch", "kind", "ours", "PyTorch", "ratio"), WIDTHS))
    rows = [r for row in wanted for r in compare(python, row, run=not args.no_run)]
    facts["torch"] = rows[0]["pytorch"]["torch"]
    write_json(args.json, facts, rows)
    missed = [r for r in rows if r["ratio"] > TARGET]
    print(
        f"torch {facts['torch']}; {len(rows) - len(missed)} of {len(rows)} rows at {TARGET} of PyTorch's peak or less"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
