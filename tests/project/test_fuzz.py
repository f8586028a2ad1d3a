"""Damaged files of every kind are refused in one clear error, or run: a few of each here, any number in benchmarks/."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fuzzing import files, guard, seeds, targets

from recompute import parse

FUZZ = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"


def fuzz(folder: Path, *arguments: str) -> dict:
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, str(FUZZ), "--small", "--json", str(report), *arguments], capture_output=True, text=True
    )
    assert report.exists(), done.stderr
    return {"code": done.returncode, "said": done.stdout, **json.loads(report.read_text())}


def test_damaged_files_are_refused_or_run(tmp_path: Path) -> None:
    found = fuzz(tmp_path, "--count", "600", "--seed", "1")
    assert found["code"] == 0 and not found["findings"], found["said"]
    assert found["files"] == 600 and len(found["parts"]) == 12
    for row in found["parts"]:
        assert row["refused"] and row["ran"], row


@pytest.mark.parametrize("count", [500, pytest.param(3000, marks=pytest.mark.hours)])
@pytest.mark.parametrize("kind", seeds.KINDS)
def test_many_damaged_files(kind: str, count: int, tmp_path: Path) -> None:
    """Every way to damage a file meets each kind; how often is no other code."""
    found = fuzz(tmp_path, "--kind", kind, "--count", str(count), "--seed", "2")
    assert found["code"] == 0 and not found["findings"], found["said"]
    assert found["files"] == count and all(row["refused"] and row["ran"] for row in found["parts"]), found["said"]


@pytest.mark.parametrize("kind", seeds.KINDS)
@pytest.mark.parametrize("fuzzer", files.FUZZERS)
def test_a_file_follows_from_its_number(kind: str, fuzzer: str) -> None:
    made = [files.damaged(kind, fuzzer, 3, k, everything=False) for k in range(8)]
    assert made == [files.damaged(kind, fuzzer, 3, k, everything=False) for k in range(8)]
    assert len({data for _, data in made}) > 4
    originals = {data for _, data in seeds.corpus(kind, False)}
    assert any(data not in originals for _, data in made)


@pytest.mark.parametrize("behind", [False, True])
def test_guarded_memory_ends_the_process(behind: bool) -> None:
    """A kernel that writes one element outside of an arena, a constant or a parameter does not get away with it."""
    array = guard.copied(np.arange(5, dtype=np.float32), behind)
    assert array.tolist() == [0, 1, 2, 3, 4]
    outside = array.ctypes.data + (64 if behind else -4)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.memset(outside, 1, 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV


def test_plans_that_give_other_numbers_are_found() -> None:
    """The comparison with a plan of ours sees a value that is overwritten before it is read, were it not verified."""
    lines = ("input %x: f32[4] @0", "%a: f32[4] = Neg(%x) @AT", "%y: f32[4] = Add(%x, %a) @128", "output %y")
    text = "\n  ".join(("program p {", *lines)) + "\n}"
    assert targets.run_block(parse(text.replace("AT", "64")), {}, 1) == "ran"
    with pytest.raises(targets.Wrong, match="in the plan of the text"):
        targets.run_block(parse(text.replace("AT", "0")), {}, 1)
