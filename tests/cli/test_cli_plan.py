"""Plans on the command line: fitting a budget, comparing strategies, the curve, plans and problems in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import MLP

from recompute.cli import main
from recompute.passes.planners import PLANNERS
from recompute.passes.planners.core.synthetic import residual_chain
from recompute.passes.planners.methods.auto import Auto
from recompute.passes.planners.methods.moccasin import Moccasin

pytest.importorskip("ortools", reason="the planners' cuts need the extra `plan`")

BERT = ["bert-tiny", "--batch", "8", "--option", "seq=32", "--option", "vocab=100", "--device", "v100-32"]
BUDGET = ["--memory-budget", "85%"]


def report_of(arguments: list[str], folder: Path) -> dict:
    assert main([*arguments, "-q", "--json", str(folder / "report.json")]) == 0
    return json.loads((folder / "report.json").read_text())


def test_help_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help-all"])
    assert "--strategy" in capsys.readouterr().out


def test_fits_saves_and_does_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    quick = ["--strategy", "kusumoto-memory"]
    assert main([*BERT, *BUDGET, *quick, "--save-plan", str(plan), "--run", "1", "--check"]) == 0
    out = capsys.readouterr().out
    assert "plan by kusumoto-memory: +" in out and "above the optimum" in out
    assert "the same bits" in out and "(as predicted)" in out
    assert "kept for the backward pass, for use with --checkpoints: " in out
    first = report_of([*BERT, *BUDGET, *quick], tmp_path)
    again = report_of([*BERT, "--plan", str(plan)], tmp_path)
    assert again["recompute"] == first["recompute"]
    assert first["planned"]["peak_bytes"] <= 0.85 * first["plain"]["peak_bytes"]


def test_compare_has_a_row_or_a_reason_for_everyone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Auto, "quick", {"effort": 0.05})
    monkeypatch.setattr(Moccasin, "quick", {**Moccasin.quick, "effort": 0.05})
    assert main([*BERT, *BUDGET, "--compare", "--checkpoints", "layer.0.out", "--json", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    rows = {r["strategy"]: r for r in json.loads((tmp_path / "r.json").read_text())["compare"]}
    assert set(rows) == {name for name, cls in PLANNERS.items() if cls.quick is not None} | {
        "plain",
        "your checkpoints",
    }
    assert all(r["refusal"] or r["peak_bytes"] for r in rows.values())
    quick = [r for r in rows.values() if r["fits"] and r["strategy"] not in ("moccasin", "checkmate")]
    # where live bytes fit, the arena decides: by a hundredth another plan may be luckier with it
    assert rows["auto"]["overhead"] <= min(r["overhead"] for r in quick) + 0.01
    assert rows["plain"]["fits"] is False and "plain (does not fit)" in out
    assert all(r["gap"] is None or r["gap"] >= 0 for r in rows.values())


def test_the_curve_falls(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    found = report_of([*BERT, "--option", "layers=1", "--pareto", str(tmp_path / "curve.svg")], tmp_path)["pareto"]
    peaks = [p["peak_bytes"] for p in found["points"]]
    times = [p["overhead"] for p in found["points"]]
    assert peaks == sorted(peaks) and times == sorted(times, reverse=True) and len(peaks) > 3
    # what the plain step repeats by itself, a plan need not
    assert all(-0.02 <= p["bound"] <= p["overhead"] + 1e-9 for p in found["points"])
    assert peaks[-1] == found["plain_peak_bytes"] and times[-1] == 0
    assert (tmp_path / "curve.svg").read_text().rstrip().endswith("</svg>")


def test_problems_in_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    residual_chain(8).save(tmp_path / "p.json")
    found = report_of([str(tmp_path / "p.json"), "--memory-budget", "50%"], tmp_path)["compare"]
    assert [r["strategy"] for r in found] == ["auto"] and found[0]["fits"]
    assert main([str(tmp_path / "p.json"), "--run", "1"]) == 2
    assert "is a planning problem, and no model: leave out --run" in capsys.readouterr().err
    assert main([*BERT, "--save-problem", str(tmp_path / "bert.json")]) == 0
    assert main([str(tmp_path / "bert.json"), *BUDGET, "--strategy", "kusumoto-memory"]) == 0
    assert "kusumoto-memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "kusumot", *BUDGET], "did you mean kusumoto"),
        (["--strategy", "auto"], "needs a budget"),
        (["--save-plan", "plan.json"], "--save-plan needs a plan"),
        (["--checkpoints", "logits", "--strategy", "chen"], "both define what is recomputed"),
        (["--compare", "--run", "1"], "leave out --run"),
        (["--compare", "--strategy", "chen"], "leave out --strategy"),
        (["--pareto", "--memory-budget", "50%"], "leave out --memory-budget"),
        (["--plan", "nowhere.json"], "cannot read nowhere.json"),
        (["--memory-budget", "0%"], "more than 0 %"),
        (["--memory-budget", "1MB"], "no schedule fits into"),
        (["--memory-budget", "60%", "--max-batch"], "needs an amount"),
        (["--pareto", "curve.doc"], "curve.doc"),
        (["--save-problem", "no/such/folder/p.json"], "does not exist"),
    ],
)
def test_what_can_be_wrong(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [a for a in BERT[1:] if "--max-batch" not in arguments or a not in ("--batch", "8")]
    assert main(["bert-tiny", *options, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_compare_within_more_than_the_plain_step_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """Strategies that find nothing to recompute are shown with the plain step's figures."""
    assert main([MLP, "--compare", "--memory-budget", "8GiB"]) == 0
    assert "min_cut" in capsys.readouterr().out.replace("-", "_")
