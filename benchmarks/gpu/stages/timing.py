"""Steps beside PyTorch's, several processes at a time on the host, one at a time on the device.

timing.py [ROW...]      beginnings of rows' names (all); --compile: PyTorch's compiled steps alone, which wait at a
                        gate; --cudnn: ours alone, as rows of their own
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import sys
from typing import Any

from common import FAKE, WORK, emit
from gpu_rows import STAGED, ask, wanted

TOGETHER, LIMIT = 6, 110.0


def jobs(rows: list[str], kind: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(name of the result, script, job) of all that is measured."""
    shared = {"do": "step", "lock": str(WORK / "device.lock"), "kernels": True}
    found = []
    for row, variants in STAGED:
        if not wanted(row.title, rows):
            continue
        job = {**shared, "row": dataclasses.asdict(row)}
        if kind != "compile":
            found.append((f"{row.title} ours{' cudnn' * (kind == 'cudnn')}", "gpu_ours.py", {**job, "variant": "ours"}))
        for v in () if kind == "cudnn" or FAKE else variants:
            if (v == "compile") == (kind == "compile"):
                gate = {"gate": str(WORK / "gate")} if v == "compile" else {}
                found.append((f"{row.title} {v}", "gpu_torch.py", {**job, **gate, "variant": v}))
    return found


def measure(job: tuple[str, str, dict[str, Any]]) -> None:
    """One of them, in a process of its own."""
    name, script, words = job
    threads = {"OMP_NUM_THREADS": "3", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    found = ask(script, words, {**os.environ, **threads}, LIMIT * (4 if words.get("gate") else 1))
    right = found.get("predicted_peak") == found.get("measured_peak") and not found.get("error")
    if name.endswith(" cudnn") and right:  # another provider's times are no news
        right = any(kernel.split()[-1].startswith("cudnn") for kernel in found["top_ms"])
    emit("timing", name, ok=right, **found)


kinds = [a.removeprefix("--") for a in sys.argv[1:] if a.startswith("--")]
with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
    list(pool.map(measure, jobs([a for a in sys.argv[1:] if not a.startswith("--")], kinds[0] if kinds else "")))
