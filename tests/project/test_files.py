"""Files are there whole or not at all, alone and several together; what cannot be written is known before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recompute.support import files
from recompute.support.files import afterwards, apart, make_folder, replacing, together, why_no_folder, why_not_writable

WRITER = """
import sys, time
from pathlib import Path
from recompute.support.files import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print("half", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*"))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
def test_nothing_is_left_where_the_body_fails(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as temporary:
        temporary.write_text("half")
        raise error
    assert names(tmp_path) == ["a"] and path.read_text() == "old" and not files._unfinished


def test_errors_name_the_file_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"No such file or directory: '[^']*no/a'$"),
        replacing(tmp_path / "no/a"),
    ):
        pass
    link = tmp_path / "link"
    link.symlink_to("target")
    with pytest.raises(OSError, match=r"No space left on device: '[^']*link'$"), replacing(link):
        raise OSError(28, "No space left on device")
    with pytest.raises(FileNotFoundError, match=r"'/other'$"), replacing(link):
        raise FileNotFoundError(2, "No such file or directory", "/other")

    def fail(a: object, b: object) -> None:
        raise PermissionError(1, "Operation not permitted", a, None, b)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PermissionError, match=r"not permitted: '[^']*link'$"), replacing(link):
        pass
    assert names(tmp_path) == ["link"]


def test_files_are_private_until_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replacing(path) as temporary:
        temporary.write_text("x")
        assert temporary.stat().st_mode & 0o777 == 0o600
    new = path.stat().st_mode & 0o777
    (tmp_path / "b").touch()
    assert new == (tmp_path / "b").stat().st_mode & 0o777
    path.chmod(0o640)
    with replacing(path):
        pass
    assert path.stat().st_mode & 0o777 == 0o640 and path.read_text() == ""


def test_names_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    for name in ("n" * 255, "é" * 127):
        assert why_not_writable(tmp_path / name) == ""
        with replacing(tmp_path / name) as temporary:
            temporary.write_text("x")
        assert (tmp_path / name).read_text() == "x"
    assert why_not_writable(tmp_path / ("n" * 256)) == "File name too long"


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        (tmp_path / ".a.txt").touch()
        (tmp_path / ".other.01234567.tmp").touch()
        with replacing(path):
            pass
        assert len(names(tmp_path)) == 4, "a living writer's file stays"
        process.send_signal(signal.SIGKILL)
    with replacing(path):
        pass
    assert names(tmp_path) == [".a.txt", ".other.01234567.tmp", "a"]


def test_files_together_are_all_there_or_none(tmp_path: Path) -> None:
    done: list[str] = []

    def write(fails: bool) -> None:
        with together():
            make_folder(tmp_path / "x" / "y")
            for name in ("1", "2"):
                with together(), replacing(tmp_path / "x" / "y" / name) as temporary:
                    temporary.write_text(name)
            afterwards(lambda: done.append(",".join(names(tmp_path))))
            with apart(), replacing(tmp_path / "cache") as temporary:
                temporary.write_text("measured")
            assert len(names(tmp_path)) == 5 and not (tmp_path / "x" / "y" / "1").exists()
            if fails:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(True)
    assert names(tmp_path) == ["cache"] and not done and not files._unfinished
    write(False)
    assert names(tmp_path) == ["1", "2", "cache", "x", "y"] and done == ["1,2,cache,x,y"]
    assert (tmp_path / "x" / "y" / "2").read_text() == "2"


def test_folders_that_hold_something_else_stay(tmp_path: Path) -> None:
    with pytest.raises(ValueError), together():
        make_folder(tmp_path / "x")
        (tmp_path / "x" / "mine").touch()
        raise ValueError
    assert names(tmp_path) == ["mine", "x"]
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "x" / "mine" / "y")
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "x" / "mine")


def test_what_is_unfinished_can_be_discarded(tmp_path: Path) -> None:
    one = files._Unfinished(tmp_path / "a")
    assert len(names(tmp_path)) == 1
    files.discard_unfinished()
    assert not names(tmp_path) and not files._unfinished
    one.discard()


def test_why_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("no/x")
    (tmp_path / "fine").symlink_to("target")
    before = names(tmp_path)
    for name, why in {
        "new": "", "file": "", "fine": "", ".": "it is a folder", "no/x": f"the folder '{tmp_path}/no' does not exist",
        "file/x": f"'{tmp_path}/file' is not a folder", "loop": "it is a link that leads to itself",
        "dangling": f"the folder '{tmp_path}/no' does not exist",
    }.items():  # fmt: skip
        assert why_not_writable(tmp_path / name) == why, name
    assert "embedded null" in why_not_writable(tmp_path / "zero\0")  # Python's words, which differ by version
    for name, why in {
        "new": "", "new/er": "", ".": "", "file": "it is not a folder", "file/x": f"'{tmp_path}/file' is not a folder",
        "loop": "it is not a folder",
    }.items():  # fmt: skip
        assert why_no_folder(tmp_path / name) == why, name
    assert why_not_writable(Path("/proc/x")), "the system does not make files there"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert why_not_writable(tmp_path / "new") == f"you may not write to the folder '{tmp_path}'"
    assert why_no_folder(tmp_path / "new") == f"you may not write to the folder '{tmp_path}'"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert why_not_writable(tmp_path / "file") == "you may not write to it"
    assert names(tmp_path) == before
