"""NVIDIA's compiler takes every kernel's text, without a device, and the machine code is as it is launched: kernels of
all samples, and of some training steps.

Many texts are one program, each in a namespace of its own.  What has passed is noted in the user's cache folder, and in
nvrtc_passed.txt for the version of NVRTC and the prelude that its first line names: a compiler gives the same for the
same text, and 1,300 texts take it minutes.  A text that is not in there is compiled.
`pytest tests/cuda/test_cuda_nvrtc.py -m "not hours" --update-golden` writes the file.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import cuda_cases
import machine_code
import pytest
from zoo_cases import network, zoo

import recompute as rc
from recompute.compiling.compiler import compile_step
from recompute.runtime import CUDAPlace
from recompute.runtime.cuda.code.attention import Tiles, kernel
from recompute.runtime.cuda.device import nvrtc
from recompute.runtime.cuda.device.kernel import STATUS, Kernel, Launch, prelude
from recompute.support.files import cache_folder
from recompute.testing import all_ops, cases

#: machine code is asked for; the second is a sweep by hand
TARGETS = ("sm_90", pytest.param("sm_80", marks=pytest.mark.hours))
#: texts of one program
TOGETHER = 32
#: networks with most kinds of kernels; the others by hand
MOST = ("mlp", "lstm", "bert-tiny", "lenet", "resnet18", "mobilenet_v2", "unet", "gpt2-tiny", "llama-tiny")
NETWORKS = [n if n in MOST else pytest.param(n, marks=pytest.mark.hours) for n in zoo()]


#: bytes of stack that a thread may have, of shared memory that a block may (more has to be asked for at a launch)
STACK, SHARED = 64, 48 << 10


@functools.cache
def version() -> str:
    """NVRTC's.  The test is skipped where the library is missing."""
    try:
        return ".".join(map(str, nvrtc.library().getVersion()))
    except rc.RecomputeError as e:
        pytest.skip(f"CuPy and NVRTC come with the extra 'dev', on Linux: {e}")


#: for one version of NVRTC, and one text that precedes all: what has passed, a digest of text and target a line
PASSED = Path(__file__).with_name("nvrtc_passed.txt")
#: its lines, and those that tests ask for
Golden = tuple[set[str], set[str]]


@functools.cache
def key(target: str) -> str:
    """Names what a result depends on besides a kernel's text."""
    words = (prelude(), version(), target, *nvrtc.OPTIONS, str(STACK), str(SHARED))
    return hashlib.sha256("|".join(words).encode()).hexdigest()[:12]


def record(target: str) -> Path | None:
    """Where the digests are that have passed here."""
    folder = cache_folder()
    return None if folder is None else folder / f"nvrtc-{key(target)}.txt"


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> Iterator[Golden]:
    """The lines of PASSED, none of another version; those that tests ask for, which `--update-golden` writes."""
    update = request.config.getoption("--update-golden")
    head = f"# {version()} {key('sm_90')}"
    first, *lines = PASSED.read_text().splitlines() if PASSED.exists() else [""]
    asked: set[str] = set()
    yield set(lines if first == head else ()), asked
    if update:
        PASSED.write_text("\n".join([head, *sorted(asked)]) + "\n")


def check(wanted: Iterable[Kernel | Launch], target: str, golden: Golden) -> None:
    """AssertionError with what NVRTC says, what machine code needs and may not, or takes and is not given.

    `golden`: digests that have passed before, with their target; to the second are added those that pass.
    """
    version()
    path = record(target)
    passed = set(path.read_text().split()) if path is not None and path.exists() else set()
    passed |= {name for line in golden[0] for name, _, of in [line.partition(" ")] if of == target}
    launches = {c.kernel.digest: c for c in wanted if isinstance(c, Launch)}
    kernels = {k.digest: k for k in (c.kernel if isinstance(c, Launch) else c for c in wanted)}
    # a kernel whose launch was not looked at is noted under another name
    names = {d: f"{d}{'+launch' * (d in launches)}" for d in kernels}
    missing = sorted((k for d, k in kernels.items() if names[d] not in passed), key=lambda k: k.name)
    for i in range(0, len(missing), TOGETHER):
        part = missing[i : i + TOGETHER]
        text = prelude() + "".join(f"\nnamespace k_{k.digest} {{\n{k.text}}}\n" for k in part)
        try:
            code = nvrtc.build(text, "kernels", target)
        except rc.RecomputeError as e:
            wrong = [k.name for k in part if not taken(k, target)]
            raise AssertionError(f"{', '.join(wrong)}: {e}") from None
        found = machine_code.entries(code)
        for k in part:
            (entry,) = (e for name, e in found.items() if k.digest in name)
            assert entry.stack <= STACK and entry.shared <= SHARED, f"{k.name}: {entry}"
            if k.digest in launches:
                held = [ctypes.sizeof(h) for h in launches[k.digest].parameters(STATUS)[1]]
                assert held == entry.sizes, f"{k.name} is launched with parameters of {held} bytes, not {entry.sizes}"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as f:
                f.write("".join(f"{names[k.digest]}\n" for k in part))
    golden[1].update(f"{name} {target}" for name in names.values())


def taken(k: Kernel, target: str) -> bool:
    """Whether NVRTC takes a text."""
    try:
        nvrtc.build(k.source, k.name, target)
    except rc.RecomputeError:
        return False
    return True


@functools.cache
def of_samples() -> tuple[Launch, ...]:
    """Those of every operator's samples, by whom the lowering chooses."""
    ops = [cuda_cases.operator(c) for cls in all_ops() if cls.__name__ != "Free" for c in cases(cls)]
    return tuple(cuda_cases.launches(ops))


@pytest.mark.parametrize("target", TARGETS)
def test_samples(target: str, golden: Golden) -> None:
    check(of_samples(), target, golden)


@functools.cache
def of_network(name: str) -> tuple[Launch, ...]:
    program, loss, _ = network(name)
    step = compile_step(program, loss, rc.Adam(learning_rate=0.01), place=CUDAPlace())
    return tuple(cuda_cases.step_launches(step.program.block, step.program.data))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, target: str, golden: Golden) -> None:
    check(of_network(name), target, golden)


NAMES = (("forward", 2), ("by_query", 2), ("by_key", 2), ("by_bias", 1))
ATTENTION = (("tf32", "forward", 1, 4), ("bf16", "forward", 1, 8))
ATTENTION_SLOW = tuple((w, n, c, p) for w, p in (("f32", 4), ("tf32", 4), ("f16", 8), ("bf16", 8)) for n, c in NAMES)


@pytest.mark.parametrize(
    ("target", "variants"),
    [("sm_90", ATTENTION), ("sm_75", ATTENTION[:1])] + [(t, ATTENTION_SLOW) for t in ("sm_90", "sm_75")],
)
def test_attention(target: str, variants: tuple[tuple[str, str, int, int], ...], golden: Golden) -> None:
    """Tensor cores' instructions, and what takes their place before compute capability 8.0."""
    check([kernel(name, Tiles(way, chunks, pack)) for way, name, chunks, pack in variants], target, golden)


def test_a_wrong_text_is_found() -> None:
    version()
    wrong = Kernel("wrong", "float* x", "    x[0] = y;")
    with pytest.raises(AssertionError, match="wrong"):
        check([wrong], "sm_90", (set(), set()))


@pytest.mark.parametrize(
    ("body", "said"),
    [("    __shared__ float all[12289];\n    all[n] = 1;\n    __syncthreads();\n    x[0] = all[n + 1];", "shared"),
     ("    float own[200];\n    for (int i = 0; i < 200; i++) own[i] = x[i];\n    x[0] = own[n];", "stack"),
     ("    x[n] = 1;", "parameters of")],
    ids=["shared", "stack", "parameters"],
)  # fmt: skip
def test_what_machine_code_may_not_need_is_found(body: str, said: str) -> None:
    version()
    k = Kernel("greedy", "float* x, Number n", body, before="typedef int Number;")
    n = ctypes.c_longlong(1) if said == "parameters of" else ctypes.c_int(1)
    with pytest.raises(AssertionError, match=said):
        check([Launch(k, (1, 1, 1), (1, 1, 1), (None, n))], "sm_90", (set(), set()))


def wheels() -> list[str]:
    """Where the tools of NVIDIA's wheels are."""
    found = importlib.util.find_spec("nvidia")
    return [
        str(p / "bin") for at in (found.submodule_search_locations or () if found else ()) for p in Path(at).iterdir()
    ]


def test_machine_code_is_read_as_nvidias_tool_does(tmp_path: Path) -> None:
    version()
    tool = shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *wheels()]))
    if tool is None:
        pytest.skip("cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)")
    body = "    __shared__ float all[9];\n    float own[200];\n    for (int i = 0; i < 200; i++) own[i] = x[i];\n"
    k = Kernel("read", "float* x, int n", body + "    all[n] = own[n];\n    __syncthreads();\n    x[0] = all[n + 1];")
    (tmp_path / "read.cubin").write_bytes(nvrtc.build(k.source, k.name, "sm_90"))
    said = subprocess.run(
        [tool, "--dump-resource-usage", "read.cubin"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    e = machine_code.entries((tmp_path / "read.cubin").read_bytes())["read"]
    assert f"REG:{e.registers} STACK:{e.stack} SHARED:{e.shared} " in said.stdout
    assert e.sizes == [8, 4] and e.stack == 800


def test_a_module_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device is given it; nothing but our own options."""
    version()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nvrtc.kept.cache_clear()
    kernel = Kernel("twice", "float* x", "    x[threadIdx.x] *= 2;")
    assert (nvrtc.target(90), nvrtc.target(80)) == ("sm_90", "sm_80")
    assert nvrtc.target(10_000).startswith("compute_")
    made = nvrtc.compiled(kernel, "sm_90")
    assert made.startswith(b"\x7fELF")
    (path,) = tmp_path.rglob("*.bin")
    path.write_bytes(b"planted")
    assert nvrtc.compiled(kernel, "sm_90") == made
    kept = nvrtc.kept("sm_90")
    assert kept is not None and kept.read(path.name) == made
    kept.write(path.name, b"kept")
    assert nvrtc.compiled(kernel, "sm_90") == b"kept"
    with pytest.raises(rc.RecomputeError, match=r'"y" is undefined'):
        nvrtc.compiled(Kernel("wrong", "float* x", "    x[0] = y;"), "sm_90")
    nvrtc.kept.cache_clear()
