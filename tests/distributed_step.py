"""What each rank of a job runs in tests: a few steps of data parallelism; its results go to FOLDER/RANK.json.

    python -m recompute.launch --nproc 2 tests/distributed_step.py PLACE FOLDER [NAME=VALUE...]

mesh=dp2.tp2 (default: all ranks along dp), zero=0..3, graphs=0 (every launch for itself), network=NAME,
precision=bf16, steps=N, die=N (the last rank is killed before its step N).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import recompute as rc
from recompute.communication.mesh import Mesh
from recompute.places import as_place
from recompute.training.parallel import DataParallel

NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "gpt2-tiny": {"layers": 1, "hidden": 8, "heads": 2, "vocab": 20, "seq": 4},
    "resnet18": {"width": 4, "blocks": (1, 1, 1, 1), "image": 16, "classes": 3},
}
BATCH = 8


def made(ranks: int, rank: int, options: dict[str, str]) -> tuple[rc.Program, str]:
    """The step of one rank."""
    name = options.get("network", "mlp")
    program = rc.load(rc.models.build(name, **NETWORKS[name]), batch=BATCH)
    loss = rc.losses.cross_entropy(program["pred.logits" if name == "mlp" else "logits"])
    optimizer: Any = rc.Adam(1e-2)
    if "precision" in options:
        optimizer = rc.MixedPrecision(optimizer, options["precision"])
    zero = int(options.get("zero", "0"))
    mesh = mesh_of(ranks, options)
    pieces = 4 if mesh.axes == (("dp", ranks),) else None
    DataParallel(optimizer, mesh, rank, zero=zero, micro_batches=pieces, batch=BATCH).minimize(loss)
    return program, loss.name


def mesh_of(ranks: int, options: dict[str, str]) -> Mesh:
    """The mesh, from a text such as dp2.tp2."""
    text = options.get("mesh", f"dp{ranks}")
    return Mesh.parse(",".join(f"{axis[:2]}={axis[2:]}" for axis in text.split(".")))


def batches(program: rc.Program, ranks: int, rank: int, count: int) -> list[dict[str, np.ndarray]]:
    """This rank's rows of the same numbers, whatever the number of ranks."""
    draw, found = np.random.default_rng(3), []
    for _ in range(count):
        feed = {}
        for v in program.block.inputs:
            shape = (v.shape[0] * ranks, *v.shape[1:])
            whole = draw.standard_normal(shape) if v.type.is_float else draw.integers(0, 2, shape)
            feed[v.name] = whole[rank * v.shape[0] : (rank + 1) * v.shape[0]].astype(v.type.numpy)
        found.append(feed)
    return found


def main(place: str, folder: str, *pairs: str) -> None:
    """Runs the rank of this process."""
    from mpi4py import MPI

    options = dict(p.split("=") for p in pairs)
    ranks, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    program, loss = made(ranks, rank, options)
    mesh = mesh_of(ranks, options)
    executor = rc.Executor(as_place(place), mesh=mesh)
    session = executor.session(program, [loss])
    if options.get("graphs") == "0":
        session.device.graphs = False
    losses = []
    parallel = dict(mesh.axes).get("dp", 1)
    row = mesh.coordinate(rank, "dp") if parallel > 1 else 0
    for i, feed in enumerate(batches(program, parallel, row, int(options.get("steps", "4")))):
        if str(i) == options.get("die") and rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(float(executor.run(program, feed, [loss])[0]))
    b = program.block
    arrays = {v.name: program.data[v.name] for v in (*b.parameters, *b.buffers, *b.state)}
    result = {
        "losses": losses,
        "state": hashlib.sha256(b"".join(n.encode() + arrays[n].tobytes() for n in sorted(arrays))).hexdigest(),
        "peak": [session.report.peak, session.measured_peak_bytes],
        "libraries": getattr(session, "library_bytes", 0),
        "on_host": [o.op.name for o in getattr(session, "on_host", ())],
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
