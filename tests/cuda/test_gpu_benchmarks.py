"""What would run on a device (benchmarks/gpu) runs here: the comparison on the emulated place, the stages of the staged
run on the fake device (cuda_fake.py)."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_cases
import cuda_fake
import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
pytestmark = [cuda_cases.needs_compiler]


def run(*words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run([python, *words], capture_output=True, text=True, env=environment, timeout=600, check=False)


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


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A Python with all packages of this one but this project: on the device's machine it is not installed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    (folder,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    for entry in (e for at in site.getsitepackages() for e in Path(at).iterdir()):
        if not entry.name.startswith(("__editable__", "onnx_recompute", "recompute", "__pycache__")):
            (folder / entry.name).symlink_to(entry)
    return str(tmp_path / "bare" / "bin" / "python")


def test_the_staged_run_is_prepared_and_rehearsed(checkout: Path, bare: str, tmp_path: Path) -> None:
    staged, out = str(checkout / "benchmarks" / "gpu" / "staged"), tmp_path / "out"
    alone = subprocess.run([bare, "-c", "import recompute"], cwd=tmp_path, capture_output=True, check=False)
    assert alone.returncode == 1  # outside of a checkout
    done = run(staged, "prepare", "mlp", python=bare)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "machine_code.tar.xz: " in done.stdout
    done = run(staged, "run", "--fake", "--out", str(out), "--seconds", "500", python=bare)
    assert done.returncode == 0, done.stdout + done.stderr
    found = lines(out)
    assert {r["stage"] for r in found} >= {"facts", "machine-code", "smoke", "networks", "timing", "products", "nccl"}
    assert all(r.get("ok", True) for r in found)
    tests = {r["stage"]: (r["passed"], r["skipped"]) for r in found if r["name"] == "tests"}
    assert set(tests) == {"memory", "samples", "steps"} and all(n and not m for n, m in tests.values()), tests
    said = [x for x in (out / "stages.txt").read_text().splitlines() if not x.startswith(" ")]
    listed = [line.split()[0] for line in run(staged, "stages").stdout.splitlines()[1:]]
    assert [line.split(":")[0] for line in said] == listed[:-1]
    assert [line for line in said if "exit code 0" not in line and "no rehearsal" not in line] == []
    assert {p.name for p in out.iterdir()} == {"results.jsonl", "stages.txt", "report.txt", "logs.tar.gz"}
    assert "mlp b128 fp32 ours: " in run(staged, "report", str(out)).stdout


def test_a_stage_that_fails_or_hangs_leaves_the_others(checkout: Path, tmp_path: Path) -> None:
    gpu, out = checkout / "benchmarks" / "gpu", tmp_path / "out"
    hangs = "import time\nfrom results import emit\nemit('nccl', 'begun')\nprint('waits', flush=True)\ntime.sleep(99)"
    (gpu / "stages" / "nccl.py").write_text(hangs)
    (gpu / "stages" / "products.py").write_text("from results import case\nwith case('products', 'one'): 1 / 0")
    text = (gpu / "staged").read_text()
    for stage, share, less in (("facts", 8, 6), ("products", 16, 6), ("nccl", 8, 1)):
        assert f'Stage("{stage}", {share},' in text
        text = text.replace(f'Stage("{stage}", {share},', f'Stage("{stage}", {less},')
    (gpu / "staged").write_text(text)
    words = ("--fake", "--only", "products,nccl,facts", "--out", str(out), "--seconds", "14")
    done = run(str(gpu / "staged"), "run", *words)
    assert done.returncode == 1
    report = (out / "report.txt").read_text()
    assert "NOT OK products one: ZeroDivisionError" in report and "NOT OK nccl, which ended with\n    " in report
    assert "facts: exit code 0" in report and "nccl: its time was up after" in report and "    waits\n" in report
    assert [r["stage"] for r in lines(out)].count("nccl") == 1


def test_failing_tests_are_kept_one_by_one(checkout: Path, tmp_path: Path) -> None:
    """Of a stage whose time is up before all tests have ended."""
    gpu, out = checkout / "benchmarks" / "gpu", tmp_path / "out"
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_some.py").write_text(
        "import pytest, time\npytestmark = pytest.mark.gpu\ndef test_wrong(): assert 1 == 2\n"
        "def test_late(): time.sleep(99)\n"
    )
    text = (gpu / "staged").read_text()
    a, b = text.index('    Stage("memory"'), text.index('    Stage("samples"')
    stage = f'    Stage("memory", 8, PYTEST.replace("{{root}}/tests/cuda", "{tests}") + " -n 1 -m gpu"),\n'
    (gpu / "staged").write_text(text[:a] + stage + text[b:])
    done = run(str(gpu / "staged"), "run", "--fake", "--only", "memory", "--out", str(out), "--seconds", "14")
    assert done.returncode == 1
    (failed,) = lines(out)
    assert failed["name"].endswith("::test_wrong") and "assert 1 == 2" in failed["error"]


def test_the_stages_fit_into_their_time() -> None:
    assert run(str(GPU / "staged"), "stages").stdout.splitlines()[-1].split() == ["all", "400"]
    assert run(str(GPU / "staged"), "run", "--only", "nothing").returncode == 2
