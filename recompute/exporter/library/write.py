"""`write_library`: a compiled training step as object code with an interface in C."""

from __future__ import annotations

import functools
import json
import re
import struct
import tempfile
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from ...boundary import as_path, as_program
from ...errors import ModelError, UsageError, expect
from ...language.ir import Block
from ...language.program import Program
from ...passes import memory_report
from ...runtime.cpu.device import building, native
from ...runtime.cpu.session import Session
from ...runtime.executor import Executor
from ...support.files import make_folder, replacing, together
from ...support.tensor_file import layout, reason, write_arrays
from ...version import __version__
from . import calls, text
from .tools import built

#: allowed names of a library's files and functions, and names that are others': of the example, of tables and
#: functions inside of the library, of C's libraries and headers
_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TAKEN = ("main", "bad", "evaluation", "c", "m", "stddef", "stdint", "stdio", "stdlib", "string", "unistd")
#: files that the user may change
_EXAMPLES = ("main.c", "index.html")
#: bytes that a module of WebAssembly can address, and what of them its stack, its tables and names take at most
_ADDRESSED, _RESERVED = 1 << 32, 4 << 20


def build_for(target: str = "x86_64", cpu: str | None = None, *, portable: bool = False) -> None:
    """From here on, this process makes native code for a library (see runtime/cpu/device/building.py).

    `target`: "x86_64", "aarch64" or "wasm32"; `cpu`: one of its processors (None: the most common one, "native": this
    machine's); `portable`: the library's bits are those of each target and processor (docs/library.md).  UsageError for
    others, and where this process has made native code for something else before.
    """
    known = expect("target", target, str, "the name of a target")
    expect("cpu", cpu, (str, type(None)), "the name of a processor")
    native.build_for(known, cpu, portable=expect("portable", portable, bool, "True or False"))


def portable_bits() -> None:
    """From here on, steps of this process have the same bits on every processor, whatever its vectors, and as libraries
    for any target with `build_for(..., portable=True)`.  Call it before a model is loaded.

    Kernels are ours alone, in a fixed order of sums, with functions of ours in place of a C library's; docs/portable.md
    has the price.  Operators without such a kernel are refused by name.  UsageError where this process has made native
    code already, or NumPy has computed constants of a model; JobError without llvmlite (extra `cpu`).
    """
    native.make_portable()


def write_library(program: Program, folder: str | PathLike[str], *, name: str = "step") -> list[Path]:
    """Writes a training step, whose program `compile_step` or `minimize` has made, as a library; the files' paths.

    They are NAME.h, libNAME.a and libNAME.so (for wasm32 NAME.wasm and a loader, NAME.js), NAME.safetensors with
    weights and optimizer state, and an example, main.c (index.html), where there is none yet.  `rc.build_for` comes
    first in the process, before the step is compiled.  All of a run's memory is the step's predicted peak, which the
    forward pass in inference mode shares (its own peak, where a budget has made the step's smaller).
    UsageError where operators have no kernels of ours, ModelError where a file cannot be written or a tool is missing.
    """
    folder, program = as_path(folder), as_program(program)
    lib, machine = prepared(program, name)
    try:
        with together(), tempfile.TemporaryDirectory() as room:
            files = built(lib, machine, native.toolchain(), Path(room))
            # an example that is there may have become its user's program
            files = [f for f in files if f.name not in _EXAMPLES or not (folder / f.name).exists()]
            make_folder(folder)
            for file in files:
                with replacing(folder / file.name) as temporary:
                    temporary.write_bytes(file.read_bytes())
            weights = folder / f"{name}.safetensors"
            write_arrays({n: program.data[n] for n in lib.memory.weights}, weights)
    except OSError as e:
        raise ModelError(f"cannot write a library to '{folder}': {reason(e)}") from None
    return [*(folder / f.name for f in files), weights]


def prepared(program: Program, name: str) -> tuple[text.Library, building.Machine]:
    """A training step with all that is written about it, and what it is for.  UsageError where it can be no library."""
    check_name(name)
    machine = building.machine()
    if machine is None or not machine.library:
        raise UsageError("call rc.build_for(target) before anything is compiled: this process makes code for itself")
    if not program.updates or not program.loss:
        raise UsageError(f"program '{program.block.name}' is no training step: minimize a loss, or compile_step, first")
    executor = Executor()
    tested = _evaluation(program, executor)
    calls.need_kernels([executor.planned(p) for p in (program, tested)])
    lib = _library(program, [executor.session(p) for p in (program, tested)], name, machine)
    if machine.name == "wasm32":
        _need_addresses(lib)
    return lib, machine


def packed(program: Program) -> bytes:
    """A training step as one file: a header, its shared library, its weights and state.

    In a process of `rc.build_for` for this machine.  Errors: those of `write_library`.
    """
    name = "step"
    lib, machine = prepared(program, name)
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        built(lib, machine, native.toolchain(), room)
        code = (room / f"lib{name}.so").read_bytes()
        write_arrays({n: program.data[n] for n in lib.memory.weights}, room / "weights")
        head = {"loss": lib.loss, "model": lib.model, "library": len(code), **text.types(lib)}
        header = json.dumps(head).encode()
        return b"".join((struct.pack("<Q", len(header)), header, code, (room / "weights").read_bytes()))


def check_name(name: str) -> None:
    """UsageError for what cannot be the `name` of a library."""
    if not _WORD.fullmatch(expect("name", name, str, "a text")):
        raise UsageError(f"name '{name}' does not begin names of C: take small letters, digits and _, such as 'step'")
    if name in _TAKEN:
        raise UsageError(f"name '{name}' would hide a name of the interface or of C's own libraries: take another one")


def _need_addresses(lib: text.Library) -> None:
    """UsageError where a step, and the weights' file that the loader puts behind it, are more than 32 bits address."""
    file = len(lib.header) + sum(v.nbytes for v in lib.memory.weights.values())
    if lib.memory.size + file + len(lib.tables.constants) + _RESERVED > _ADDRESSED:
        raise UsageError(
            f"WebAssembly has 4 GiB of memory, and the step takes {lib.memory.size:,} bytes, its file {file:,}: "
            "a smaller batch or a --memory-budget takes less"
        )


def _evaluation(program: Program, executor: Executor) -> Program:
    """The forward pass in inference mode: the loss and the outputs of the model, or only the loss where the outputs
    would take more memory than a step (a language model's scores)."""
    model = () if program.imported is None else program.imported.outputs
    values, room = program.forward_block.values(), memory_report(executor.planned(program)).arena
    every = list(dict.fromkeys([program.loss, *(n for n in model if n in values)]))
    found = program.for_test(outputs=every)
    fits = memory_report(executor.planned(found)).arena <= room
    return found if fits else program.for_test(outputs=[program.loss])


def _library(program: Program, sessions: Sequence[Session], name: str, machine: building.Machine) -> text.Library:
    """The calls of training and evaluation, with tables for both."""
    blocks = [s.block for s in sessions]
    memory, tables = calls.Memory(*blocks), calls.Tables()
    found = [calls.entries(s, memory, tables) for s in sessions]
    copies = {n: tables.constant(x) for n, x in memory.constants.items()}
    names = {at: f"{name}_kernel_{i}" for i, at in enumerate(calls.kernels([*found[0], *found[1]]))}
    head, _, _ = layout({n: (v.type.numpy, v.shape) for n, v in memory.weights.items()})
    (size,) = struct.unpack_from("<Q", head)
    types = {n: e["dtype"] for n, e in json.loads(head[8 : 8 + size]).items() if n != "__metadata__"}
    cpu, model = native.toolchain().cpu, program.block.name
    features = building.asked(native.toolchain().features) if machine.name == "x86_64" else ()
    about = f"A training step of '{model}', made by onnx-recompute {__version__} for {machine.name} ({cpu})."
    step, evaluation = (_block(memory, b, e) for b, e in zip(blocks, found, strict=True))
    mark = memory.beside([*step[1], *step[2], *evaluation[1], *evaluation[2]])
    return text.Library(
        name, program.loss, memory, tables, copies, names, step, evaluation, head, types, model, about, mark, features,
        machine.portable,
    )  # fmt: skip


def _block(memory: calls.Memory, block: Block, found: Sequence[calls.Entry]) -> text.Block:
    values = block.values()
    place = functools.partial(memory.address, block)
    outputs = [(values[n], place(values[n])) for n in block.outputs]
    return found, [(v, place(v)) for v in block.inputs], outputs


__all__ = ["build_for", "portable_bits", "write_library"]
