"""Sizes and times of steps as libraries (docs/library.md), beside the Executor's on the same kernels and one thread.

python benchmarks/library.py [NETWORK ...]

Times are processor milliseconds: the median of a step, in C and by the Executor, the least of three processes each,
which take turns; the start is a process in C that reads the weights and takes one step.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: network → batch and steps that are timed
NETWORKS = {
    "lenet": (4, 300),
    "ds_cnn": (4, 300),
    "mobilenet_v2": (2, 9),
    "lstm": (16, 300),
    "bert-tiny": (4, 41),
    "gpt2-tiny": (4, 41),
    "lora": (1, 41),  # adapters of rank 8 beside the packed weights of a small LLaMA in 4 bits (few_bits.py --small)
}
HERE = Path(__file__).parent


def build(network: str, target: str, cpu: str, folder: str) -> None:
    """Writes a library, and the Executor's time beside it."""
    import few_bits
    import numpy as np

    import recompute as rc
    from recompute.runtime.cpu.device import native

    rc.build_for(target, cpu)
    batch, steps = NETWORKS[network]
    if network == "lora":
        few_bits.write(Path(folder, "model.onnx"), few_bits.SMALL)
        program = rc.lora(rc.load(Path(folder, "model.onnx"), batch=batch), ["*q_proj*", "*v_proj*"], r=8)
    else:
        program = rc.load(rc.models.build(network), batch=batch)
    loss = rc.losses.cross_entropy(program).name
    step = rc.compile_step(program, loss, rc.Adam(1e-3))
    rc.write_library(step.program, folder)
    facts = {"peak": step.figures.peak_bytes, "batch": batch, "weights": step.figures.persistent_bytes}
    if native.toolchain().runs:
        session, times = rc.Executor().session(step.program), []
        for _ in range(steps):
            for v in step.program.inputs:
                session.feed(v.name, np.zeros(v.shape, v.value.type.numpy))
            begin = time.process_time()
            session.run()
            times.append(time.process_time() - begin)
        facts["executor"] = sorted(times)[steps // 2] * 1e3
    Path(folder, "facts.json").write_text(json.dumps(facts))


def built(network: str, target: str, cpu: str, folder: str) -> dict[str, float]:
    """The same in a process of its own; the facts."""
    command = [sys.executable, __file__, "--build", network, target, cpu, folder]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(Path(folder, "facts.json").read_text())


def started(command: list[str]) -> float:
    """Processor milliseconds of a process, the least of five."""
    found = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found) * 1e3


def row(network: str) -> str:
    """A row of the table."""
    sizes = {}
    for target, cpu, file in (
        ("x86_64", "x86-64-v3", "libstep.so"),
        ("aarch64", "generic", "libstep.so"),
        ("wasm32", "simd128", "step.wasm"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            built(network, target, cpu, folder)
            sizes[target] = Path(folder, file).stat().st_size
    ours, theirs, first = [], [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            facts = built(network, "x86_64", "native", folder)
            program = f"{folder}/time"
            files = [str(HERE / "library.c"), f"{folder}/libstep.a"]
            subprocess.run(["cc", "-O2", f"-I{folder}", *files, "-lm", "-o", program], check=True)
            given = [program, f"{folder}/step.safetensors"]
            first.append(started([*given, "1"]))
            run = subprocess.run([*given, str(NETWORKS[network][1])], check=True, capture_output=True, text=True)
            ours.append(float(run.stdout))
            theirs.append(facts["executor"])
    kib = " | ".join(f"{n / 1024:.0f}" for n in sizes.values())
    return (
        f"| {network}, batch {facts['batch']} | {facts['peak']:,} | {kib} | {min(first):.1f} | {min(ours):.2f} | "
        f"{min(theirs):.2f} |"
    )


def main() -> None:
    """The script."""
    print("| network | memory (bytes) | x86-64 (KiB) | AArch64 | WebAssembly | start (ms) | step in C | Executor |")
    print("|---|---|---|---|---|---|---|---|")
    for network in sys.argv[1:] or NETWORKS:
        print(row(network), flush=True)


if __name__ == "__main__":
    build(*sys.argv[2:]) if sys.argv[1:2] == ["--build"] else main()
