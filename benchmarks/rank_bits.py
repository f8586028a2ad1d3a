"""The same bits on 1, 2 and 4 processes: ResNet-18, BERT and GPT-2 (tiny), data parallel and ZeRO 1 to 3.

    python benchmarks/rank_bits.py [--steps 10] [--json FILE]

For each setting: a hash of parameters and state after the last step, which must be the same in all runs; for each rank
the predicted and the measured peak, which must be the same number, and by how much the resident set of the process has
grown at its highest while steps ran (MPI's memory, and what else is not planned).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from zoo_steps import headline, machine

import recompute as rc
from recompute.runtime.communication.memory import ResidentGrowth
from recompute.training.parts import parts_of, stored

BATCH, PIECES = 16, 4
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet18": {"width": 8, "image": 32, "classes": 10},
    "bert-tiny": {},
    "gpt2-tiny": {},
}
SETTINGS = ("", "checkpoints", "merge", "bf16", "fp16 clip checkpoints merge")


def optimizer(options: str, names: list[str], ranks: int) -> Any:
    """Adam with what the words of `options` say."""
    found: Any = rc.Adam(1e-3, grad_clip=rc.clip.ClipGradByGlobalNorm(1.0) if "clip" in options else None)
    for precision in ("bf16", "fp16"):
        if precision in options:
            found = rc.MixedPrecision(found, precision)
    if "merge" in options and ranks < PIECES:
        found = rc.GradientMerge(found, PIECES // ranks)
    if "checkpoints" in options:
        found = rc.RecomputeOptimizer(found).set_checkpoints(names)
    return found


def setting(network: str, options: str, zero: int, steps: int, executor: rc.Executor, ranks: int) -> dict[str, Any]:
    """One rank's run."""
    rank = executor.rank
    program = rc.load(rc.models.build(network, seed=0, **NETWORKS[network]), batch=BATCH)
    names = list(rc.models.info(network, **NETWORKS[network]).checkpoints)
    loss = rc.losses.cross_entropy(program["logits"])
    wrapped = rc.DataParallel(
        optimizer(options, names, ranks), rc.Mesh.of(dp=ranks), rank, zero=zero, micro_batches=PIECES, batch=BATCH
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rc.RecomputeWarning)
        wrapped.minimize(loss)
    draw = np.random.default_rng(0)
    own = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    feed = {}
    for v in program.block.inputs:
        whole = (BATCH, *v.shape[1:])
        if v.type.is_float:
            array = draw.standard_normal(whole)
        else:
            array = draw.integers(0, 2 if v.name == "label" and network != "gpt2-tiny" else 100, whole)
            array = np.minimum(array, 1) if "mask" in v.name or "type" in v.name else array
        feed[v.name] = array.astype(v.type.numpy)[own]
    with ResidentGrowth() as growth:
        losses = [float(executor.run(program, feed, [loss])[0]) for _ in range(steps)]
    session = executor.session(program, (loss.name,))
    return {"losses": losses, "hash": whole_hash(program, ranks), "predicted": session.report.peak,
            "measured": session.measured_peak_bytes, "growth": growth.peak}  # fmt: skip


def whole_hash(program: Any, ranks: int) -> str:
    """A hash of parameters and state, which ranks may have in parts."""
    own = {v.name: np.array(program.data[v.name]) for v in stored(program)}
    every, parts = [own], parts_of(program)
    if ranks > 1:
        from mpi4py import MPI

        every = MPI.COMM_WORLD.allgather(own)
    digest = hashlib.sha256()
    for name in sorted(own):
        array = own[name]
        if name in parts:
            array = parts[name].joined([e[name] for e in every])
        else:
            assert all(np.array_equal(array, e[name]) for e in every), name
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()[:16]


def worker(ranks: int, steps: int) -> None:
    """All settings on one rank; rank 0 prints those of all."""
    executor = rc.Executor(mesh=f"dp={ranks}") if ranks > 1 else rc.Executor()
    for network in NETWORKS:
        for options in SETTINGS:
            for zero in (0,) if ranks == 1 else (0, 1, 2, 3):
                found = setting(network, options, zero, steps, executor, ranks)
                every = [found]
                if ranks > 1:
                    from mpi4py import MPI

                    every = MPI.COMM_WORLD.allgather(found)
                if every[0] is found or executor.rank == 0:
                    facts = {"network": network, "options": options, "zero": zero, "ranks": every}
                    print(json.dumps(facts), flush=True)


def runs(ranks: int, steps: int) -> list[dict[str, Any]]:
    """What `worker` prints on so many processes."""
    command = [sys.executable, __file__, "--worker", str(ranks), "--steps", str(steps)]
    if ranks > 1:
        command = [sys.executable, "-m", "recompute.launch", "--nproc", str(ranks), *command[1:]]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Runs and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json")
    parser.add_argument("--worker", type=int)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.steps)
        return
    print(headline(machine()))
    wanted = {(r["network"], r["options"]): r["ranks"][0] for r in runs(1, args.steps)}
    for (network, options), own in wanted.items():
        print(f"{network:10} {options or 'plain':28} 1 rank            {own['hash']}  peak {own['measured']:>11,}")
    found = []
    for ranks in (2, 4):
        for r in runs(ranks, args.steps):
            own = wanted[r["network"], r["options"]]
            same = all((e["hash"], e["losses"]) == (own["hash"], own["losses"]) for e in r["ranks"])
            exact = all(e["predicted"] == e["measured"] for e in r["ranks"])
            found.append({**r, "same": same, "exact": exact})
            peak, growth = (max(e[k] for e in r["ranks"]) for k in ("measured", "growth"))
            print(
                f"{r['network']:10} {r['options'] or 'plain':28} {ranks} ranks, zero {r['zero']}   "
                f"{'the same bits' if same else 'OTHER BITS':13}     peak {peak:>11,}"
                f"{' as predicted' if exact else ' NOT AS PREDICTED'}, resident set +{growth / 2**20:.1f} MiB"
            )
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine(), "rows": found}, indent=1))
    if not all(f["same"] and f["exact"] for f in found):
        raise SystemExit(1)
    print(f"{len(found)} runs of 2 and 4 ranks: the bits of one rank, and each rank's peak as predicted")


if __name__ == "__main__":
    main()
