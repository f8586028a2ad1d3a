"""An estimate is the step: the same peak, to the byte, for all pairs of options, and for all commands."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import recompute as rc
from recompute import models
from recompute.analysis import biggest_batch, estimates
from recompute.analysis import compare as comparison
from recompute.cli import main
from recompute.compiling.compiler import compile_step
from recompute.compiling.steps import attach_loss


def network() -> onnx.ModelProto:
    """x [N, 3, 4, 4] → Conv → BatchNormalization → Relu → LSTM over the rows → Gemm → 4 scores."""
    g = np.random.default_rng(0)
    shapes = {"conv.w": (6, 3, 3, 3), "conv.b": (6,), "s": (6,), "b": (6,), "m": (6,), "v": (6,),
              "w": (1, 20, 24), "r": (1, 20, 5), "fc.w": (4, 5), "fc.b": (4,)}  # fmt: skip
    weights = [numpy_helper.from_array(g.uniform(0.1, 0.3, s).astype(np.float32), n) for n, s in shapes.items()]
    weights += [numpy_helper.from_array(np.array([4, -1, 24], np.int64), "rows")]
    nodes = [
        helper.make_node("Conv", ["x", "conv.w", "conv.b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"]),
        helper.make_node("Relu", ["n"], ["a"]),
        helper.make_node("Transpose", ["a"], ["t"], perm=[2, 0, 1, 3]),
        helper.make_node("Reshape", ["t", "rows"], ["l"]),
        helper.make_node("LSTM", ["l", "w", "r"], ["", "h"], name="rnn", hidden_size=5),
        helper.make_node("Squeeze", ["h"], ["q"], axes=[0]),
        helper.make_node("Gemm", ["q", "fc.w", "fc.b"], ["y"], transB=1),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 4, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few batches and strategies: it is the steps that are compared."""
    monkeypatch.setattr(estimates, "_MOST_BATCHES", 3)
    monkeypatch.setattr(comparison, "PLANNERS", {})
    monkeypatch.setattr(biggest_batch, "LARGEST_BATCH", 8)
    monkeypatch.setattr(biggest_batch, "best_k", lambda *_: None)
    monkeypatch.setattr(biggest_batch, "lowest_plan", lambda *_: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "network.onnx"
    onnx.save(network(), path)
    return str(path)


#: options of the command line that change the step
OPTIONS: list[list[str]] = [
    ["--freeze", "conv*"],
    ["--trainable", "conv.*,fc.*,s,b,w,r"],
    ["--unroll"],
    ["--precision", "bf16"],
    ["--precision", "fp16"],
    ["--optimizer", "momentum"],
    ["--group", "fc.*:lr=0.1"],
    ["--batch", "6"],
    ["--input-shapes", "x:[4,3,4,4]"],
    ["--loss", "mse"],
    ["--checkpoints", "c,l"],
    ["--offload"],
    ["--slice", "micro:0:2"],
    ["--no-schedule"],
    ["--no-rebuild"],
    ["--no-fuse-head"],
    ["--no-fuse-attention"],
    ["--providers", "numpy"],
    ["--init", "he"],
    ["--seed", "3"],
    ["--max-seconds", "9"],
    ["--max-bytes", "1GiB"],
    ["--stop-on-nan"],
]
#: of each two options, one of these commands has both, one has the first, one the second and one neither: different
#: halves of eight commands, all with the first command (Kleitman & Spencer 1973)
HALVES = list(itertools.islice(itertools.combinations(range(1, 8), 3), len(OPTIONS)))


@pytest.mark.parametrize("row", range(8))
def test_options_in_pairs(row: int, model: str, tmp_path: Path) -> None:
    chosen = [o for o, half in zip(OPTIONS, HALVES, strict=True) if row == 0 or row in half]
    words = list(itertools.chain(*chosen))
    if "--slice" in words and "--offload" in words:  # which are refused together
        words.remove("--offload")
    if "--offload" in words and "--checkpoints" not in words:
        words += ["--checkpoints", "c,l"]
    if "--batch" in words and "--input-shapes" in words:
        words[words.index("--batch") + 1] = "4"
    if not {"--batch", "--input-shapes"} & set(words):
        words += ["--batch", "2"]
    command = [model, *words, "--estimate", "--run", "1", "--json", str(tmp_path / "r.json"), "-q"]
    assert main(command) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    step = found["recompute"] or found["plain"]
    assert found["estimate"]["peak_bytes"] == step["peak_bytes"] == found["run"]["measured_peak_bytes"]
    assert found["estimate"]["plain_peak_bytes"] == found["plain"]["peak_bytes"]


def report(tmp_path: Path, *words: str) -> dict[str, Any]:
    """What a command writes as JSON."""
    assert main([*words, "--json", str(tmp_path / "r.json"), "-q"]) == 0
    return json.loads((tmp_path / "r.json").read_text())


@pytest.mark.parametrize(
    "options", [["--freeze", "conv*"], ["--unroll"], ["--optimizer", "sgd", "--precision", "bf16"]]
)
def test_all_commands_see_one_step(options: list[str], model: str, tmp_path: Path) -> None:
    step = report(tmp_path, model, "--batch", "4", *options)["plain"]["peak_bytes"]
    assert report(tmp_path, model, "--batch", "4", *options, "--estimate")["estimate"]["peak_bytes"] == step
    rows = report(tmp_path, model, "--batch", "4", *options, "--compare", "--memory-budget", "90%")["compare"]
    assert next(r for r in rows if r["strategy"] == "plain")["peak_bytes"] == step
    of_a_rank = report(tmp_path, model, "--batch", "4", *options, "--mesh", "dp=1")
    assert of_a_rank["ranks"]["peak_bytes"] == step
    found = report(tmp_path, model, "--max-batch", "--memory-budget", f"{step}B", *options, "--no-slicing")
    plain = next(s for s in found["max_batch"]["strategies"] if s["strategy"] == "plain")
    assert plain["batch"] >= 4 and dict(plain["curve"])[plain["batch"]] == plain["peak_bytes"] <= step
    again = report(tmp_path, model, "--batch", str(plain["batch"]), *options)
    assert again["plain"]["peak_bytes"] == plain["peak_bytes"]


def test_programs_at_another_batch_are_made_as_they_were(model: str) -> None:
    def frozen(batch: int) -> rc.Program:
        return rc.load(model, batch=batch, unroll=True).freeze("conv*", eval=True)

    def evaluated(batch: int) -> rc.Program:
        return rc.load(model, batch=batch, mode="eval")

    def with_loss(batch: int) -> rc.Program:
        program = rc.load(model, batch=batch)
        rc.losses.mse(program["y"])
        return program

    def adapted(batch: int) -> rc.Program:
        return rc.lora(rc.load(model, batch=batch), "fc.w", r=2)

    for made in (frozen, evaluated, with_loss, adapted):
        there = made(6)
        step = compile_step(there, attach_loss(there, None)[0], rc.Adam())
        assert rc.estimate(made(2), batch=6).peak_bytes == step.figures.peak_bytes, made.__name__


def test_a_model_that_cannot_have_one_sample_is_estimated_at_others() -> None:
    """Squeeze without axes takes the batch's axis at batch 1: then Gemm has no matrix."""
    made = network()
    del made.graph.node[6].attribute[:]
    found = rc.estimate(made, batch=4)
    assert found.by_batch is None and "memory by batch is not known" in found.notes[-1]
    assert found.peak_bytes == rc.estimate(network(), batch=4).peak_bytes


def test_a_program_with_operators_by_hand_has_one_batch(model: str) -> None:
    program = rc.load(model, batch=2)
    b = program.builder()
    y = b.Mul(program["y"].value, program["y"].value)
    program.append(b, outputs=[y.name])
    with pytest.raises(rc.UsageError, match="fixes its batch at 2"):
        rc.estimate(program, batch=4)


def test_a_planned_step_is_estimated_as_it_runs() -> None:
    program = rc.load(models.build("lenet", batch=64))
    loss = rc.losses.cross_entropy(program["logits"])
    rc.RecomputeOptimizer(rc.SGD(0.1)).set_budget("70%").minimize(loss)
    assert program.planned is not None and program.planned.reruns + len(program.planned.slices) > 0
    assert rc.estimate(program).peak_bytes == rc.Executor().session(program, [loss.name]).measured_peak_bytes


def test_one_name_is_no_list_of_letters(model: str) -> None:
    program = rc.load(model, batch=4)
    loss = rc.losses.cross_entropy(program["y"]).name
    one = compile_step(program, loss, rc.SGD(0.1), checkpoints="c", fetch="y")
    assert one.plan is not None and one.plan.checkpoints == ("c",) and "y" in one.program.block.outputs
    assert one.figures == compile_step(program, loss, rc.SGD(0.1), checkpoints=["c"], fetch=["y"]).figures


def test_what_an_estimate_does_not_consider_is_refused(model: str) -> None:
    for words in (["--strategy", "chen"], ["--plan", "p.json"]):
        assert main([model, "--estimate", "--batch", "2", *words]) == 2
    with pytest.raises(rc.UsageError, match="a Program is loaded already"):
        rc.estimate(rc.load(model, batch=2), input_shapes={"x": [4, 3, 4, 4]})
