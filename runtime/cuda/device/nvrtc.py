"""NVRTC: compilation of kernel source to device code, cached on disk.

CuPy loads the library and has its functions; its own way to compile is not taken, since that adds options of its own
(`-ftz=true`, with which small numbers become zero) and the headers that come with it.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from ....errors import JobError, MissingExtraError
from ....support.cache import KeptFiles
from ....support.files import cache_folder
from .kernel import Kernel

#: the numerics are IEEE's: nothing is contracted, no number is rounded to zero; the architecture comes behind
OPTIONS = ("--std=c++17", "--fmad=false")


@functools.cache
def library() -> Any:
    """CuPy's binding.  MissingExtraError where NVRTC cannot be loaded."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as e:  # whatever a missing library does
        raise MissingExtraError(
            f"NVRTC cannot be loaded ({e}): pip install 'onnx-recompute[cuda13]' (CUDA 12: '[cuda12]') installs it"
        ) from None
    return nvrtc


@functools.cache
def target(capability: int) -> str:
    """The target of NVRTC for a device: its own machine code (sm_90) where NVRTC knows its generation, else PTX of the
    newest before it, which the driver compiles."""
    architectures = [a for a in library().getSupportedArchs() if a <= capability]
    if not architectures:
        raise JobError(f"this NVRTC compiles for no device of compute capability {capability / 10}")
    kind = "sm" if max(architectures) // 10 == capability // 10 else "compute"
    return f"{kind}_{max(architectures)}"


@functools.cache
def kept(for_: str) -> KeptFiles | None:
    """Where machine code for a target is kept, under KERNEL'S DIGEST.bin; None where there is no cache folder."""
    folder = cache_folder()
    key = hashlib.sha256(repr((library().getVersion(), OPTIONS, for_, "whole")).encode()).hexdigest()[:12]
    return None if folder is None else KeptFiles(folder / f"nvrtc-{key}")


def compiled(k: Kernel, for_: str) -> bytes:
    """The module of a kernel, compiled now or before.  JobError where NVRTC does not take the text."""
    files, name = kept(for_), f"{k.digest}.bin"
    if files is not None and (cached := files.read(name)) is not None:
        return cached
    binary = build(k.source, k.name, for_)
    if files is not None:
        files.write(name, binary)
    return binary


def build(text: str, name: str, for_: str) -> bytes:
    """A module of CUDA C, whose kernels may be many.  JobError where NVRTC does not take the text."""
    nvrtc = library()
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, "--disable-warnings", f"--gpu-architecture={for_}"))
        image: bytes = (nvrtc.getCUBIN if for_.startswith("sm_") else nvrtc.getPTX)(program)
    except nvrtc.NVRTCError as e:
        said = nvrtc.getProgramLog(program)
        raise JobError(f"NVRTC does not take the kernel {name} for {for_}: {e}\n{said[:3000]}") from None
    finally:
        nvrtc.destroyProgram(program)
    return _whole(image)


def _whole(module: bytes) -> bytes:
    """With the last byte, which CuPy takes off as if it ended a text: tools that read the file miss it."""
    if module[:4] != b"\x7fELF":
        return module
    end = int.from_bytes(module[32:40], "little") + 56 * int.from_bytes(module[56:58], "little")
    return module + bytes(max(end - len(module), 0))
