"""Training what does not fit in memory: parameters and AdamW's state on disk, beside the same run in memory.

    python benchmarks/disk.py FOLDER [--network "518 million"] [--seq 256] [--budget "2GiB of process"] [--steps 3]

A LLaMA-like network of benchmarks/low_memory.py, its layers as checkpoints or whatever the planner finds, batch 1, each
run in a process of its own; FOLDER is on the disk that is measured.  Then a run is killed (SIGKILL) behind the first
checkpoint and resumed.  Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from largest_step import write
from low_memory import NETWORKS

import recompute as rc
from recompute.runtime.cpu.disk import Disk
from recompute.support.memory import resident_bytes
from recompute.support.tables import human_bytes


def train(model: str, budget: str, place: str, steps: int, save: Path | None) -> dict[str, Any]:
    """One run: its losses, the hash of its weights, seconds, bytes."""
    program = rc.load(model)
    loss = rc.losses.cross_entropy(program["logits"]).name
    optimizer = rc.RecomputeOptimizer(rc.AdamW(1e-4))
    if budget:
        optimizer.set_budget(budget, target=rc.Target(place), slicing=False)
    else:
        optimizer.set_checkpoints(["layers.*.out"])
    (length,) = program["input_ids"].shape[1:]
    ids = np.random.default_rng(0).integers(0, 8192, (steps, length))
    began = resident_bytes("VmHWM")
    trainer = rc.Trainer(program, optimizer, loss=loss, place=place, seed=0, quiet=True)
    saving = None if save is None else rc.Saving(save, steps=1, keep=1)
    done = trainer.fit({"input_ids": ids, "label": ids}, epochs=1, save=saving, resume=save is not None)
    found: dict[str, Any] = {
        "predicted": done.peak_bytes["predicted"],
        "measured": done.peak_bytes["measured"],
        "resident": max(began, resident_bytes("VmHWM")),
        "seconds": done.epochs[-1]["seconds"] / steps,
        "loss": done.epochs[-1]["train"]["loss"],
        "weights": done.weights_sha256,
    }
    session = trainer.programs.executor.bound(program, [loss])
    if isinstance(disk := getattr(session, "disk", None), Disk):
        found |= {"read": disk.read // steps, "written": disk.written // steps, "waited": disk.waited / steps}
    return found


def child(*options: str) -> dict[str, Any]:
    """A run in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *options], check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def killed(save: Path, *options: str) -> None:
    """Begins a run and kills it behind its first checkpoint."""
    run = subprocess.Popen([sys.executable, __file__, *options], stdout=subprocess.PIPE)
    while run.poll() is None and not list(save.glob("checkpoints/step-*/trainer.json")):
        time.sleep(0.2)
    run.send_signal(signal.SIGKILL)
    run.wait()


def main() -> None:
    """Prints a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--network", default="518 million", choices=NETWORKS)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--budget", default="2GiB of process")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--place", default="cpu", help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(train(args.run, args.budget, args.place, args.steps, args.save)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        options = {**NETWORKS[args.network], "seq": args.seq}
        path = write(rc.models.build("llama-tiny", batch=1, weights=False, **options), Path(folder))
        save, place, steps = Path(folder, "run"), f"cpu:{args.folder}", str(args.steps)
        common = ("x", "--run", str(path), "--steps", steps)
        far = (*common, "--budget", args.budget, "--place", place)
        rows = {"in memory": child(*common, "--budget", ""), f"on disk, {args.budget}": child(*far)}
        killed(save, *far, "--save", str(save))
        rows["killed and resumed"] = child(*far, "--save", str(save))
    print(f"{args.network} parameters, {args.seq} tokens, {args.steps} steps, {os.cpu_count()} cores")
    heads = ("predicted", "measured", "VmHWM"), ("s/step", "stall"), ("read", "written")
    widths = zip(heads, (14, 7, 10), strict=True)
    print(f"{'':30}", *(f"{h:>{width}}" for names, width in widths for h in names), " weights")
    for name, r in rows.items():
        numbers = (f"{r[k]:>14,}" for k in ("predicted", "measured", "resident"))
        copied = (f"{human_bytes(r.get(k, 0)):>10}" for k in ("read", "written"))
        print(f"{name:30}", *numbers, f"{r['seconds']:7.1f} {r.get('waited', 0):7.1f}", *copied, "", r["weights"][:12])


if __name__ == "__main__":
    main()
