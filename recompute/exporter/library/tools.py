"""Object code and a C compiler make a library of a step's text."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ...errors import MissingExtraError, ModelError
from ...runtime.cpu.device.building import Machine
from . import text

#: target → compilers that are looked for, the first one that is there is taken; $CC comes before them
_COMPILERS = {
    "x86_64": ("cc", "gcc", "clang"),
    "aarch64": ("aarch64-linux-gnu-gcc", "clang"),
    "wasm32": ("clang", "clang-19", "clang-14"),
}
#: target → tools that put object files together, the first one that is there is taken; the package that has them
_ARCHIVERS = {
    "x86_64": (("ar", "llvm-ar"), "binutils"),
    "aarch64": (("aarch64-linux-gnu-ar", "llvm-ar"), "binutils-aarch64-linux-gnu"),
    "wasm32": (("wasm-ld", "wasm-ld-19", "wasm-ld-14"), "lld"),
}
#: functions of C's mathematics that JavaScript's Math has by the same names
_MATH = "acos acosh asin asinh atan atan2 atanh cbrt cos cosh exp expm1 log log10 log1p log2 pow sin sinh tan tanh"
_OPTIONS = ("-O2", "-std=c99")


def built(lib: text.Library, machine: Machine, tools: Any, room: Path) -> list[Path]:
    """The files of a library but its weights, in the folder `room`.  MissingExtraError without a C compiler."""
    (room / f"{lib.name}.h").write_text(text.header(lib), encoding="utf-8")
    (room / f"{lib.name}.c").write_text(text.source(lib), encoding="utf-8")
    (room / "kernels.o").write_bytes(tools.machine.emit_object(tools.together(lib.kernels, _constants(lib))))
    if machine.name == "wasm32":
        return _module(lib, room)
    (room / "main.c").write_text(text.template("main.c", lib.name))
    cc = compiler(machine.name)
    files = [room / f for f in (f"lib{lib.name}.a", f"lib{lib.name}.so")]
    _do([*cc, *_OPTIONS, "-fPIC", "-fvisibility=hidden", "-c", f"{lib.name}.c", "-o", "interface.o"], room)
    _do([archiver(machine.name), "rcsD", files[0].name, "interface.o", "kernels.o"], room)
    shared = ["-shared", "-Wl,-z,noexecstack", "-Wl,--as-needed", "-Wl,-z,defs", "-s"]
    _do([*cc, *shared, "interface.o", "kernels.o", "-lm", "-o", files[1].name], room)
    return [*files, room / f"{lib.name}.h", room / "main.c"]


def _module(lib: text.Library, room: Path) -> list[Path]:
    """A module of WebAssembly, its loader and a page.  Names of C's mathematics are left to the loader."""
    files = [room / f for f in (f"{lib.name}.wasm", f"{lib.name}.js", "index.html")]
    files[1].write_text(text.loader(lib))
    files[2].write_text(text.template("index.html", lib.name), encoding="utf-8")
    cc = [*compiler("wasm32"), "--target=wasm32", "-mbulk-memory", f"-D{lib.name.upper()}_FREESTANDING"]
    _do([*cc, *_OPTIONS, "-ffreestanding", "-fvisibility=hidden", "-c", f"{lib.name}.c", "-o", "interface.o"], room)
    (room / "mathematics").write_text("".join(f"{f}\n{f}f\n" for f in _MATH.split()))
    link = ["--no-entry", "--stack-first", "-zstack-size=1048576", "--allow-undefined-file=mathematics"]
    link += ["--export=__heap_base", "--export-dynamic", "--strip-all", "-o", files[0].name]
    _do([archiver("wasm32"), *link, "interface.o", "kernels.o"], room)
    return [*files, room / f"{lib.name}.h"]


def _constants(lib: text.Library) -> str:
    """The text of a module that has the constants."""
    data = bytes(lib.tables.constants) or b"\0"
    escaped = "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:02x}" for b in data)
    return f'@{lib.name}_data = hidden constant [{len(data)} x i8] c"{escaped}", align 64\n'


def compiler(target: str) -> list[str]:
    """The command of a C compiler for a target.  MissingExtraError where there is none."""
    given = os.environ.get("CC", "").split() if target == "x86_64" else os.environ.get(f"CC_{target}", "").split()
    names = [given[0]] if given else _COMPILERS[target]
    for name in names:
        if shutil.which(name):
            more = [f"--target={target}-linux-gnu"] if "clang" in name and target == "aarch64" else []
            return [*(given or [name]), *more]
    variable = "CC" if target == "x86_64" else f"CC_{target}"
    raise MissingExtraError(
        f"a library for {target} needs a C compiler for it, and there is none: {', '.join(names)} (or set {variable})"
    )


def archiver(target: str) -> str:
    """The tool that puts a target's object files together.  MissingExtraError where there is none."""
    names, package = _ARCHIVERS[target]
    for name in names:
        if shutil.which(name):
            return name
    raise MissingExtraError(f"a library for {target} needs {' or '.join(names)}, not here: install {package}")


def _do(command: list[str], room: Path) -> None:
    """Runs a tool.  ModelError with what it says where it fails."""
    done = subprocess.run(command, cwd=room, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).splitlines()[:12])
        raise ModelError(f"{command[0]} failed with code {done.returncode}:\n{said}")
