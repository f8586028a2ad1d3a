"""docs/planner.html: its data and template are those of the script, and a browser shows the plan of the address."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planner.html"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def data() -> dict[str, Any]:
    """What the page shows."""
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', PAGE.read_text(), re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def script() -> Any:
    """benchmarks/planner_page.py."""
    path = ROOT / "benchmarks" / "planner_page.py"
    if not path.exists():
        pytest.skip("a source distribution has no benchmarks")
    spec = importlib.util.spec_from_file_location("planner_page", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["planner_page"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_the_scripts() -> None:
    module = script()
    assert module.filled(data()) == PAGE.read_text()
    assert list(data()["networks"]) == list(module.NETWORKS)
    assert PAGE.stat().st_size <= 2_000_000


def test_each_network_has_plans_between_all_and_few_activations() -> None:
    for name, network in data()["networks"].items():
        plans = [p for p in network["points"] if "refused" not in p]
        assert [p["share"] for p in network["points"]] == sorted((p["share"] for p in network["points"]), reverse=True)
        assert len(plans) >= 4, name
        assert plans[0]["bound"] is None and plans[0]["peak"] == max(p["peak"] for p in plans), name
        assert any(p["recomputed"] or p["slices"] for p in plans), name
        for p in plans:
            assert max(sum(level) for level in zip(*map(levels, p["roles"].values()), strict=True)) <= p["peak"], name
            if p["bound"] is not None:
                assert p["bound"] <= p["seconds"] * (1 + 1e-9), name


def levels(runs: list[list[int]]) -> list[int]:
    """Bytes of each column of the picture."""
    return [level << 10 for count, level in runs for _ in range(count)]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
@pytest.mark.parametrize(("name", "place"), [("resnet50", 0), ("gpt2-small", 3), ("lstm", -1)])
def test_a_browser_shows_the_plan_of_the_address(tmp_path: Path, name: str, place: int) -> None:
    network = data()["networks"][name]
    plan = [p for p in network["points"] if "refused" not in p][place]
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    address = f"{PAGE.as_uri()}#{name}:{plan['share']}"
    shown = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=True).stdout
    assert f"peak, {plan['peak']:,} bytes" in shown
    assert f"{plan['recomputed']:,} of {plan['operators']:,}" in shown
    assert shown.count("<circle") == sum("refused" not in p for p in network["points"])
    assert shown.count("<polygon") == len(plan["roles"])
    assert plan["kept"][0][0] in shown
