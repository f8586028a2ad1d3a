"""Which results depend on the number of threads: none but those of the operators that runtime/cpu names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recompute.runtime.cpu import BITS_BY_THREADS
from recompute.runtime.cpu.device import dnnl, native

#: runs a step operator by operator: (operator, kernel, hash of what it reads, hash of what it writes)
SCRIPT = """
import hashlib, json, sys
import numpy as np
import recompute as rc
from recompute.runtime.cpu.session import segments

name, options, providers = json.loads(sys.argv[1])
program = rc.load(rc.models.build(name, **options))
loss = rc.losses.cross_entropy(program[program.block.outputs[0]])
rc.SGD(0.01).minimize(loss)
executor = rc.Executor(providers=providers)
session = executor.session(program, [loss.name])
g = np.random.default_rng(0)
for v in session.block.inputs:
    drawn = g.standard_normal(v.shape) if v.type.is_float else g.integers(0, 2, v.shape)
    session.feed(v.name, drawn.astype(v.type.numpy))
digest = lambda arrays: hashlib.sha256(b"".join(a.tobytes() for a in arrays if a is not None)).hexdigest()
found = []
for step in session.steps:
    before = digest(step.ins)
    (segment,) = segments([step])
    segment.run()
    found.append((step.op.op.name, step.op.kernel, before, digest(step.outs)))
print(json.dumps(found))
"""


def changed(name: str, options: dict, providers: list[str] | None) -> set[tuple[str, str]]:
    """(kernel, operator) of those that write other bits with two threads than with one, from the same bits."""
    runs = []
    for threads in ("1", "2"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-c", SCRIPT, json.dumps([name, options, providers])]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=300)
        runs.append(json.loads(done.stdout))
    one, two = runs
    # workspaces depend on the number of threads, and so may the order in which a step runs
    read = {(op, kernel, before): after for op, kernel, before, after in one}
    return {(kernel, op) for op, kernel, before, after in two if read.get((op, kernel, before), after) != after}


def declared(kernel: str, op: str) -> bool:
    return op.removeprefix("ChannelsLast") in BITS_BY_THREADS.get(kernel, ())


NETWORKS = [
    pytest.param("lenet", {"batch": 16}, id="lenet"),
    pytest.param("bert-tiny", {"batch": 4, "seq": 64}, id="bert-tiny"),
    pytest.param("resnet18", {"batch": 4, "image": 128}, id="resnet18"),
    pytest.param("mobilenet_v2", {"batch": 4, "image": 96}, id="mobilenet_v2"),
    pytest.param("lstm", {"batch": 16}, id="lstm"),
]


@pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "native code runs here")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor only")
@pytest.mark.parametrize(("name", "options"), NETWORKS)
def test_our_own_kernels_give_the_same_bits_with_any_number_of_threads(name: str, options: dict) -> None:
    found = changed(name, options, ["numba", "loops", "convolution", "blas"])
    assert not {(kernel, op) for kernel, op in found if not declared(kernel, op)}


@pytest.mark.skipif(isinstance(dnnl.load(), str), reason="oneDNN is not installed (extra 'onednn')")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor only")
@pytest.mark.parametrize(("name", "options"), NETWORKS)
def test_with_onednn_only_the_operators_that_are_named_differ(name: str, options: dict) -> None:
    assert not {(kernel, op) for kernel, op in changed(name, options, None) if not declared(kernel, op)}


def test_the_document_names_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "threads.md").read_text()
    for kernel, names in BITS_BY_THREADS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{kernel}`"))
        assert all(f"`{n}`" in row for n in names)
