"""benchmarks/approximation.py: its table and figures, from a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
