"""Builds the library of a step in a process of its own, and trains the same step there: see exporter/test_library.py.

NETWORK HOW BATCH TARGET CPU FOLDER: the library goes to the folder, and beside it a batch (`batch.bin`, the inputs one
behind the other) and `facts.json`: the predicted peak, and the Executor's losses, where this process can run
the code.  Target "none": only the facts, of the kernels of an ordinary process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import recompute as rc
from recompute.compiling.compiler import checkpoint_candidates
from recompute.data.batches import synthetic_batch
from recompute.passes import memory_report
from recompute.runtime.cpu.device import native

STEPS = 4


def made(network: str, how: str, batch: int) -> tuple[Any, str]:
    """The compiled step, and its loss."""
    program = rc.load(rc.models.build(network), batch=batch)
    loss = rc.losses.cross_entropy(program).name
    options: dict[str, Any] = {}
    if how == "checkpoints":
        names = [c.value.name for c in checkpoint_candidates(program.block)[0]]
        options["checkpoints"] = names[:: max(1, len(names) // 3)]
    optimizer: Any = rc.Adam(1e-3)
    if how == "budget":  # most of lenet's plain step is its state, if there is any
        few = network == "lenet"
        options["budget"], optimizer = ("95%", rc.SGD(0.01)) if few else ("92%", rc.Momentum(0.01))
    return rc.compile_step(program, loss, optimizer, **options), loss


def losses(step: Any, loss: str, feed: Any) -> list[float]:
    """Of the steps, an evaluation, and one more step."""
    executor = rc.Executor()
    found = [executor.run(step.program, feed, [loss])[0].item() for _ in range(STEPS)]
    tested = step.program.for_test()
    fed = {v.name: feed[v.name] for v in tested.inputs}
    found.append(executor.run(tested, fed, [loss])[0].item())
    return [*found, executor.run(step.program, feed, [loss])[0].item()]


def main() -> None:
    """The script."""
    network, how, batch, target, cpu, where = sys.argv[1:7]
    folder = Path(where)
    if target != "none":
        rc.build_for(target, cpu.removesuffix("+portable"), portable=cpu.endswith("+portable"))
    step, loss = made(network, how, int(batch))
    feed = synthetic_batch(step.program, 0, {s.name: s for s in rc.models.info(network).inputs})
    facts: dict[str, Any] = {"peak": step.figures.peak_bytes, "recomputed": step.figures.recomputed_operators}
    if target != "none":
        rc.write_library(step.program, folder)
        tested = step.program.for_test(outputs=[loss])
        facts["arenas"] = step.figures.arena_bytes, memory_report(rc.Executor().planned(tested)).arena
        (folder / "batch.bin").write_bytes(b"".join(feed[v.name].tobytes() for v in step.program.inputs))
    if target == "none" or native.toolchain().runs:
        facts["losses"] = losses(step, loss, feed)
        facts["bits"] = [f"{np.float32(x).view(np.uint32):08x}" for x in facts["losses"]]
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
