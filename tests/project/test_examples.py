"""Every example runs, and prints what it promises."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


def run(name: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(FOLDER / name)], capture_output=True, text=True, timeout=300, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.splitlines()


def quickstart(lines: list[str]) -> None:
    """The same losses, bit for bit, in less memory."""
    plain, recomputed = (re.fullmatch(r"(\w+) +([\d.]+) MiB (\[.*\])", line) for line in lines)
    assert plain and recomputed and (plain[1], recomputed[1]) == ("plain", "recomputed")
    assert plain[3] == recomputed[3] and float(recomputed[2]) < float(plain[2])
    losses = ast.literal_eval(plain[3])
    assert losses[-1] < losses[0] / 10


def budget(lines: list[str]) -> None:
    """The step keeps to the budget."""
    text = "\n".join(lines)
    allowed = int(re.search(r"budget: ([\d,]+) bytes", text)[1].replace(",", ""))  # type: ignore[index]
    planned = int(re.search(r"planned: ([\d,]+) bytes", text)[1].replace(",", ""))  # type: ignore[index]
    assert 0 < planned <= allowed


def lora(lines: list[str]) -> None:
    """The loss falls, the planned step takes less than LoRA's, which takes less than training everything; merged, the
    model scores the same."""
    text = "\n".join(lines)
    first, last = map(float, re.search(r"loss: ([\d.]+) before, ([\d.]+) after", text).groups())  # type: ignore[union-attr]
    assert last < 0.1 * first
    peaks = [int(n.replace(",", "")) for n in re.findall(r"([\d,]{7,})", text.partition("peak: ")[2])]
    assert len(peaks) == 3 and peaks == sorted(peaks, reverse=True) and peaks[2] <= 0.95 * peaks[1]
    assert "parameters that train" in text
    assert float(re.search(r"differ by ([\d.e-]+) of", text)[1]) < 1e-5  # type: ignore[index]


CHECKS = {"quickstart.py": quickstart, "budget.py": budget, "lora.py": lora}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_example(name: str) -> None:
    CHECKS[name](run(name))


def test_every_example_is_checked() -> None:
    assert {p.name for p in FOLDER.glob("*.py")} == set(CHECKS)
