"""Small networks: the CPU's losses, the same bits again and without graphs, and the memory that was planned.

networks.py [NAME...]        on the device: those whose names begin so (all)
networks.py --expect         without one: writes the CPU's losses to carry/expected.json
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from common import CARRY, case
from gpu_ours import Feed, small, used
from gpu_rows import SMALL, wanted

import recompute as rc

STEPS, FILE = 4, CARRY / "expected.json"
#: bytes that a process takes beside the plan: cuBLAS's workspace, kernels' code, whole pages of each allocation
BESIDE = 192 << 20
#: how near the losses are to the CPU's in float32
NEAR = {"fp32": 2e-4, "tf32": 4e-3, "bf16": 4e-2, "fp16": 1e-2}
#: the networks whose bits are those of the first one, which nothing is done to
SAME = ("bert-tiny", "bert-tiny recomputed", "bert-tiny offload")


def digest(data: Mapping[str, np.ndarray]) -> str:
    """Names the bits of arrays."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(data[n]).tobytes() for n in sorted(data))).hexdigest()[:16]


def begun(step: Any, feed: Feed) -> str:
    """Names the weights and the batch."""
    return digest({**{p.name: step.program.data[p.name] for p in step.program.parameters}, **feed})


def expect() -> None:
    """The CPU's losses, of all networks in float32."""
    found = {}
    for name, row in SMALL.items():
        step, loss, feed = small(row, rc.CPUPlace(), "fp32")
        given, executor = begun(step, feed), rc.Executor()
        losses = [float(executor.run(step.program, feed, [loss])[0]) for _ in range(STEPS)]
        found[name] = {"losses": losses, "begun": given}
    CARRY.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def trained(step: Any, loss: str, feed: Feed, graphs: bool = True) -> tuple[list[float], str, Any]:
    """Losses, the bits of all state, and the session."""
    program, executor = step.program.clone(), rc.Executor(rc.CUDAPlace(0))
    session = executor.session(program, [loss])
    session.device.graphs = graphs
    try:
        losses = [float(executor.run(program, feed, [loss])[0]) for _ in range(STEPS)]
    finally:
        session.device.graphs = True
    return losses, digest({n: np.array(a) for n, a in program.data.items()}), session


def compare(name: str, expected: dict[str, Any], found: dict[str, Any]) -> str:
    """Fills in what was found of a network; the bits of its state."""
    row, place = SMALL[name], rc.CUDAPlace(0)
    begin = time.perf_counter()
    step, loss, feed = small(row, place)
    found["plan_seconds"] = round(time.perf_counter() - begin, 2)
    found["same_begin"] = begun(step, feed) == expected["begun"]
    gc.collect()
    before, begin = used(place), time.perf_counter()
    losses, bits, session = trained(step, loss, feed)
    found["run_seconds"] = round(time.perf_counter() - begin, 2)
    found |= {"device_bytes": used(place) - before, "planned_bytes": session.report.arena + session.persistent_bytes,
              "as_planned": session.measured_peak_bytes == step.figures.peak_bytes,
              "on_host": [o.op.name for o in session.on_host], "graphs": [len(s) for s in session._segments or ()],
              "launches": sum(len(s.calls) for s in session.steps)}  # fmt: skip
    del session
    gc.collect()
    found["same_bits_again"] = (losses, bits) == trained(step, loss, feed)[:2]
    found["same_bits_without_graphs"] = (losses, bits) == trained(step, loss, feed, graphs=False)[:2]
    compared = 1 if row.precision == "fp16" else STEPS
    pairs = list(zip(losses, expected["losses"], strict=True))[:compared]
    deviation = max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)
    found |= {
        "losses": losses,
        "cpu": expected["losses"],
        "deviation": deviation,
        "near": deviation <= NEAR[row.precision],
    }
    found["as_measured"] = found["device_bytes"] - found["planned_bytes"] < BESIDE
    checks = ("same_begin", "near", "same_bits_again", "same_bits_without_graphs", "as_planned", "as_measured")
    found["ok"] = all(found[k] for k in checks)
    return bits


def main(names: list[str]) -> None:
    """The networks whose names begin so, or all."""
    bits, expected = {}, json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in [n for n in SMALL if wanted(n, names)]:
        with case("networks", name) as found:
            assert name in expected, f"{FILE.name} has no losses of it: staged prepare writes them"
            bits[name] = compare(name, expected[name], found)
    if set(SAME) <= set(bits):
        with case("networks", "recomputation and offload change no bit") as found:
            found["ok"] = len({bits[n] for n in SAME}) == 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--expect"]:
        expect()
    else:
        main(sys.argv[1:])
