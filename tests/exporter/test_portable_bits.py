"""The same losses and weights, bit for bit, on every processor: in this process, and as libraries for others.

The bits lie in portable_steps.json, and are those of every machine that has run these tests.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from portable_steps import NETWORKS, STEPS, digest
from safetensors.numpy import load_file

import recompute as rc
from recompute.errors import UsageError
from recompute.runtime.cpu.device import building, jit

TESTS = Path(__file__).parents[1]
BITS = json.loads((TESTS / "portable_steps.json").read_text())
#: which are quick here, and which in an emulator
SMALLEST = ("mlp", "mlp fp16", "lenet")
SMALL = (*SMALLEST, "lstm", "gpt2-tiny")
#: target, processor, the compiler of the checking program, what runs it, what must be there
MACHINES = {
    "AVX2": ("x86_64", "x86-64-v3", "gcc", (), ()),
    "SSE4.2, without AVX": ("x86_64", "x86-64-v2", "gcc", (), ()),
    "AArch64": ("aarch64", "generic", "aarch64-linux-gnu-gcc", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"), ()),
    "WebAssembly": ("wasm32", "simd128", "clang", ("node",), ("wasm-ld",)),
}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(jit.unavailable()), reason="needs numba")]


def script(*args: str, threads: int = 1) -> str:
    """What tests/portable_steps.py prints in a process of its own."""
    command = [sys.executable, str(TESTS / "portable_steps.py"), *args]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)}
    ).stdout


def networks(quick: tuple[str, ...]) -> list[Any]:
    return [n if n in quick else pytest.param(n, marks=pytest.mark.hours) for n in NETWORKS]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("network", networks(SMALL))
def test_this_processor(network: str, threads: int) -> None:
    assert json.loads(script(network, "here", threads=threads)) == BITS[network]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", networks(SMALLEST))
def test_libraries_for_other_processors(network: str, machine: str, tmp_path: Path) -> None:
    """In a program that rounds otherwise."""
    target, cpu, cc, runs, more = MACHINES[machine]
    needed = [cc, *runs[:1], *more]
    if missing := [tool for tool in needed if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    script(network, target, cpu, str(tmp_path))
    if target == "wasm32":
        command = ["node", str(TESTS / "library_check.mjs"), str(tmp_path), str(STEPS)]
    else:
        program, files = (
            tmp_path / "check",
            [tmp_path / n for n in ("step.safetensors", "batch.bin", "out.safetensors")],
        )
        sources = [TESTS / "library_check.c", tmp_path / "libstep.a"]
        subprocess.run([cc, "-O1", f"-I{tmp_path}", *sources, "-lm", "-o", program], check=True)
        command = [*runs, str(program), str(files[0]), str(STEPS), *map(str, files[1:]), "back", "up"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[:STEPS]
    bits = [struct.pack(">f", np.float32(x)).hex() for x in shown] if target == "wasm32" else shown
    assert bits == BITS[network]["losses"]
    assert digest(load_file(tmp_path / "out.safetensors")) == BITS[network]["weights"]


def test_portable_bits_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rc.Executor().run(*_one_step())
    monkeypatch.setattr(building, "_chosen", [])
    with pytest.raises(UsageError, match="has made native code for itself already"):
        rc.portable_bits()


def _one_step() -> tuple[object, ...]:
    program = rc.load(rc.models.build("mlp"), batch=2)
    feed = {v.name: np.zeros(v.shape, v.value.type.numpy) for v in program.inputs}
    return program, feed, [program.outputs[0]]


def test_what_processors_differ_in_is_refused_by_name(tmp_path: Path) -> None:
    """By the command, before anything is trained, in one line."""
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.DOUBLE, [4, 8]) for n in "xy")
    w = onnx.numpy_helper.from_array(np.eye(8), "w")
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "doubles", [x], [y], [w])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), tmp_path / "f64.onnx")
    command = [sys.executable, "-m", "recompute.cli", str(tmp_path / "f64.onnx"), "--run", "1", "--portable-bits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "portable bits" in done.stderr and "MatMul" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
