"""Steps divided in every way, beside one rank: tensor, sequence, context, expert and pipeline parallel, and mixes.

    python benchmarks/mesh_bits.py [--steps 3] [--lockstep] [--only gpt2-tiny] [--json FILE]

For each network and mesh: the largest relative difference of the losses from those of one rank with the same
micro-batches (0: the same bits), and each rank's predicted and measured peak, which must be the same number.  2 and 4
ranks are processes with MPI; `--lockstep` runs 16 ranks in one process, where there is nothing to measure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from zoo_steps import headline, machine

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh

BATCH, PIECES = 16, 4
NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2-tiny": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 64, "seq": 16},
    "llama-tiny": {"layers": 4, "hidden": 32, "inner": 64, "heads": 4, "groups": 4, "vocab": 64, "seq": 16},
    "moe-tiny": {},
    "resnet18": {"width": 8, "blocks": (1, 1, 1, 1), "image": 16, "classes": 4},
}
#: by number of ranks: mesh, options
MESHES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [("tp=2", {}), ("tp=2", {"sequence": False}), ("cp=2", {}), ("ep=2", {}), ("pp=2", {}),
        ("pp=2", {"schedule": "zb"})],
    4: [("dp=2,tp=2", {}), ("tp=4", {}), ("tp=2,pp=2", {}), ("dp=2,pp=2", {"schedule": "gpipe"}),
        ("pp=2,tp=2", {"schedule": "interleaved", "chunks": 2}), ("pp=4", {}), ("dp=2,ep=2", {})],
    16: [("dp=2,pp=4,tp=2", {}), ("dp=4,pp=2,tp=2", {"sequence": False}), ("pp=4,tp=4", {"schedule": "zb"})],
}  # fmt: skip


def fits(network: str, mesh: str) -> bool:
    """Whether there is something to divide along every axis."""
    if "ep=" in mesh:
        return network == "moe-tiny"
    return network != "resnet18" or ("cp=" not in mesh)


def step(network: str, mesh: Mesh, rank: int, options: dict[str, Any]) -> rc.Program:
    """A rank's step."""
    program = rc.load(rc.models.build(network, seed=0, **NETWORKS[network]), batch=BATCH)
    loss = rc.losses.cross_entropy(program["logits"])
    found = rc.DataParallel(rc.Adam(1e-3, epsilon=1e-3), mesh, rank, micro_batches=PIECES, batch=BATCH, **options)
    found.minimize(loss)
    return program


def feeds(program: rc.Program, mesh: Mesh, ranks: list[int], steps: int) -> Iterator[list[dict[str, np.ndarray]]]:
    """What these ranks are fed in each step."""
    draw, share = np.random.default_rng(3), dict(mesh.axes).get("dp", 1)
    whole = {v.name: v for v in program.block.inputs}
    for _ in range(steps):
        every: list[dict[str, np.ndarray]] = [{} for _ in ranks]
        for name, v in whole.items():
            drawn = (
                draw.standard_normal((BATCH, *v.shape[1:]))
                if v.type.is_float
                else draw.integers(0, 4, (BATCH, *v.shape[1:]))
            )
            for rank, feed in zip(ranks, every, strict=True):
                low = (mesh.coordinate(rank, "dp") if share > 1 else 0) * BATCH // share
                feed[name] = drawn[low : low + BATCH // share].astype(v.type.numpy)
        yield every


def worker(ranks: int, steps: int, only: str) -> None:
    """All settings on one rank; rank 0 prints those of all."""
    for network in NETWORKS:
        for text, options in MESHES[ranks] if ranks > 1 else [("dp=1", {})]:
            if not fits(network, text) or only not in network:
                continue
            mesh = Mesh.parse(text)
            executor = rc.Executor(mesh=text)
            program = step(network, mesh, executor.rank, options)
            loss = program.loss
            losses = [
                float(executor.run(program, given, [loss])[0])
                for (given,) in feeds(program, mesh, [executor.rank], steps)
            ]
            session = executor.session(program, (loss,))
            own = {"losses": losses, "predicted": session.report.peak, "measured": session.measured_peak_bytes}
            every = [own]
            if ranks > 1:
                from mpi4py import MPI

                every = MPI.COMM_WORLD.allgather(own)
            if executor.rank == 0:
                print(json.dumps({"network": network, "mesh": text, "options": options, "ranks": every}), flush=True)


def runs(ranks: int, steps: int, only: str) -> list[dict[str, Any]]:
    """What `worker` prints on so many processes."""
    command = [sys.executable, __file__, "--worker", str(ranks), "--steps", str(steps), "--only", only]
    if ranks > 1:
        command = [sys.executable, "-m", "recompute.launch", "--nproc", str(ranks), *command[1:]]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def in_step(steps: int, only: str) -> list[dict[str, Any]]:
    """16 ranks in one process."""
    found = []
    for network in NETWORKS:
        for text, options in MESHES[16]:
            if not fits(network, text) or only not in network:
                continue
            mesh = Mesh.parse(text)
            programs = [step(network, mesh, r, options) for r in range(mesh.ranks)]
            blocks = [p.block for p in programs]
            data = [
                {v.name: np.array(p.data[v.name]) for v in (*b.parameters, *b.buffers, *b.state)}
                for p, b in zip(programs, blocks, strict=True)
            ]
            ranks, loss = LockStep(blocks, mesh, data), programs[0].loss
            losses: list[list[float]] = [[] for _ in blocks]
            for given in feeds(programs[0], mesh, list(range(mesh.ranks)), steps):
                for own, result in zip(losses, ranks.run(given), strict=True):
                    own.append(float(result[loss]))
            found.append(
                {"network": network, "mesh": text, "options": options, "ranks": [{"losses": x} for x in losses]}
            )
    return found


def main() -> None:
    """Runs and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lockstep", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    parser.add_argument("--worker", type=int)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.steps, args.only)
        return
    print(headline(machine()))
    one = {r["network"]: r["ranks"][0]["losses"] for r in runs(1, args.steps, args.only)}
    rows = in_step(args.steps, args.only) if args.lockstep else [
        r for n in (2, 4) for r in runs(n, args.steps, args.only)
    ]  # fmt: skip
    wrong = 0
    for r in rows:
        own = np.array(one[r["network"]])
        far = max(float(np.max(np.abs(np.array(e["losses"]) - own) / np.abs(own))) for e in r["ranks"])
        exact = all(e.get("predicted") == e.get("measured") for e in r["ranks"])
        wrong += not (far <= 1e-5 and exact)
        what = r["mesh"] + "".join(f" {k}={v}" for k, v in r["options"].items())
        near = "the same bits " if far == 0 else f"within {far:.0e}"
        peaks = "" if args.lockstep else "  peaks " + ", ".join(f"{e['measured']:,}" for e in r["ranks"])
        print(f"{r['network']:10} {what:42} {len(r['ranks']):2} ranks  losses: {near}{peaks}"
              f"{'' if args.lockstep else ' as predicted' if exact else ' NOT AS PREDICTED'}")  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    print(f"{len(rows)} runs, {wrong} of them further than 1e-5 from one rank, or with another peak than predicted")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
