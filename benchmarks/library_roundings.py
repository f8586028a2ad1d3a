"""How far roundings carry the losses of MobileNet-v2 at a batch of 2 (docs/library.md): five steps of each arithmetic.

python benchmarks/library_roundings.py  # needs clang, lld and node; minutes

One line each for SGD and Adam: float64 (by NumPy), this processor's kernels, the same with every pixel moved by its
last bit, kernels for AVX2, NumPy in float32, and WebAssembly.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
KINDS = ("float64", "processor", "moved", "avx2", "numpy", "webassembly")
STEPS = 5


def losses(kind: str, rule: str) -> list[float]:
    """The losses of one arithmetic, in a process of its own."""
    import recompute as rc
    from recompute.data.batches import synthetic_batch
    from recompute.testing import in_float64

    if kind in ("avx2", "webassembly"):
        rc.build_for(*(("x86_64", "x86-64-v3") if kind == "avx2" else ("wasm32",)))
    program = rc.load(rc.models.build("mobilenet_v2"), batch=2)
    loss = rc.losses.cross_entropy(program).name
    feed = synthetic_batch(program, 0, {s.name: s for s in rc.models.info("mobilenet_v2").inputs})
    if kind == "moved":
        feed["x"] = np.nextafter(feed["x"], np.float32(np.inf))
    if kind == "float64":
        program, feed["x"] = in_float64(program), feed["x"].astype(np.float64)
    options: dict[str, Any] = {"providers": ()} if kind == "numpy" else {}
    step = rc.compile_step(program, loss, rc.Adam(1e-3) if rule == "Adam" else rc.SGD(0.01), **options)
    if kind == "webassembly":
        return in_node(step.program, feed)
    executor = rc.Executor(**options)
    return [executor.run(step.program, feed, [loss])[0].item() for _ in range(STEPS)]


def in_node(program: Any, feed: dict[str, np.ndarray]) -> list[float]:
    """The losses of the library."""
    import recompute as rc

    with tempfile.TemporaryDirectory() as folder:
        rc.write_library(program, folder)
        Path(folder, "batch.bin").write_bytes(b"".join(feed[v.name].tobytes() for v in program.inputs))
        command = ["node", str(HERE.parent / "tests" / "library_check.mjs"), folder, str(STEPS)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [float(x) for x in shown[:STEPS]]


def main() -> None:
    """The script."""
    for rule in ("SGD", "Adam"):
        for kind in KINDS:
            command = [sys.executable, __file__, kind, rule]
            print(rule, subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip(), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(sys.argv[1], *(f"{x:.9g}" for x in losses(*sys.argv[1:])))
    else:
        main()
