"""A step as a library in C: the Executor's bits, the memory that was predicted, files that are not trusted."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from library_build import STEPS
from safetensors.numpy import load_file, save_file

import recompute as rc
from recompute.cli.command import main
from recompute.errors import JobError, UsageError
from recompute.exporter.library import calls, text, write
from recompute.exporter.library.write import write_library
from recompute.language.types import DTYPES
from recompute.runtime.cpu.device import building, jit, native

TESTS = Path(__file__).parents[1]
HOWS = ("plain", "checkpoints", "budget")
#: network, batch
NETWORKS = (("lenet", 8), ("mobilenet_v2", 2), ("lstm", 16), ("bert-tiny", 16), ("gpt2-tiny", 4))
#: which are quick to emulate
SMALL = ("lenet", "lstm")
needs_compiler = pytest.mark.skipif(
    bool(jit.unavailable()) or shutil.which("gcc") is None, reason="needs numba and a C compiler"
)


def build(network: str, how: str, batch: int, folder: Path, target: str = "x86_64", cpu: str = "native") -> Any:
    """The facts of a library that another process has built."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(TESTS / "library_build.py"), network, how, str(batch), target, cpu, str(folder)]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads((folder / "facts.json").read_text())


def compiled(cc: str, folder: Path) -> Path:
    """The checking program, linked with the library."""
    program = folder / f"check-{cc}"
    files = [str(TESTS / "library_check.c"), str(folder / "libstep.a")]
    subprocess.run([cc, "-O1", f"-I{folder}", *files, "-lm", "-o", str(program)], check=True)
    return program


def run(program: Path, folder: Path, where: str, before: tuple[str, ...] = ()) -> list[str]:
    """What it prints: losses as bits, and the memory."""
    files = [folder / n for n in ("step.safetensors", "batch.bin", "out.safetensors")]
    given = [*before, program, files[0], STEPS, *files[1:], where]
    done = subprocess.run(list(map(str, given)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return done.stdout.split()


def cases(quick: tuple[str, ...]) -> list[Any]:
    """Network, batch and how; what takes minutes, or is of other networks than `quick`, is run by hand."""
    found = []
    for (network, batch), how in itertools.product(NETWORKS, HOWS):
        marks = () if network in quick and (how == "plain" or network in SMALL) else pytest.mark.hours
        found.append(pytest.param(network, batch, how, marks=marks, id=f"{network}-{how}"))
    return found


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("network", "batch", "how"), cases(tuple(n for n, _ in NETWORKS)))
def test_c_trains_as_the_executor_in_exactly_the_predicted_memory(
    network: str, batch: int, how: str, tmp_path: Path
) -> None:
    """Bit for bit, between pages that nobody may touch, from memory full of NaN; saved weights go on the same way."""
    (tmp_path / "main.c").write_text("a program of the user's")
    facts = build(network, how, batch, tmp_path)
    assert (tmp_path / "main.c").read_text() == "a program of the user's", "the example replaces nothing"
    if how == "checkpoints":
        assert facts["recomputed"]
    for cc in filter(shutil.which, ("gcc", "clang")):
        for where in ("front", "back"):
            *bits, memory = run(compiled(cc, tmp_path), tmp_path, where)
            assert bits == facts["bits"], (cc, where)
            step, evaluation = facts["arenas"]
            assert int(memory) == facts["peak"] + max(0, evaluation - step)
    assert how != "plain" or evaluation <= step


@pytest.fixture(scope="module")
def lenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of LeNet, and its facts."""
    folder = tmp_path_factory.mktemp("lenet")
    build("lenet", "plain", 4, folder)
    return folder


class Library:
    """The shared library, by its interface."""

    def __init__(self, folder: Path) -> None:
        self.c = c = ctypes.CDLL(str(folder / "libstep.so"))
        c.step_memory.restype = c.step_size.restype = ctypes.c_size_t
        c.step_error.restype = ctypes.c_char_p
        for name in ("input", "output", "value", "evaluation_input", "evaluation_output"):
            getattr(c, f"step_{name}").restype = ctypes.c_void_p
        self.room = np.full(c.step_memory() + 64, 0xFF, np.uint8)
        self.memory = ctypes.c_void_p(self.room.ctypes.data + -self.room.ctypes.data % 64)

    def load(self, data: bytes) -> str:
        """The error of loading weights; "" where they are loaded."""
        return self.c.step_error().decode() if self.c.step_load(self.memory, data, ctypes.c_size_t(len(data))) else ""


@needs_compiler
@pytest.mark.slow
def test_the_library_needs_libc_and_libm_only(lenet: Path) -> None:
    needed = subprocess.run(["ldd", lenet / "libstep.so"], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].partition(".so")[0].rpartition("/")[2] for line in needed.splitlines()}
    assert names <= {"linux-vdso", "libm", "libc", "ld-linux-x86-64"}
    symbols = subprocess.run(["nm", "-D", lenet / "libstep.so"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r" U (malloc|calloc|realloc|mmap|pthread_|omp_|GOMP|Py)", symbols)
    shown = set(re.findall(r" T (\w+)", symbols))
    assert shown == set(re.findall(r"\b(step_\w+)\(", (lenet / "step.h").read_text())), "what the header declares"
    assert (lenet / "libstep.so").stat().st_size < 300_000


@needs_compiler
@pytest.mark.slow
def test_the_example_trains(lenet: Path) -> None:
    program = lenet / "example"
    command = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "main.c", "libstep.a", "-lm", "-o", str(program)]
    subprocess.run(command, check=True, cwd=lenet)
    given = [program, "step.safetensors", "3", "batch.bin", "trained.safetensors"]
    shown = subprocess.run(given, cwd=lenet, capture_output=True, text=True, check=True).stdout.split()
    facts = json.loads((lenet / "facts.json").read_text())
    assert [np.float32(x) for x in shown[1::2]] == [np.float32(x) for x in facts["losses"][:3]]
    trained, before = load_file(lenet / "trained.safetensors"), load_file(lenet / "step.safetensors")
    assert trained["step"] == 3 and {n: a.shape for n, a in trained.items()} == {n: a.shape for n, a in before.items()}


@needs_compiler
@pytest.mark.slow
def test_weights_are_checked_before_anything_is_copied(lenet: Path) -> None:
    """Files that are cut, damaged or of another step leave the memory as it was; other writers' files are read."""
    library, data = Library(lenet), (lenet / "step.safetensors").read_bytes()
    arrays = load_file(lenet / "step.safetensors")
    before = library.room.copy()

    def written(change: dict[str, np.ndarray]) -> bytes:
        path = lenet / "changed.safetensors"
        save_file({n: a for n, a in {**arrays, **change}.items() if a is not None}, path)
        return path.read_bytes()

    cases = {
        "cut": data[:100],
        "ends outside": data[:-1],
        "shape": written({"conv1.bias": arrays["conv1.bias"].reshape(2, 3)}),
        "type": written({"conv1.bias": arrays["conv1.bias"].view(np.int32)}),
        "no 'conv1.bias'": written({"conv1.bias": None}),  # type: ignore[dict-item]
        "'more'": written({"more": np.zeros(3, np.float32)}),
        "damaged": data.replace(b'"shape"', b'"shapE"', 1),
        "header": data.replace(b'"conv1.bias":', b'"conv1.bias";', 1),
    }
    for says, wrong in cases.items():
        assert says in library.load(wrong), says
    size = 8 + struct.unpack_from("<Q", data)[0]
    found = json.loads(data[8:size])
    found["conv2.bias"]["data_offsets"] = [at := found["conv1.weight"]["data_offsets"][0] + 4, at + 64]
    head = json.dumps(found).encode()
    assert "shares bytes" in library.load(struct.pack("<Q", len(head)) + head + data[size:])

    def renamed(name: bytes) -> bytes:
        head = data[8:size].replace(b'"conv1.bias"', b'"' + name + b'"', 1)
        return struct.pack("<Q", len(head)) + head + data[size:]

    for name in (rb"\u0063onv1.bias", rb"conv1\u002Ebias"):
        assert library.load(renamed(name)) == "", "escaped by another writer"
    for name in (rb"conv1.bias\u0000x", b"conv1.bias\0", rb"\ud83d", rb"conv1.bia\s", rb"\u00e", b"conv1.\nbias"):
        assert "header is damaged" in library.load(renamed(name)), name
    assert "the file has '\u00e9\u20ac\U0001f600'" in library.load(renamed(rb"\u00e9\u20ac\ud83d\ude00"))
    library.room[:] = before
    refused = 0
    for at in range(0, size, 7):
        for wrong in (data[:at], data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :]):
            if library.load(wrong):  # not a changed text of the metadata, say
                assert (library.room == before).all(), at
                refused += 1
            library.room[:] = before
    assert refused > size // 7
    assert library.load(written({})) == ""
    assert library.c.step_init(library.memory, b"/nowhere/step.safetensors") == 2
    assert library.c.step_save(library.memory, b"/nowhere/step.safetensors") == 2
    os.mkfifo(pipe := lenet / "pipe")
    assert library.c.step_save(library.memory, bytes(pipe)) == 2 and pipe.is_fifo(), "a file took its place"


@needs_compiler
@pytest.mark.slow
def test_calls_that_are_wrong_say_so(lenet: Path) -> None:
    library = Library(lenet)
    for early in (library.c.step_run, library.c.step_evaluate):
        assert early(library.memory) == 3 and b"has no weights of this step" in library.c.step_error()
    assert library.c.step_save(library.memory, b"never") == 3
    assert library.c.step_store(library.memory, ctypes.create_string_buffer(library.c.step_size())) == 3
    assert (library.room == 0xFF).all()
    assert library.load((lenet / "step.safetensors").read_bytes()) == ""
    assert library.c.step_input(library.memory, b"y") is None and library.c.step_error() == b"there is no value 'y'"
    assert library.c.step_run(ctypes.c_void_p(library.memory.value + 4)) == 3
    assert library.c.step_run(None) == 3
    assert library.c.step_store(library.memory, None) == 3
    values = {n: library.c.step_value(library.memory, n.encode()) for n in load_file(lenet / "step.safetensors")}
    assert all(values.values())
    label = library.c.step_input(library.memory, b"label")
    ctypes.memset(label, 0, 32)
    ctypes.memset(library.c.step_input(library.memory, b"x"), 0, 4 * 784 * 4)
    ctypes.c_int64.from_address(label).value = 10
    held = library.room.copy()
    assert library.c.step_run(library.memory) == 1
    assert b"label 10 is outside the 10 classes" in library.c.step_error()
    size = library.c.step_memory()
    first = min(values.values()) - library.memory.value
    assert (held[:size][first:] == library.room[:size][first:]).all(), "no weight has changed"


def test_a_library_begins_with_build_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = rc.load(rc.models.build("mlp"), batch=2)
    with pytest.raises(UsageError, match="build_for"):
        write_library(program, tmp_path)
    for name, says in (("9", "does not begin names of C"), ("a;b", "does not begin"), ("evaluation", "would hide")):
        with pytest.raises(UsageError, match=f"'{name}' {says}"):
            write_library(program, tmp_path, name=name)
    for wrong in (("x", tmp_path, "step"), (program, 3, "step"), (program, tmp_path, 4)):
        with pytest.raises(UsageError):
            write_library(wrong[0], wrong[1], name=wrong[2])  # type: ignore[arg-type]
    for given, says in ((("arm",), "no libraries for 'arm'"), (("x86_64", "z80"), "no processor 'z80' of x86_64")):
        with pytest.raises(UsageError, match=says):
            rc.build_for(*given)
    monkeypatch.setattr(native.toolchain, "_results", [native.here()])
    with pytest.raises(UsageError, match="has made native code for itself"):
        rc.build_for("x86_64")
    assert building.machine() is None and not list(tmp_path.iterdir())


@needs_compiler
@pytest.mark.slow
def test_operators_without_kernels_are_named_together(tmp_path: Path) -> None:
    given = ["moe-tiny", "--batch", "4", "--library", str(tmp_path / "library")]
    done = subprocess.run([sys.executable, "-m", "recompute.cli", *given], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ArgMax of f32" in done.stderr and "CumSum of f32" in done.stderr
    assert not (tmp_path / "library").exists()


def test_names_are_checked_before_a_step_is_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lenet", "--batch", "4", "--library", str(tmp_path), "--name", "1x"]) == 2
    told = capsys.readouterr()
    assert "'1x' does not begin names of C" in told.err and "building" not in told.out


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-user")
def test_a_processor_that_lacks_a_feature_is_told(lenet: Path) -> None:
    """The kernels would end the process there; the features of a Nehalem are those of 2008."""
    program = lenet / "lacking"
    subprocess.run(["gcc", "main.c", "libstep.a", "-lm", "-o", str(program)], check=True, cwd=lenet)
    command = ["qemu-x86_64", "-cpu", "Nehalem", program, lenet / "step.safetensors", "1"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "init: the step was built for processors with avx, and" in done.stderr, done


def test_features_that_a_library_asks_for() -> None:
    for cpu, more in (("x86-64-v3", []), ("x86-64-v4", [f"avx512{x}" for x in ("f", "bw", "cd", "dq", "vl")])):
        asked = building.asked(building.named("x86_64", cpu).features)
        assert asked == ["popcnt", "sse4.2", "avx", "avx2", "fma", "bmi", "bmi2", *more]


def test_a_step_of_more_than_32_bits_is_none_for_webassembly() -> None:
    def fitting(size: int) -> None:
        memory = SimpleNamespace(size=size, weights={"w": SimpleNamespace(nbytes=1 << 30)})
        write._need_addresses(SimpleNamespace(header=b"", memory=memory, tables=calls.Tables()))  # type: ignore[arg-type]

    fitting(3 * (1 << 30) - (8 << 20))
    with pytest.raises(UsageError, match="4 GiB of memory, and the step takes 3,221,225,472 bytes"):
        fitting(3 << 30)


def test_constants_are_written_once_and_found_inside() -> None:
    tables = calls.Tables()
    a = np.arange(12, dtype=np.int64)
    first = tables.constant(a)
    assert tables.constant(a[3:7]) == first + 24, "a part of it"
    assert tables.constant(np.arange(12, dtype=np.int64)) == first, "an equal one"
    other = tables.constant(np.ones(3, np.float32))
    assert other % 64 == 0 and bytes(tables.constants[other:]) == np.ones(3, np.float32).tobytes()


def test_a_mark_lies_beside_inputs_and_outputs() -> None:
    def placed(size: int, *values: tuple[int, int]) -> tuple[int, int]:
        memory = calls.Memory.__new__(calls.Memory)
        memory.arena, memory.size = 64, size
        return memory.beside([(SimpleNamespace(nbytes=n), at) for at, n in values]), memory.size  # type: ignore[misc]

    assert placed(100) == (0, 100)
    assert placed(100, (8, 4)) == (0, 100)
    assert placed(100, (20, 4), (0, 13)) == (24, 100), "too little room between the two"
    assert placed(100, (0, 60), (0, 20)) == (104, 112), "behind all, where the arena is full"


def test_an_operator_without_a_call_is_refused() -> None:
    """An Executor runs its own numerics then."""
    arena = SimpleNamespace(bytes=lambda: np.zeros(64, np.uint8))
    op = SimpleNamespace(op=SimpleNamespace(name="MatMul"), writes=lambda: iter([SimpleNamespace(name="y", nbytes=4)]))
    session = SimpleNamespace(arena=arena, arrays={}, steps=[SimpleNamespace(op=op, calls=())])
    memory = SimpleNamespace(places={}, constants={})
    with pytest.raises(JobError, match="MatMul 'y' makes no call"):
        calls.entries(session, memory, calls.Tables())  # type: ignore[arg-type]


def test_an_operand_that_leaves_its_buffer_is_refused() -> None:
    room = np.zeros(256, np.uint8)
    places = calls._Places.__new__(calls._Places)
    start = room.ctypes.data
    places._found, places._starts = [(start + 64, start + 128, 1000)], [start + 64]
    assert places.place(room[64:128]) == 1000 and places.place(room[127:71:-1]) == 1063
    assert places.place(room[:64]) is None and places.place(room[128:]) is None
    for outside in (room[100:129], room[60:70], room[:]):
        with pytest.raises(JobError, match="does not end where its buffer does"):
            places.place(outside)


def test_texts_are_safe_in_c() -> None:
    assert text.quoted('a"b\\c??=é\n') == '"a\\"b\\\\c\\?\\?=\\303\\251\\012"'
    assert text._comment("a*/b/*c/*/\n*/") == "a* /b/ *c/ * /\\n* /", "a line of a comment"
    assert text._filled("/* @MODEL@ @LOSS@ */", {"MODEL": "@LOSS@", "LOSS": "1"}) == "/* @LOSS@ 1 */"
    shown = text.template("step.h", "digits")
    assert "digits_run(" in shown and "step_" not in shown and "DIGITS_LOSS" in shown


needs_cross = pytest.mark.skipif(
    bool(jit.unavailable()) or not (shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64")),
    reason="needs numba, gcc-aarch64-linux-gnu and qemu-user",
)
needs_node = pytest.mark.skipif(
    bool(jit.unavailable()) or not all(map(shutil.which, ("clang", "wasm-ld", "node"))),
    reason="needs numba, clang, lld and node",
)


def close(found: list[float], network: str, how: str, batch: int, folder: Path) -> None:
    """Losses of an ordinary process's kernels, which sum in another order."""
    reference = build(network, how, batch, folder / "reference", target="none")["losses"]
    # batch norms over two images amplify roundings from step to step, between kernels of one processor as well
    steps = 1 if network == "mobilenet_v2" else len(found)
    np.testing.assert_allclose(found[:steps], reference[:steps], rtol=1e-6, atol=1e-6)


@needs_cross
@pytest.mark.slow
@pytest.mark.parametrize(("network", "batch", "how"), cases(SMALL))
def test_aarch64_in_an_emulator(network: str, batch: int, how: str, tmp_path: Path) -> None:
    build(network, how, batch, tmp_path, "aarch64", "generic")
    emulator = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
    *bits, _ = run(compiled("aarch64-linux-gnu-gcc", tmp_path), tmp_path, "back", emulator)
    close([struct.unpack(">f", bytes.fromhex(b))[0] for b in bits], network, how, batch, tmp_path)


@needs_node
@pytest.mark.slow
@pytest.mark.parametrize(("network", "batch", "how"), cases(SMALL))
def test_webassembly_in_node(network: str, batch: int, how: str, tmp_path: Path) -> None:
    build(network, how, batch, tmp_path, "wasm32", "simd128")
    command = ["node", str(TESTS / "library_check.mjs"), str(tmp_path), str(STEPS)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    close([float(x) for x in shown[:-1]], network, how, batch, tmp_path)


@needs_node
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_the_page_decodes_floats_of_16_bits(kind: str, tmp_path: Path) -> None:
    script = (Path(write.__file__).parent / "step.js").read_text()
    part = script[script.index("/** A float16 by its bits") : script.index("class Step")]
    numbers = f'decoded(Uint16Array.from({{length: 65536}}, (_, i) => i), "{kind}")'
    (tmp_path / "numbers.mjs").write_text(f"{part}process.stdout.write(new Uint8Array({numbers}.buffer));")
    shown = subprocess.run(["node", str(tmp_path / "numbers.mjs")], capture_output=True, check=True).stdout
    wanted = np.arange(65536, dtype=np.uint16).view(DTYPES["f16" if kind == "float16" else "bf16"])
    np.testing.assert_array_equal(np.frombuffer(shown, np.float32), wanted.astype(np.float32))
