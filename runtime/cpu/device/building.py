"""The machine that native code is made for, where it leaves this process: as a library (recompute/exporter/library).

A process makes code for one machine.  By default that is its own; `native.build_for` chooses another, before any code
is made, and `native.make_portable` that of every machine (see portable.py).  Where it is a library's, every kernel is
kept as LLVM bitcode, and nothing depends on what else this machine has (a BLAS, oneDNN, threads).  In both, kernels are
taken for small operands too, as there is no NumPy to fall back on.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import UsageError, nearest
from ....language.kernels import kernels_run_everything

#: levels of x86-64 processors: what LLVM calls them, and the features that kernels ask for
_V2 = "+sse4.2,+popcnt"
_V3 = "+avx,+avx2,+f16c,+fma,+bmi,+bmi2,+lzcnt,+movbe,+popcnt,+sse4.2,-prefer-256-bit"
_V4 = f"{_V3},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
#: features of x86-64 that a library asks its processor for: those that C compilers can ask for (what LLVM and they name
#: alike); the others come with one of these
_ASKED = (
    "popcnt", "sse4.2", "avx", "avx2", "fma", "bmi", "bmi2", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl",
    "avx512vbmi", "avx512vnni", "avx512bf16",
)  # fmt: skip
#: the name of this machine's processor
NATIVE = "native"


@dataclass(frozen=True)
class Machine:
    """The target of generated code: LLVM's triple, and its names of the processor and of its features.

    `fused`: whether a · b + c is one instruction there; elsewhere it is two, and rounds twice.  `portable`: whether
    its code has the bits of every other machine's (see portable.py).  `library`: whether code leaves this process.
    """

    name: str
    triple: str
    cpu: str
    features: str
    fused: bool = True
    portable: bool = False
    library: bool = True


#: target → processor → machine; the first processor of each is the default
MACHINES = {
    "x86_64": {
        "x86-64-v3": Machine("x86_64", "x86_64-unknown-linux-gnu", "x86-64-v3", _V3),
        "x86-64-v2": Machine("x86_64", "x86_64-unknown-linux-gnu", "x86-64-v2", _V2, fused=False),
        "x86-64-v4": Machine("x86_64", "x86_64-unknown-linux-gnu", "x86-64-v4", _V4),
        NATIVE: Machine("x86_64", "x86_64-unknown-linux-gnu", NATIVE, ""),
    },
    "aarch64": {"generic": Machine("aarch64", "aarch64-unknown-linux-gnu", "generic", "+neon")},
    "wasm32": {"simd128": Machine("wasm32", "wasm32-unknown-unknown", "generic", "+simd128,+bulk-memory", fused=False)},
}

#: this process, with bits that every machine has
PORTABLE_HERE = Machine("itself", "", NATIVE, "", portable=True, library=False)

_chosen: list[Machine] = []


def machine() -> Machine | None:
    """The target that `build_for` has chosen; None: code is for this process."""
    return _chosen[0] if _chosen else None


def no_libraries() -> str:
    """Why libraries of others, such as a BLAS, cannot be called; "" where they can."""
    if _chosen and not _chosen[0].library:
        return "its bits depend on the processor"
    return "a library calls none but libc and libm" if _chosen else ""


def makes_library() -> bool:
    """Whether code leaves this process."""
    return bool(_chosen) and _chosen[0].library


def asked(features: str) -> list[str]:
    """The features of LLVM, such as "+avx,-prefer-256-bit", that a library asks its processor for."""
    return [f for f in _ASKED if f"+{f}" in features.split(",")]


def named(target: str, cpu: str | None = None) -> Machine:
    """A target's processor (None: its most common one).  UsageError for names that are not known."""
    if target not in MACHINES:
        raise UsageError(f"no libraries for '{target}'{nearest(target, MACHINES)}; targets: {', '.join(MACHINES)}")
    processors = MACHINES[target]
    cpu = next(iter(processors)) if cpu is None else cpu
    if cpu not in processors:
        raise UsageError(f"no processor '{cpu}' of {target}{nearest(cpu, processors)}; known: {', '.join(processors)}")
    return processors[cpu]


def choose(machine: Machine) -> None:
    """From here on, code is for this machine, and kernels run everything."""
    _chosen[:] = [machine]
    kernels_run_everything(portable=machine.portable)
