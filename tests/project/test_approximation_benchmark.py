"""benchmarks/approximation.py: its table and figures, from a few steps; roberta_sketch.py on a small network."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import recompute as rc

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "approximation.py"


def test_tables_of_accuracy_memory_and_time(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--json", str(figures)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert list(found) == ["digits", "tumours", "text"]
    for task in found.values():
        exact, mixed = task["rows"]
        assert exact["equal"] and exact["time"] == 1 and not exact["approximations"]
        assert mixed["approximations"] and mixed["peak"] < 0.7 * exact["peak"] and mixed["kept"] < 0.5 * exact["kept"]
        assert mixed["scores"] != exact["scores"]
        for row in task["rows"]:
            assert f"{row['peak'] / 1024:,.0f} {row['peak'] / exact['peak']:6.3f}" in done.stdout
    assert done.stdout.count("lowest peaks at the same time") == len(found)


def test_a_row_for_each_permission(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    roberta = importlib.import_module("roberta_sketch")
    monkeypatch.setattr(roberta, "ALLOWED", ("", "store:8"))
    monkeypatch.setattr(roberta, "GIB", 1024)
    table = object.__new__(roberta.Table)
    table.program = rc.load(rc.models.build("mlp4"), batch=4096)
    table.loss, table.optimizer, table.target, table.seconds = "loss", rc.AdamW(), rc.Target(), 1.0
    table.fixed("none", False, None)
    exact, stored = (float(line.split()[2]) for line in capsys.readouterr().out.splitlines())
    assert stored < 0.9 * exact
