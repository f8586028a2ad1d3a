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
#: what a Trainer prints where there is no terminal
PROGRESS = re.compile(r"peak memory: |epoch \d+/\d+: ")


def run(name: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *OPTIONS.get(name, [])],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return [x for x in done.stdout.splitlines() if not PROGRESS.match(x)]


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


def detection(lines: list[str]) -> None:
    """The same losses, bit for bit, in less memory, and a detector that finds its objects."""
    plain, recomputed = (re.fullmatch(r"(\w+) +([\d.]+) MiB, loss .*", line) for line in lines[:2])
    assert plain and recomputed and (plain[1], recomputed[1]) == ("plain", "recomputed")
    assert float(recomputed[2]) < 0.9 * float(plain[2])
    assert lines[2] == "the same bits"
    figures = re.fullmatch(r"mAP ([\d.]+), mAP50 [\d.]+, mAP75 [\d.]+", lines[3])
    assert figures and float(figures[1]) >= 0.5


def digits(lines: list[str]) -> None:
    """98 % of held-out digits, recomputed to the same bits, and as many in ONNX Runtime."""
    plain, recomputed = (
        re.fullmatch(r"\w+: accuracy ([\d.]+), peak [\d,]+ bytes, weights (\w+)", x) for x in lines[:2]
    )
    assert plain and recomputed
    assert plain.groups() == recomputed.groups()
    assert float(plain[1]) >= 0.98
    assert lines[2] == f"ONNX Runtime: accuracy {plain[1]}"


def cifar(lines: list[str]) -> None:
    """Both networks end with the same bits, in less memory."""
    peaks = [float(x.split("peak")[1].split()[0]) for x in lines if "peak" in x]
    assert peaks[1] < peaks[0] and peaks[3] < peaks[2]
    assert [x.split(maxsplit=1)[1] for x in lines if "peak" not in x] == ["the same bits"] * 2


def charlm(lines: list[str]) -> None:
    """The same perplexity in less memory, far below that of guessing by frequency, and a sample."""
    plain, recomputed = (re.fullmatch(r"(\w+) +([\d.]+) MiB, perplexity ([\d.]+)", line) for line in lines[1:3])
    assert plain and recomputed and (plain[1], recomputed[1]) == ("plain", "recomputed")
    assert plain[3] == recomputed[3] and float(recomputed[2]) < float(plain[2])
    assert float(plain[3]) < 15 and lines[3] == "the same bits"
    sample = "\n".join(lines[4:])
    assert sample.startswith("Return ") and len(sample) > 150


def glue(lines: list[str]) -> None:
    """Sentences are told apart, recomputed to the same bits in less memory."""
    plain, recomputed = (re.fullmatch(r"\w+ +accuracy ([\d.]+) +peak +([\d.]+) MiB", x) for x in lines[:2])
    assert plain and recomputed
    assert plain[1] == recomputed[1] and float(plain[1]) > 0.9
    assert float(recomputed[2]) < float(plain[2])
    assert lines[2] == "the same bits"


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


def fleet(lines: list[str]) -> None:
    """The loss falls, here on one rank (tests/training/test_fleet.py runs it on two)."""
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+), weights and state \w{12}, ranks 1", lines[0])
    assert found and float(found[2]) < 0.8 * float(found[1])


def text_lines(lines: list[str]) -> None:
    """At most one letter of fifty is read wrongly, in lines that were never seen."""
    rates = [float(re.search(r"errors ([\d.]+)%", line)[1]) for line in lines[:6]]  # type: ignore[index]
    assert rates[0] > 50 and rates[-1] < 2
    read = [line.partition(":")[2].split() for line in lines[6:]]
    assert len(read) == 3 and len(read[2]) == 4 and sum(a == b for a, b in zip(*read[1:], strict=True)) >= 3


CHECKS = {
    f"{f.__name__}.py": f for f in (budget, charlm, cifar, detection, digits, fleet, glue, lora, quickstart, text_lines)
}
OPTIONS = {"detection.py": ["--quick"]}


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_example(name: str) -> None:
    CHECKS[name](run(name))


def test_every_example_is_checked() -> None:
    elsewhere = {"browser.py"}  # tests/exporter/test_library_page.py
    assert {p.name for p in FOLDER.glob("*.py")} == {*CHECKS, *elsewhere}
    assert {p.name for p in (FOLDER / "anywhere").iterdir()} == {
        "loop.py",
        "loop.mjs",
    }  # tests/exporter/test_anywhere.py
