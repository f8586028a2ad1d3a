"""NVIDIA's compiler takes every kernel's text, without a device: those of all samples, and of some training steps.

Many texts are one program, each in a namespace of its own.  What has passed is noted in the user's cache folder.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

import cuda_cases
import pytest
from test_zoo_training import network
from tiers import but_slow, zoo

import recompute as rc
from recompute.compiling.compiler import compile_step
from recompute.runtime import EmulatedCUDAPlace
from recompute.runtime.cuda.code.attention import Tiles, kernel
from recompute.runtime.cuda.device.kernel import Kernel, prelude
from recompute.runtime.cuda.device.nvrtc import OPTIONS
from recompute.runtime.cuda.traced.family import TRACED
from recompute.support.files import cache_folder
from recompute.testing import all_ops, cases

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with the extra 'dev', on Linux")

#: machine code is asked for; the second is a sweep by hand
TARGETS = ("sm_90", pytest.param("sm_80", marks=pytest.mark.hours))
#: texts of one program
TOGETHER = 32
#: networks with most kinds of kernels: in every run, and in slow ones; the others by hand
FEW, MORE = ("mlp", "lstm", "bert-tiny"), ("lenet", "resnet18", "mobilenet_v2", "unet", "gpt2-tiny", "llama-tiny")
NETWORKS = but_slow(zoo(), lambda name: name in MORE, lambda name: name not in (*FEW, *MORE))


@functools.cache
def version() -> str:
    """NVRTC's.  The test is skipped where the library is missing."""
    try:
        failed, *numbers = nvrtc.nvrtcVersion()
    except Exception as e:
        pytest.skip(f"NVRTC cannot be loaded (pip install nvidia-cuda-nvrtc): {type(e).__name__}")
    assert not int(failed)
    return ".".join(map(str, numbers))


def build(source: str, target: str) -> str:
    """What the compiler complains of; "" where it takes the text."""
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, None, None)
    options = [o.encode() for o in (*OPTIONS, "--disable-warnings", f"--gpu-architecture={target}")]
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    size = nvrtc.nvrtcGetProgramLogSize(program)[1]
    log = b""
    if int(failed) and size > 1:  # it writes into these bytes, and Python shares those of length 1
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return (log.decode(errors="replace") or "failed") if int(failed) else ""


@functools.cache
def record(target: str) -> Path | None:
    """Where the digests are that have passed."""
    folder = cache_folder()
    key = hashlib.sha256("|".join((prelude(), version(), target, *OPTIONS)).encode()).hexdigest()[:12]
    return None if folder is None else folder / f"nvrtc-{key}.txt"


def check(kernels: Iterable[Kernel], target: str) -> None:
    """AssertionError with what NVRTC says."""
    version()
    path = record(target)
    passed = set(path.read_text().split()) if path is not None and path.exists() else set()
    missing = sorted({k.digest: k for k in kernels if k.digest not in passed}.values(), key=lambda k: k.name)
    for i in range(0, len(missing), TOGETHER):
        part = missing[i : i + TOGETHER]
        found = build(prelude() + "".join(f"\nnamespace k_{k.digest} {{\n{k.text}}}\n" for k in part), target)
        wrong = [k for k in part if build(k.source, target)] if found else []
        assert not found, f"NVRTC does not take {', '.join(k.name for k in wrong)}:\n{found[:3000]}"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as f:
                f.write("".join(f"{k.digest}\n" for k in part))


@functools.cache
def of_samples() -> tuple[Kernel, ...]:
    """Those of every operator's samples, by whom the lowering chooses and by what is there for all."""

    ops = [cuda_cases.operator(c) for cls in all_ops() if cls.__name__ != "Free" for c in cases(cls)]
    return (*cuda_cases.texts(ops), *cuda_cases.texts(ops, TRACED))


@pytest.mark.parametrize("target", TARGETS)
def test_samples(target: str) -> None:
    check(of_samples(), target)


@functools.cache
def of_network(name: str) -> tuple[Kernel, ...]:
    program, loss, _ = network(name)
    step = compile_step(program, loss, rc.Adam(learning_rate=0.01), place=EmulatedCUDAPlace())
    return tuple(cuda_cases.texts(step.program.block.operators))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, target: str) -> None:
    check(of_network(name), target)


NAMES = (("forward", 2), ("by_query", 2), ("by_key", 2), ("by_bias", 1))
ATTENTION = (("tf32", "forward", 1, 4), ("bf16", "forward", 1, 8))
ATTENTION_SLOW = tuple((w, n, c, p) for w, p in (("f32", 4), ("tf32", 4), ("f16", 8), ("bf16", 8)) for n, c in NAMES)


@pytest.mark.parametrize(
    ("target", "variants"),
    [("sm_90", ATTENTION), ("sm_75", ATTENTION[:1])]
    + [pytest.param(t, ATTENTION_SLOW, marks=pytest.mark.slow) for t in ("sm_90", "sm_75")],
)
def test_attention(target: str, variants: tuple[tuple[str, str, int, int], ...]) -> None:
    """Tensor cores' instructions, and what takes their place before compute capability 8.0."""
    check([kernel(name, Tiles(way, chunks, pack)) for way, name, chunks, pack in variants], target)


def test_a_wrong_text_is_found() -> None:
    version()
    wrong = Kernel("wrong", "float* x", "    x[0] = y;")
    with pytest.raises(AssertionError, match="wrong"):
        check([wrong], "sm_90")


def test_a_module_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device is given it; nothing but our own options."""
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    from recompute.runtime.cuda.device import nvrtc as ours

    version()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours._kept.cache_clear()
    kernel = Kernel("twice", "float* x", "    x[threadIdx.x] *= 2;")
    assert (ours.target(90), ours.target(80)) == ("sm_90", "sm_80")
    assert ours.target(10_000).startswith("compute_")
    made = ours.compiled(kernel, "sm_90")
    assert made.startswith(b"\x7fELF")
    (path,) = tmp_path.rglob("*.bin")
    path.write_bytes(b"planted")
    assert ours.compiled(kernel, "sm_90") == made
    kept = ours._kept("sm_90")
    assert kept is not None and kept.read(path.name) == made
    kept.write(path.name, b"kept")
    assert ours.compiled(kernel, "sm_90") == b"kept"
    with pytest.raises(rc.RecomputeError, match=r'"y" is undefined'):
        ours.compiled(Kernel("wrong", "float* x", "    x[0] = y;"), "sm_90")
    ours._kept.cache_clear()
