"""`--mesh`, `--zero`, `--micro-batches`, `--link`: what is printed and written, and an error for each mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from recompute.cli import main

COMMAND = ["mlp4", "--mesh", "dp=4", "--zero", "2", "--device", "h100-80", "--batch", "64"]
LINK = ["--link", "node=2,nvlink=450GB/s,net=50GB/s"]


def test_a_step_of_four_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, trace, page = tmp_path / "r.json", tmp_path / "t.json", tmp_path / "r.html"
    written = ["--json", str(report), "--trace", str(trace), "--report", str(page)]
    assert main([*COMMAND, *LINK, "--checkpoints", "relu_*", *written]) == 0
    out = capsys.readouterr().out
    words = ["mesh dp=4: 4 ranks, ZeRO stage 2, batch 64 (16 a rank), 4 micro-batches", "peak of each rank, by role"]
    words += ["link nvlink", "link net", "scaling efficiency", "estimated step time", "beside computation"]
    assert [w for w in words if w not in out] == []
    found = json.loads(report.read_text())
    ranks = found["ranks"]
    assert ranks["classes"][0]["peak_bytes"] == found["recompute"]["peak_bytes"]
    assert sum(ranks["classes"][0]["by_role"].values()) == ranks["peak_bytes"]
    assert ranks["step_seconds"] == pytest.approx(ranks["compute_seconds"] + ranks["stalled_seconds"])
    assert 0 < ranks["efficiency"] < 1 and ranks["zero"] == 2
    events = json.loads(trace.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes = {names[e["pid"], e["tid"]] for e in events if e.get("cat") == "transfer" and e["pid"] == 2}
    assert lanes == {c["channel"] for c in ranks["channels"]} | {"nvlink", "net"}
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == 2)
    assert last == pytest.approx(ranks["step_seconds"] * 1e6, rel=1e-3)
    assert "Computation and communication" in page.read_text()


def test_without_links_there_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND]) == 0
    out = capsys.readouterr().out
    assert "for times of communication, say how fast ranks send: --link" in out and "efficiency" not in out
    assert re.search(r"channel weights +\d+ +[\d,]+", out)


def test_the_default_batch_is_that_of_each_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mlp4", "--mesh", "dp=2", "--micro-batches", "4"]) == 0
    assert "batch 64 (32 a rank), 4 micro-batches" in capsys.readouterr().out


def test_a_plan_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.json"
    command = ["mlp4", "--mesh", "dp=2", "--batch", "2048", "--memory-budget", "90%", "--effort", "0.1"]
    assert main([*command, "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    budget = found["plain"]["peak_bytes"] * 0.9
    assert [c["count"] for c in found["ranks"]["classes"]] == [2]
    assert found["ranks"]["peak_bytes"] <= budget
    assert "@dp=" not in capsys.readouterr().out


def test_an_estimate_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *LINK, "--estimate", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"]["peak_bytes"] == found["estimate"]["peak_bytes"]
    assert "ranks" not in found["estimate"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--zero", "2"], "--zero needs ranks: give --mesh dp=N"),
        (["--micro-batches", "2"], "--micro-batches needs ranks"),
        (LINK, "--link needs ranks"),
        (["--mesh", "tp=4", "--zero", "4"], "zero must be 0"),
        (["--mesh", "dp=2,pp=2", "--estimate"], "leave out --estimate"),
        (["--mesh", "dp=two"], "give AXIS=RANKS"),
        (["--mesh", "dp=0"], "at least 1 ranks, not 0"),
        (["--mesh", "dp=2", "--zero", "4"], "zero must be 0"),
        (["--mesh", "dp=4", "--micro-batches", "6"], "6 micro-batches cannot be shared equally among 4 ranks"),
        (["--mesh", "dp=4", "--batch", "10"], "a batch of 10 cannot be cut into 4 equal micro-batches"),
        (["--mesh", "dp=2", "--run", "1"], "leave out --run"),
        (["--mesh", "dp=2", "--compare"], "leave out --compare"),
        (["--mesh", "dp=2", "--slice", "all:0:2"], "give --micro-batches in place of --slice"),
        (["--mesh", "dp=2", "--link", "fast"], "--link: link 'fast': cannot read 'fast'"),
        (["--mesh", "dp=2", "--link", "node=8,nvlnk=1GB/s"], "did you mean nvlink"),
        (["--mesh", "dp=9", "--link", "node=8,nvlink=1GB/s"], "more than the 8 of a node"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    assert main(["mlp4", *options]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("recompute-compile: error:") == 1 and "Traceback" not in error
