"""The mesh that is found for a number of ranks: what fits first, peaks as compiled, and what was counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

import recompute as rc
from recompute.analysis.cluster.candidates import Candidate
from recompute.analysis.cluster.plans import described
from recompute.analysis.cluster.pruning import rough_bytes, rough_seconds
from recompute.analysis.cluster.search import Search, as_published, find_mesh
from recompute.analysis.facts import facts_of
from recompute.cli.command import main
from recompute.communication.links import Network
from recompute.compiling.steps import Steps
from recompute.cost import device
from recompute.errors import UsageError
from recompute.language.ir import Block
from recompute.passes import Target

OPTIONS = {"layers": 4, "hidden": 32, "heads": 2, "vocab": 32, "seq": 8}
LINK = "nvlink=450GB/s"
TARGET = Target(cost=device("h100-80"), precision="bf16")


@pytest.fixture(scope="module")
def plans() -> Any:
    return find_mesh(
        "gpt2-tiny", 4, batch=8, network=LINK, budget=400_000, target=TARGET, options=OPTIONS, loss="cross_entropy"
    )


def test_what_fits_comes_first(plans: Any) -> None:
    fits = [r.fits for r in plans.rows]
    assert fits == sorted(fits, reverse=True) and fits[0] and not fits[-1]
    assert all(r.fits == (r.peak_bytes <= plans.budget) for r in plans.rows)
    seconds = [r.step_seconds for r in plans.rows if r.fits]
    assert seconds[1:] == sorted(seconds[1:])  # the first is simulated, the others are not
    assert plans.counted > 50 and len(plans.rows) >= 4
    text = str(plans)
    assert f"{plans.rows[0].peak_bytes:,}" in text and "too large" in text and "4 ranks verified" in text


def test_the_peak_is_that_of_the_whole_step(plans: Any) -> None:
    row = plans.rows[0]
    c = row.candidate
    assert row.exact
    optimizer = rc.DataParallel(
        rc.Adam(), c.mesh, batch=8, micro_batches=row.micro_batches * c.dp, zero=c.zero, chunks=c.chunks,
        schedule={"zero-bubble": "zb"}.get(c.schedule, c.schedule), accumulate="running",
    )  # fmt: skip
    kept = ["h.*.attn.out", "h.*.out"] if c.recompute == "full" else None
    target = as_published(TARGET)
    whole = rc.estimate_stages("gpt2-tiny", optimizer, target=target, network=LINK, checkpoints=kept, options=OPTIONS)
    assert whole.peak_bytes == row.peak_bytes


def test_figures_for_machines(plans: Any) -> None:
    found = plans.to_dict()
    json.dumps(found)
    assert found["mesh"] and sum(r["count"] for r in found["ranks"]) == 4
    assert {"step_seconds", "mfu", "bubble", "exposed_communication_seconds"} <= set(found)
    assert max(r["peak_bytes"] for r in found["ranks"]) <= found["peak_bytes"] <= found["budget"]
    assert len(found["candidates"]) == len(plans.rows)


def _block() -> Block:
    return Steps("gpt2-tiny", options=OPTIONS).program(1)[0].block


def test_facts_are_those_of_the_network() -> None:
    block = _block()
    facts = facts_of(block)
    assert facts.layers == 4
    assert facts.parameters == sum(v.size for v in block.parameters)
    hidden, seq = 32, 8
    assert facts.stream == hidden * seq
    assert facts.layer_parameters == 12 * hidden**2 + 13 * hidden
    products = 24 * seq * hidden**2 + 4 * seq**2 * hidden
    assert products <= facts.layer_flops < 1.5 * products  # norms and the like are small, but for so small a network


def test_formulas_follow_what_is_divided() -> None:
    facts = facts_of(_block())
    one = rough_bytes(facts, Candidate())
    assert rough_bytes(facts, Candidate(tp=2, sequence_parallel=True)) == pytest.approx(one / 2)
    assert rough_bytes(facts, Candidate(recompute="full")) < one
    assert rough_bytes(facts, Candidate(pp=2, schedule="zero-bubble")) > rough_bytes(facts, Candidate(pp=2))
    network, cost = Network.parse(LINK), device("h100-80")
    seconds = [rough_seconds(facts, Candidate(dp=n), 64, cost, network, None) for n in (1, 2, 4)]
    assert seconds == sorted(seconds, reverse=True)


# -- what the search tries ---------------------------------------------------------------------------------------------

MEDIUM = {"layers": 2, "hidden": 256, "heads": 4, "vocab": 512, "seq": 128, "context": 128}
EXPERTS = {"layers": 2, "hidden": 128, "inner": 256, "heads": 4, "groups": 4, "vocab": 512, "seq": 64,
           "experts": 4, "tokens": 64, "capacity": 40}  # fmt: skip
#: heads, words, layers and the sequence are odd: two ranks can share the batch alone
ODD = {"layers": 1, "hidden": 258, "inner": 513, "heads": 3, "groups": 3, "vocab": 509, "seq": 31}


def search(model: str, options: dict[str, int], ranks: int, batch: int) -> Search:
    given = {"options": options, "loss": "cross_entropy"}
    return Search(model, ranks, batch, LINK, None, "10GiB", TARGET, None, given)


@pytest.mark.parametrize(
    ("model", "way"),
    [
        ("gpt2-tiny", {"dp": 4, "zero": 2}),
        ("gpt2-tiny", {"dp": 4, "zero": 3, "recompute": "full"}),
        ("gpt2-tiny", {"dp": 2, "pp": 2, "zero": 3}),
        ("gpt2-tiny", {"dp": 2, "cp": 2, "zero": 3}),
        ("gpt2-tiny", {"cp": 2, "tp": 2, "sequence_parallel": True}),
        ("moe-tiny", {"dp": 2, "ep": 2, "zero": 2, "recompute": "full"}),
        ("moe-tiny", {"cp": 2, "ep": 2}),
        ("moe-tiny", {"ep": 2, "tp": 2, "sequence_parallel": True}),
    ],
)
def test_ways_are_priced_as_they_are_compiled(model: str, way: dict[str, Any]) -> None:
    """Their bytes: 8 % too few to 40 % too many, as those of ways along dp, tp and pp."""
    found = search(model, MEDIUM if model == "gpt2-tiny" else EXPERTS, 4, 8)
    c = Candidate(micro_batch=1, **way)
    assert c in set(found.candidates())
    row = found.row(c, found.stages(c))
    assert 0.92 < rough_bytes(found.facts, c, 8) / row.peak_bytes < 1.4


def test_the_search_lists_no_way_twice() -> None:
    ways = list(search("moe-tiny", EXPERTS, 4, 4).candidates())
    assert len(ways) == len(set(ways)) and {c.zero for c in ways} == {0, 1, 2, 3}
    assert {c.cp for c in ways} == {c.ep for c in ways} == {1, 2, 4}
    assert not [c for c in ways if c.zero == 2 and c.dp * c.micro_batch == 4]


@pytest.mark.parametrize(
    ("model", "options", "axis"),
    [("llama-tiny", {**ODD, "seq": 32}, "cp"), ("moe-tiny", {**ODD, "experts": 2, "tokens": 31, "capacity": 40}, "ep")],
)
def test_an_axis_is_the_answer_where_nothing_else_divides(model: str, options: dict[str, int], axis: str) -> None:
    plans = find_mesh(model, 2, batch=1, network=LINK, target=TARGET, options=options, loss="cross_entropy")
    assert plans.best is not None and plans.best.mesh == f"pp=1,{axis}=2"
    assert f"{axis}=2" in str(plans) and plans.to_dict()[axis] == 2
    assert any("nothing is divided along tp" in note for note in plans.notes)


def test_zero_3_is_the_answer_where_nothing_else_fits() -> None:
    given = {"options": {**ODD, "layers": 3}, "loss": "cross_entropy", "target": TARGET, "budget": 6_450_000}
    plans = find_mesh("llama-tiny", 8, batch=8, network=LINK, **given)
    assert plans.best is not None and plans.rows[0].candidate.zero == 3 and plans.rows[0].exact
    assert {r.candidate.zero for r in plans.rows if r.fits} == {3} and len(plans.rows) >= 4


def test_candidates_in_words() -> None:
    c = Candidate(2, 1, 4, 1, 1, "interleaved", 2, False, "full")
    assert described(c) == "dp=2,pp=4,tp=1, micro-batches of 1, interleaved of 2 chunks, ZeRO 1, layers recomputed"


def test_what_cannot_be_is_refused() -> None:
    nodes = "node=8,nvlink=450GB/s,net=50GB/s"
    with pytest.raises(UsageError, match="cannot share a batch of 7"):
        find_mesh("gpt2-tiny", 1031, batch=7, network=nodes, target=TARGET, options=OPTIONS)
    with pytest.raises(UsageError, match="rates of a device"):
        find_mesh("mlp", 4, batch=8, network=LINK)


# -- the command ------------------------------------------------------------------------------------------------------

SMALL = [f"--option={k}={v}" for k, v in OPTIONS.items()]


def test_command_finds_a_mesh(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trace, facts = tmp_path / "trace.json", tmp_path / "facts.json"
    few = [f"--option={k}={v}" for k, v in {**OPTIONS, "layers": 2}.items()]
    given = ["gpt2-tiny", *few, "--mesh", "auto", "--ranks", "2", "--batch", "2", "--device", "h100-80", "--link", LINK]
    assert main([*given, "--trace", str(trace), "--json", str(facts)]) == 0
    found = json.loads(facts.read_text())["cluster"]
    assert found["mesh"] in capsys.readouterr().out
    assert "bytes of stage 0" in trace.read_text()
    assert main([*given, "--memory-budget", "20kB"]) == 2
    assert "no way was found" in capsys.readouterr().err


def test_command_with_stages(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    facts, trace = tmp_path / "facts.json", tmp_path / "trace.json"
    given = ["gpt2-tiny", *SMALL, "--mesh", "dp=2,pp=2", "--batch", "8", "--micro-batches", "8", "--device", "h100-80"]
    more = ["--link", LINK, "--checkpoints", "h.*.out", "--schedule", "zb", "--zero", "1"]
    assert main([*given, *more, "--trace", str(trace), "--json", str(facts)]) == 0
    found = json.loads(facts.read_text())["cluster"]
    assert found["mesh"] == "dp=2,pp=2" and [r["count"] for r in found["ranks"]] == [2, 2]
    assert 0 < found["bubble"] < 1 and found["mfu"] > 0
    assert {"recompute", "bubble"} & {e.get("cat") for e in json.loads(trace.read_text())["traceEvents"]}
    assert main([*given, *more, "--report", str(tmp_path / "page.html")]) == 2
    printed = capsys.readouterr()
    assert "leave out --report" in printed.err and f"{found['ranks'][0]['peak_bytes']:,}" in printed.out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--mesh", "auto", "--ranks", "8"], "needs --batch N"),
        (["--mesh", "auto", "--batch", "8"], "needs --ranks N"),
        (["--mesh", "auto", "--batch", "8", "--ranks", "8"], "needs --device NAME"),
        (["--mesh", "auto", "--batch", "8", "--ranks", "8", "--device", "h100-80"], "needs --link"),
        (["--mesh", "auto", "--ranks", "8", "--zero", "1"], "tries many configurations: leave out --zero"),
        (["--mesh", "auto", "--ranks", "8", "--run", "1"], "leave out --run"),
        (["--mesh", "auto", "--ranks", "8", "--batch", "8", "--device", "h100-80", "--link", "net=fast"], "--link"),
        (["--mesh", "dp=2,pp=2", "--ranks", "4", "--batch", "8"], "needs --mesh auto"),
        (["--mesh", "dp=2,pp=2"], "needs --batch N"),
        (["--mesh", "dp=2,pp=2", "--batch", "7"], "a multiple of"),
        (["--mesh", "dp=2,pp=99", "--batch", "396"], "stages"),
        (["--mesh", "what"], "--mesh auto --ranks N"),
        (["--ranks", "8"], "needs --mesh auto"),
        (["--mesh", "dp=2", "--chunks", "2"], "give a mesh with pp"),
        (["--schedule", "zb"], "give a mesh with pp"),
    ],
)
def test_command_refuses(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt2-tiny", *SMALL, *given]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err and not captured.out
