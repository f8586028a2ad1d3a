"""The cache trusts nobody: what another user may have written, or what is damaged, is not read."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recompute.runtime.cpu.device import code_cache, native
from recompute.support import cache
from recompute.support.cache import KeptFiles, is_own

pytestmark = pytest.mark.skipif(not cache._POSSIBLE, reason="needs owners of files")


@pytest.fixture(autouse=True)
def notes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_noted", set())


@pytest.fixture
def kept(tmp_path: Path) -> KeptFiles:
    files = KeptFiles(tmp_path / "cache" / "kernels")
    files.write("a.o", b"code")
    return files


def test_what_was_kept_comes_back_and_is_private(kept: KeptFiles) -> None:
    assert kept.read("a.o") == b"code" and kept.read("b.o") is None
    kept.write("a.o", b"")
    assert kept.read("a.o") == b""
    assert stat.S_IMODE(kept.path.stat().st_mode) == stat.S_IMODE(kept.path.parent.stat().st_mode) == 0o700
    assert {p.name: stat.S_IMODE(p.stat().st_mode) for p in kept.path.iterdir()} == {"a.o": 0o600, "secret": 0o600}


def test_folders_of_any_mask_are_private(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        KeptFiles(tmp_path / "x" / "y").write("a", b"1")
    finally:
        os.umask(mask)
    assert KeptFiles(tmp_path / "x" / "y").read("a") == b"1"


def as_another(kept: KeptFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def as_a_link(kept: KeptFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.path.rename(kept.path.with_name("elsewhere"))
    kept.path.symlink_to("elsewhere")


DISTRUSTED: dict[str, tuple[Callable[[KeptFiles, pytest.MonkeyPatch], object], str]] = {
    "world": (lambda kept, _: kept.path.chmod(0o777), "others may write to it"),
    "group": (lambda kept, _: kept.path.chmod(0o720), "others may write to it"),
    "owner": (as_another, "it belongs to another user"),
    "link": (as_a_link, "it is a link"),
}


@pytest.mark.parametrize("how", DISTRUSTED)
def test_a_folder_that_others_can_change_is_not_used(
    how: str, kept: KeptFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, why = DISTRUSTED[how]
    change(kept, monkeypatch)
    before = {p.name: p.read_bytes() for p in kept.path.iterdir()}
    with pytest.warns(UserWarning, match=f"kernels' is not used: {why}") as notes:
        assert kept.read("a.o") is None
        kept.write("a.o", b"other")
        kept.write("b.o", b"other")
    assert len(notes) == 1
    assert {p.name: p.read_bytes() for p in kept.path.iterdir()} == before


def signed_elsewhere(kept: KeptFiles, tmp_path: Path) -> None:
    other = KeptFiles(tmp_path / "other")
    other.write("a.o", b"planted")
    (other.path / "a.o").rename(kept.path / "a.o")


def renamed(kept: KeptFiles, tmp_path: Path) -> None:
    kept.write("b.o", b"of another kernel")
    (kept.path / "b.o").rename(kept.path / "a.o")


def linked(kept: KeptFiles, tmp_path: Path) -> None:
    (kept.path / "a.o").rename(tmp_path / "a.o")
    (kept.path / "a.o").symlink_to(tmp_path / "a.o")


def piped(kept: KeptFiles, tmp_path: Path) -> None:
    (kept.path / "a.o").unlink()
    os.mkfifo(kept.path / "a.o")


def damaged(path: Path) -> None:
    """One bit is another: a byte put in its place is the digest's own one time in 256."""
    first, *rest = path.read_bytes()
    path.write_bytes(bytes([first ^ 1, *rest]))


PLANTED: dict[str, Callable[[KeptFiles, Path], object]] = {
    "damaged": lambda kept, _: damaged(kept.path / "a.o"),
    "cut": lambda kept, _: (kept.path / "a.o").write_bytes((kept.path / "a.o").read_bytes()[:-1]),
    "empty": lambda kept, _: (kept.path / "a.o").write_bytes(b""),
    "writable": lambda kept, _: (kept.path / "a.o").chmod(0o666),
    "signed elsewhere": signed_elsewhere,
    "renamed": renamed,
    "a link": linked,
    "a pipe": piped,
    "secret gone": lambda kept, _: (kept.path / "secret").unlink(),
    "secret empty": lambda kept, _: (kept.path / "secret").write_bytes(b""),
    "secret known": lambda kept, _: (kept.path / "secret").chmod(0o644),
}


@pytest.mark.parametrize("how", PLANTED)
def test_what_is_not_our_work_is_made_again(how: str, kept: KeptFiles, tmp_path: Path) -> None:
    PLANTED[how](kept, tmp_path)
    assert kept.read("a.o") is None
    kept.write("a.o", b"again")
    assert kept.read("a.o") == b"again"
    assert all(not p.name.endswith(".tmp") for p in kept.path.iterdir())


def test_folders_that_cannot_be_made_or_written_are_no_error(kept: KeptFiles, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (kept.path / "b.o").mkdir()
    for files in (KeptFiles(tmp_path / "file" / "x"), KeptFiles(tmp_path / "file"), kept):
        files.write("b.o", b"1")
        assert files.read("b.o") is None


def test_measured_times_of_others_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rates.json"
    assert is_own(path)
    path.write_text("{}")
    assert is_own(path)
    path.chmod(0o666)
    with pytest.warns(UserWarning, match="rates.json' is not used: others may write to it"):
        assert not is_own(path)
    path.chmod(0o600)
    tmp_path.chmod(0o777)
    with pytest.warns(UserWarning, match="is not used: others may write to it"):
        assert not is_own(path)


# -- object code ------------------------------------------------------------------------------------------------------

ANSWER = "define void @kernel(ptr %args, i64 %begin, i64 %end) {\n  call void @used()\n  ret void\n}\n"
needs_elf = pytest.mark.skipif(
    bool(native.unavailable()) or not os.path.exists("/proc/self/exe"), reason="needs llvmlite and ELF"
)


def known(name: str) -> bool:
    return name == "used"


@pytest.fixture(scope="module")
def code() -> Iterator[bytes]:
    tools = native.toolchain()
    text = f"@table = constant [2 x double] [double 1.0, double 2.0]\ndeclare void @used()\n{ANSWER}"
    yield tools.object_code(tools.llvm.parse_assembly(text), "key", in_vectors=True)


@needs_elf
def test_whole_object_code_loads(code: bytes) -> None:
    assert code_cache.loads(code, "k_key", known)
    assert not code_cache.loads(code, "k_other", known), "the function is another's"
    assert not code_cache.loads(code, "k_key", lambda name: False), "LLVM would end the process"
    assert not code_cache.loads(code, "used", known), "it is declared, not there"


@needs_elf
def test_no_part_of_object_code_loads(code: bytes) -> None:
    for n in range(len(code)):
        assert not code_cache.loads(code[:n], "k_key", known)
    for garbage in (bytes(500), b"\x7fELF" * 100, code[:64] + bytes(len(code) - 64)):
        assert not code_cache.loads(garbage, "k_key", known)
    other = code[:18] + struct.pack("H", 40) + code[20:]  # of another processor
    assert not code_cache.loads(other, "k_key", known)


@needs_elf
@pytest.mark.parametrize("data", [b"", b"garbage" * 50, None], ids=["empty", "garbage", "cut"])
def test_object_code_with_the_right_digest_that_does_not_load_is_made_again(
    data: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tools = native.toolchain()
    key, made, given = tools.key("made again", repr(data)), [], []

    def make() -> object:
        made.append(key)
        return tools.llvm.parse_assembly(ANSWER.replace("  call void @used()\n", ""))

    def load(key: str, code: bytes) -> int:
        given.append(code)
        return 1

    monkeypatch.setattr(tools, "load", load)  # the same function is not loaded twice into one process
    assert native.loaded(key, make) == 1
    files = KeptFiles(tmp_path / "onnx-recompute" / "kernels")
    whole = files.read(f"{key}.o")
    assert whole == given[0]
    files.write(f"{key}.o", whole[: len(whole) // 2] if data is None else data)
    for _ in range(2):  # made again, and kept again
        del tools.addresses[key]
        assert native.loaded(key, make) == 1
    del tools.addresses[key]
    assert given == [whole] * 3 and len(made) == 2
