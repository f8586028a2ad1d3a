"""Data parallelism and ZeRO beside PyTorch's DistributedDataParallel and fully_shard (FSDP 2): the same networks,
batches, ranks and cores, Adam, float32.

    python benchmarks/ranks.py [--torch-python PATH] [--turns 3] [--only resnet18] [--json FILE]

Both take turns on this machine: PyTorch through gloo, ours through MPI (`python -m recompute.launch --bind`), each
process with its own cores.  Peaks: PyTorch's from its profiler's memory events of the second step, with parameters,
gradients and state; ours as the executor holds it, which must be what was predicted.  `overlapped`: the share of the
time that communication takes during which the step goes on.  `efficiency`: the samples a second of all ranks beside
as many times those of one rank with one rank's cores and batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from memory_pytorch import torch_environment
from zoo_steps import MIB, headline, machine, write_data

import recompute as rc
from recompute import models

RANKS = 2
#: (network, options, batch of a rank)
ROWS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("resnet18", {}, 8),
    ("bert-base", {"layers": 2, "dropout": 0.0}, 8),
    ("gpt2-mini", {"dropout": 0.0}, 4),
)
#: our stage beside which of theirs
KINDS = (("ddp", 0), ("ddp", 1), ("fsdp", 3))


def ours(spec: dict[str, Any]) -> dict[str, Any]:
    """One rank's steps, on every rank; facts of rank 0."""
    ranks = spec["ranks"]
    executor = rc.Executor(mesh=f"dp={ranks}") if ranks > 1 else rc.Executor()
    engine = executor.engine
    rank = 0 if engine is None else engine.rank
    total = spec["batch"] * ranks
    model = models.build(spec["network"], batch=total, seed=0, **spec["options"])
    program = rc.load(model)
    loss = rc.losses.cross_entropy(program["logits"])
    rc.DataParallel(rc.Adam(1e-3), rc.Mesh.of(dp=ranks), rank, zero=spec["zero"], batch=total).minimize(loss)
    arrays = np.load(spec["data"])
    inputs = {n: arrays[f"feed/{n}"][rank * spec["batch"] : (rank + 1) * spec["batch"]] for n in arrays["order"]}
    found = [float(executor.run(program, inputs, [loss])[0]) for _ in range(2)]
    session = executor.session(program, (loss.name,))
    clock = Clock(engine)
    seconds = []
    for _ in range(spec["steps"]):
        clock.meet()
        begin = time.perf_counter()
        found.append(float(executor.run(program, inputs, [loss])[0]))
        seconds.append(time.perf_counter() - begin)
    return {
        "rank": rank, "seconds": clock.slowest(seconds), "losses": found, "predicted": session.report.peak,
        "peak": session.measured_peak_bytes, **clock.facts(spec["steps"]),
    }  # fmt: skip


class Clock:
    """Measures what an engine carries, and for how long the step waits for it."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.waited, self.carried = engine, 0.0, 0.0
        self.comm: Any = None
        if engine is None:
            return
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        engine.wait = self._timed(engine.wait, "waited")
        for channel in engine._channels.values():
            channel.carry = self._timed(channel.carry, "carried")

    def _timed(self, call: Any, name: str) -> Any:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter() - begin)

        return timed

    def meet(self) -> None:
        """All ranks begin together."""
        if self.comm is not None:
            self.comm.Barrier()

    def slowest(self, seconds: list[float]) -> list[float]:
        """Each step's time on the slowest rank."""
        if self.comm is None:
            return seconds
        return [max(each) for each in zip(*self.comm.allgather(seconds), strict=True)]

    def facts(self, steps: int) -> dict[str, Any]:
        """Seconds a step."""
        if self.comm is None:
            return {}
        return {"carried": self.carried / steps, "waited": self.waited / steps}


def launched(spec: dict[str, Any]) -> dict[str, Any]:
    """Our side, in processes of its own."""
    command = [sys.executable, __file__, "--worker", json.dumps(spec)]
    if spec["ranks"] > 1:
        bound = ["--bind"] if (os.cpu_count() or 1) >= spec["ranks"] else []
        command = [sys.executable, "-m", "recompute.launch", "--nproc", str(spec["ranks"]), *bound, *command[1:]]
    return answer(command, spec["threads"])


def theirs(python: str, spec: dict[str, Any]) -> dict[str, Any]:
    """PyTorch's side."""
    return answer([python, str(Path(__file__).with_name("torch_ranks.py")), json.dumps(spec)], spec["threads"])


def answer(command: list[str], threads: int) -> dict[str, Any]:
    """What a command prints last, as JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{command[:3]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1])


def measured(row: tuple[str, dict[str, Any], int], args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All comparisons of one network."""
    name, options, batch = row
    data, _ = write_data(name, batch * RANKS, 0, folder, **options)
    spec = {"network": name, "options": options, "batch": batch, "ranks": RANKS, "threads": 1, "steps": args.steps,
            "data": str(data)}  # fmt: skip
    one = {**spec, "ranks": 1, "zero": 0}
    alone, found = [], []
    for kind, zero in KINDS:
        sides: dict[str, list[dict[str, Any]]] = {"torch": [], "ours": []}
        for _ in range(args.turns):
            sides["torch"].append(theirs(args.torch_python, {**spec, "kind": kind}))
            sides["ours"].append(launched({**spec, "zero": zero}))
            alone.append(launched(one))
        found.append({"network": name, "batch": batch, "kind": kind, "zero": zero, **summary(sides, alone)})
        print(line(found[-1]), flush=True)
    return found


def seconds_of(runs: list[dict[str, Any]]) -> float:
    """The median step of all turns."""
    return statistics.median(s for r in runs for s in r["seconds"])


def summary(sides: dict[str, list[dict[str, Any]]], alone: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of both sides."""
    torch, own = sides["torch"][-1], sides["ours"][-1]
    assert own["predicted"] == own["peak"], "the measured peak is not what was predicted"
    waited, carried = own["waited"], own["carried"]
    return {
        "torch_seconds": seconds_of(sides["torch"]), "seconds": seconds_of(sides["ours"]),
        "torch_peak": torch["peak"], "peak": own["peak"], "one": seconds_of(alone),
        "efficiency": seconds_of(alone) / seconds_of(sides["ours"]),
        "overlapped": 1 - min(waited / carried, 1) if carried else None, "carried": carried, "waited": waited,
        "loss_difference": max(abs(a - b) for a, b in zip(torch["losses"][:3], own["losses"][:3], strict=True)),
    }  # fmt: skip


def line(f: dict[str, Any]) -> str:
    """A row of the table."""
    return (
        f"{f['network']:10} b{f['batch']}  {f['kind']:4} / zero {f['zero']}  step {f['torch_seconds']:.3f} -> "
        f"{f['seconds']:.3f} s ({f['seconds'] / f['torch_seconds']:.2f})  peak {f['torch_peak'] / MIB:7.1f} -> "
        f"{f['peak'] / MIB:7.1f} MiB ({f['peak'] / f['torch_peak']:.2f})  efficiency {f['efficiency']:.2f}  "
        f"communication {f['carried']:.3f} s, {f['overlapped']:.0%} overlapped  losses differ by "
        f"{f['loss_difference']:.0e}"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    parser.add_argument("--worker")
    args = parser.parse_args()
    if args.worker:
        facts = ours(json.loads(args.worker))
        if not facts.pop("rank"):
            print(json.dumps(facts))
        return
    args.torch_python = args.torch_python or torch_environment()
    print(headline(machine()))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            if args.only in row[0]:
                found += measured(row, args, Path(folder))
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine(), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
