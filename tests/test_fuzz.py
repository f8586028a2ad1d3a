"""Damaged files of every kind are refused in one clear error, or run: a few of each here, any number in benchmarks/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing import files, seeds

FUZZ = Path(__file__).parent.parent / "benchmarks" / "fuzz.py"


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
    assert found["files"] == 600
    for row in found["parts"]:
        assert row["refused"] and row["ran"], row


@pytest.mark.slow
@pytest.mark.parametrize("kind", seeds.KINDS)
def test_many_damaged_files(kind: str, tmp_path: Path) -> None:
    found = fuzz(tmp_path, "--kind", kind, "--count", "3000", "--seed", "2")
    assert found["code"] == 0 and not found["findings"], found["said"]


@pytest.mark.parametrize("kind", seeds.KINDS)
@pytest.mark.parametrize("fuzzer", files.FUZZERS)
def test_a_file_follows_from_its_number(kind: str, fuzzer: str) -> None:
    made = [files.damaged(kind, fuzzer, 3, k, everything=False) for k in range(8)]
    assert made == [files.damaged(kind, fuzzer, 3, k, everything=False) for k in range(8)]
    assert len({data for _, data in made}) > 4
    originals = {data for _, data in seeds.corpus(kind, False)}
    assert any(data not in originals for _, data in made)
