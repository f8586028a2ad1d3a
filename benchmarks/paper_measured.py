"""Steps that recompute beside plain ones, on the processors of this machine: what docs/papers shows as measured.

    python benchmarks/paper_measured.py gruslys        an LSTM of up to 1,000 steps in 5 % of its activations
    python benchmarks/paper_measured.py feng-huang     18 networks at the published shares of the plain step's peak
    ... --rounds 5 --only resnet50 nasnet

Both steps are compiled in one process and take turns; times are the medians over rounds, `more` the median of the
ratios of a round less 1.  They begin with the same weights, and `bits` says whether losses and parameters are equal to
the bit after as many steps.  Rows are added to benchmarks/results/paper_measured.jsonl, those that are there are kept.

`gruslys`: one LSTM operator of 64 units and 64 samples a step of the sequence; 5 % of all that the plain step has
beside its inputs, parameters and optimizer state.  Its gates begin open for the whole length (Tallec & Ollivier 2018,
arXiv 1804.11188): else gradients of early steps are subnormal numbers, whose products take 200 times as long.

`feng-huang`: an eighth of the published batch, as a step takes seconds here, or the next larger part at which gradients
of weights, which do not depend on the batch, leave a plan; the budget is the published share of the
default step's peak without weights, or ours where that is larger (alexnet, vgg11: what is published is out of reach
there, see seed_tables.txt).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from paper_pictures import feng_huang_rows
from planning_seconds import lstm
from seed_rows import ROWS
from zoo_steps import machine

import recompute as rc
from recompute.compiling.compiler import CompiledStep, compile_step
from recompute.compiling.steps import attach_loss
from recompute.data.batches import synthetic_batch

PATH = Path(__file__).parent / "results" / "paper_measured.jsonl"
LENGTHS, SHARE = (100, 200, 400, 700, 1000), 0.05
#: published batches are divided by the first of these at which there is a plan
SCALES = (8, 4, 2, 1)

Make = Callable[[], tuple[rc.Program, str]]


class Running:
    """A compiled step and its feed."""

    def __init__(self, step: CompiledStep, loss: str) -> None:
        self.step, self.loss, self.executor = step, loss, rc.Executor()
        self.feed = synthetic_batch(step.program, 0)
        self.losses: list[bytes] = []

    def take(self) -> float:
        """Seconds of a step."""
        start = time.perf_counter()
        (loss,) = self.executor.run(self.step.program, self.feed, [self.loss])
        self.losses.append(loss.tobytes())
        return time.perf_counter() - start

    def digest(self) -> str:
        """Losses and parameters."""
        found = hashlib.sha256(b"".join(self.losses))
        for v in self.step.program.block.parameters:
            found.update(self.step.program.data[v.name].tobytes())
        return found.hexdigest()


def beside(make: Make, share: float, rounds: int) -> dict[str, Any]:
    """A plain step and one within a share of what it has beside inputs, parameters and state."""
    steps = []
    for budget in (None, share):
        program, loss = make()
        if budget is not None:
            block = steps[0].step.program.block
            always = sum(v.nbytes for v in (*block.persistent(), *block.inputs))
            budget = always + int(share * (steps[0].step.figures.peak_bytes - always))
        step = compile_step(program, loss, rc.Momentum(0.001), budget=budget, slicing=False)
        steps.append(Running(step, loss))
    plain, planned = steps
    for running in steps:
        running.take()
    seconds = np.array([[running.take() for running in steps] for _ in range(rounds)])
    for running in steps:
        peak = running.executor.session(running.step.program, [running.loss]).measured_peak_bytes
        assert peak == running.step.figures.peak_bytes, (peak, running.step.figures.peak_bytes)
    return {
        "share": round(share, 3), "batch": plain.step.program.block.inputs[-1].shape[0],
        "plain_peak": plain.step.figures.peak_bytes, "peak": planned.step.figures.peak_bytes,
        "plain_seconds": float(np.median(seconds[:, 0])), "seconds": float(np.median(seconds[:, 1])),
        "more": float(np.median(seconds[:, 1] / seconds[:, 0])) - 1,
        "recomputed": planned.step.figures.recomputed_operators,
        "operators": len(plain.step.program.block.operators),
        "bits": plain.digest() == planned.digest(),
    }  # fmt: skip


def gruslys() -> Iterator[tuple[dict[str, Any], list[Make], float]]:
    """Key, step and share of each length."""
    for length in LENGTHS:

        def make(length: int = length) -> tuple[rc.Program, str]:
            program, loss = lstm(length)
            draw = np.random.default_rng(0)
            for v in program.block.parameters:
                program.data[v.name] = draw.uniform(-0.125, 0.125, v.shape).astype(np.float32)
            gates = program.data["lstm.bias"][0, : 3 * 64].reshape(3, 64)  # input, output, forget
            gates[2] = np.log(length)
            gates[0] = -gates[2]
            return program, loss

        yield {"table": "gruslys", "length": length}, [make], SHARE


def feng_huang() -> Iterator[tuple[dict[str, Any], list[Make], float]]:
    """Key, steps of several batches and share of each network."""
    options = {row.network: row.options for row in ROWS if row.table == "feng-huang"}
    for row in feng_huang_rows():

        def make(scale: int, name: str = row["network"], batch: int = row["batch"]) -> tuple[rc.Program, str]:
            program = rc.load(rc.models.build(name, batch=max(2, batch // scale), **options[name]))
            return program, attach_loss(program, None)[0]

        share = max(row["their_share"], row["our_share"])
        makes = [partial(make, scale) for scale in SCALES]
        yield {"table": "feng-huang", "network": row["network"]}, makes, share


def main() -> None:
    """Measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("gruslys", "feng-huang"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="NETWORK")
    options = parser.parse_args()
    rows = [json.loads(line) for line in PATH.read_text().splitlines()] if PATH.exists() else []
    for key, makes, share in (gruslys if options.table == "gruslys" else feng_huang)():
        if any(key.items() <= row.items() for row in rows) or (options.only and key["network"] not in options.only):
            continue
        for make in makes:
            try:
                row = beside(make, share, options.rounds)
                break
            except rc.BudgetError as e:
                row = {"refused": str(e)}
        with PATH.open("a") as file:
            file.write(json.dumps({**key, **row, **machine()}) + "\n")
        print(*key.values(), {k: v for k, v in row.items() if k not in key}, flush=True)


if __name__ == "__main__":
    main()
