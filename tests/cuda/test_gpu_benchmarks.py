"""What would run on a device (benchmarks/gpu) runs here: the comparison on the emulated place, the stages of the staged
run on the fake device (cuda_fake.py)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_cases
import cuda_fake
import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
pytestmark = [cuda_cases.needs_compiler, pytest.mark.slow]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=400)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_the_comparison_runs_on_the_emulated_place(tmp_path: Path) -> None:
    words = ("--emulated", "--only", "steps", "--rows", "mlp,lenet", "--out", str(tmp_path))
    done = run(str(GPU / "run_all"), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 4 and all(r["measured_peak"] == r["predicted_peak"] for r in rows)
    assert all(r["last_loss"] < r["loss"] for r in rows)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """benchmarks/gpu of a checkout of its own, so that what is prepared there is nobody else's."""
    if why := cuda_fake.missing():
        pytest.skip(why)
    root = tmp_path / "checkout"
    root.mkdir()
    for path in GPU.parents[1].iterdir():
        if path.name != "benchmarks" and not path.name.startswith("."):
            (root / path.name).symlink_to(path)
    shutil.copytree(GPU.parent, root / "benchmarks", ignore=shutil.ignore_patterns("carry", "results"), symlinks=True)
    return root


def test_the_staged_run_is_prepared_and_rehearsed(checkout: Path, tmp_path: Path) -> None:
    staged, out = str(checkout / "benchmarks" / "gpu" / "staged"), tmp_path / "out"
    done = run(staged, "prepare", "mlp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "machine_code.tar.xz: " in done.stdout
    done = run(staged, "run", "--fake", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr + (out / "report.txt").read_text()
    found = lines(out)
    assert {r["stage"] for r in found} >= {"facts", "machine-code", "smoke", "networks", "timing", "products", "nccl"}
    assert all(r.get("ok", True) for r in found)
    said = (out / "stages.txt").read_text().splitlines()
    listed = [line.split()[0] for line in run(staged, "stages").stdout.splitlines()[1:]]
    assert [line.split(":")[0] for line in said] == listed[:-1]
    assert [line for line in said if "exit code 0" not in line and "no rehearsal" not in line] == []
    report = run(staged, "report", str(out)).stdout
    assert "mlp b128 fp32 ours: " in report and "memory: 3 tests, 0 failed" in report


def test_a_stage_that_fails_or_hangs_leaves_the_others(checkout: Path, tmp_path: Path) -> None:
    gpu, out = checkout / "benchmarks" / "gpu", tmp_path / "out"
    (gpu / "stages" / "nccl.py").write_text(
        "import time\nfrom common import emit\nemit('nccl', 'begun')\ntime.sleep(99)"
    )
    (gpu / "stages" / "products.py").write_text("from common import case\nwith case('products', 'one'): 1 / 0")
    text = (gpu / "staged").read_text()
    for stage, share, less in (("facts", 8, 3), ("products", 18, 3), ("nccl", 8, 1)):
        assert f'Stage("{stage}", {share},' in text
        text = text.replace(f'Stage("{stage}", {share},', f'Stage("{stage}", {less},')
    (gpu / "staged").write_text(text)
    done = run(
        str(gpu / "staged"), "run", "--fake", "--only", "products,nccl,facts", "--out", str(out), "--seconds", "60"
    )
    assert done.returncode == 1
    assert "NOT OK products one: ZeroDivisionError" in (out / "report.txt").read_text()
    said = (out / "stages.txt").read_text()
    assert "facts: exit code 0" in said and "products: exit code 0" in said and "nccl: ended after" in said
    assert [r["stage"] for r in lines(out)].count("nccl") == 1


def test_the_stages_fit_into_their_time() -> None:
    assert run(str(GPU / "staged"), "stages").stdout.splitlines()[-1].split() == ["all", "400"]
    assert run(str(GPU / "staged"), "run", "--only", "nothing").returncode == 2
