"""Estimates before anything runs: what holds the peak's bytes, memory by batch, the biggest batch of a budget."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import recompute as rc
from recompute import models
from recompute.analysis.alive import ROLES, layer_of
from recompute.analysis.biggest_batch import largest_fitting
from recompute.analysis.estimates import fit
from recompute.analysis.strategies import equal_work, lowest_plan, spaced
from recompute.budgets import as_bytes
from recompute.cli import main
from recompute.compiling.compiler import checkpoint_candidates, compile_step
from recompute.compiling.steps import Steps, attach_loss

MLP = str(Path(models.__file__).parent / "mlp.onnx")
NARROW = {"image": 32, "classes": 10}
#: one block a stage: half the layers of resnet18
SHALLOW = {**NARROW, "blocks": (1, 1, 1, 1)}
SHALLOW_WORDS = ["resnet18", "--option", "image=32", "--option", "classes=10", "--option", "blocks=1,1,1,1"]
#: between the batches that were compiled, tiles of scratch and the packing may change by this share of the peak
STEPS = 0.001
SMALL = [("mlp4", {}), ("lenet", {}), ("resnet18", NARROW), ("bert-tiny", {"seq": 32})]


def two_inputs(*dims: object) -> onnx.ModelProto:
    """y = x w, where x is [*dims]."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(dims))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    w = helper.make_tensor("w", TensorProto.FLOAT, [300, 300], bytes(4 * 300 * 300), raw=True)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    return helper.make_model(helper.make_graph([node], "g", [x], [y], [w]), opset_imports=[helper.make_opsetid("", 20)])


# -- what holds the bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), SMALL)
@pytest.mark.parametrize("recomputed", [False, True])
def test_roles_and_layers_add_up_to_the_compiled_peak(name: str, options: dict, recomputed: bool) -> None:
    names = models.info(name, **options).checkpoints if recomputed else None
    found = rc.estimate(name, batch=4, checkpoints=names, options=options)
    assert set(found.by_role) == set(ROLES) and all(n >= 0 for n in found.by_role.values())
    assert sum(found.by_role.values()) == sum(found.by_layer.values()) == found.peak_bytes
    # the same network with weights, compiled as for training
    program = rc.load(models.build(name, batch=4, **options))
    step = compile_step(program, attach_loss(program, None)[0], rc.Adam(), checkpoints=names)
    assert step.figures.peak_bytes == found.peak_bytes
    parameters = sum(v.nbytes for v in program.block.parameters)
    assert found.by_role["parameter"] == parameters
    assert 2 * parameters <= found.by_role["optimizer state"] < 2 * parameters + 64
    assert found.by_role["unused"] <= 0.02 * found.arena_bytes


def test_the_moment_of_the_peak_is_an_operator_of_the_step() -> None:
    found = rc.estimate("lenet", batch=8)
    steps = Steps("lenet")
    operators = steps.compile(8).program.operators
    assert found.peak_at.operators == len(operators)
    assert found.peak_at.text.startswith(("backward %", "%", "recompute %", "optimize %"))
    assert found.peak_at.role == operators[found.peak_at.index].role.value
    assert found.largest[0].bytes == max(h.bytes for h in found.largest)


def test_layers_are_read_from_names() -> None:
    for name, layer in {
        "layer1.0.conv1": "layer1.0",
        "layer1.0.downsample.1.weight": "layer1.0",
        "layer1.0.conv1_grad": "layer1.0",
        "layer1.0.out@1": "layer1.0",
        "fc.weight.moment1": "fc",
        "fc_1": "fc_1",
        "fc_1_grad#0": "fc_1",
        "h.11.attn.probs": "h.11",
        "/layer1/layer1.0/conv1/Conv_output_0": "layer1.0",
        "/fc/Gemm_output_0": "fc",
    }.items():
        assert layer_of(name) == layer


def test_checkpoints_are_worth_what_the_figures_say() -> None:
    names = models.info("resnet18", **NARROW).checkpoints
    found = rc.estimate("resnet18", batch=4, checkpoints=names, options=NARROW)
    steps = Steps("resnet18", options=NARROW, checkpoints=names)
    plain, again = steps.figures(4), steps.figures(4, names)
    assert [c.name for c in found.checkpoints] == list(names)
    saved = sum(c.saved_bytes for c in found.checkpoints)
    assert saved >= plain.kept_bytes - again.kept_bytes > 0
    assert sum(c.rebuild_flops for c in found.checkpoints) == again.repeated_flops
    assert sum(c.rebuild_operators for c in found.checkpoints) == again.recomputed_operators
    assert all(c.rebuild_seconds > 0 for c in found.checkpoints if c.rebuild_operators)


def test_a_program_is_estimated_as_it_is() -> None:
    program = rc.load(models.build("lenet", batch=8))
    loss = rc.losses.cross_entropy(program["logits"])
    before = program.block
    found = rc.estimate(program, loss=loss)
    assert program.block is before and found.batch == 8 and found.by_batch is None
    assert found.peak_bytes == rc.estimate("lenet", batch=8).peak_bytes
    rc.Adam().minimize(loss)
    executor = rc.Executor()
    assert rc.estimate(program).peak_bytes == executor.session(program).measured_peak_bytes
    with pytest.raises(rc.UsageError, match="is already a training step"):
        rc.estimate(program, checkpoints=["relu1"])
    with pytest.raises(rc.UsageError, match="fixes its batch at 8: it cannot be compiled for 16"):
        rc.estimate(program, batch=16)


def test_a_program_with_an_open_source_has_other_batches() -> None:
    program = rc.load(models.build("lenet"), batch=8)
    found = rc.estimate(program, batch=16)
    assert found.peak_bytes == rc.estimate("lenet", batch=16).peak_bytes
    loss = rc.losses.mse(program["logits"])  # which is appended at the other batch, too
    other = rc.load(models.build("lenet"), batch=16)
    step = compile_step(other, rc.losses.mse(other["logits"]).name, rc.Adam())
    assert rc.estimate(program, batch=16, loss=loss).peak_bytes == step.figures.peak_bytes


def test_a_file_takes_what_the_zoo_takes(tmp_path: Path) -> None:
    onnx.save(models.build("lenet"), tmp_path / "lenet.onnx")
    of_file, of_zoo = rc.estimate(str(tmp_path / "lenet.onnx"), batch=8), rc.estimate("lenet", batch=8)
    assert of_file.peak_bytes == of_zoo.peak_bytes and of_file.by_role == of_zoo.by_role
    assert of_file.by_batch == of_zoo.by_batch


def test_weights_and_state_are_not_allocated() -> None:
    rc.estimate("lenet", batch=1)  # modules are loaded
    tracemalloc.start()
    found = rc.estimate(models.build("vgg16", batch=2, weights=False, image=32))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.persistent_bytes > 400 << 20 and most < 40 << 20


# -- memory by batch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), SMALL)
def test_memory_by_batch_predicts_other_batches(name: str, options: dict) -> None:
    f = rc.estimate(name, batch=16, options=options).by_batch
    assert f is not None and f.pieces[0].first == 1 and f.pieces[-1].last >= 32
    assert all(b.first == a.last + 1 for a, b in zip(f.pieces, f.pieces[1:], strict=False))
    assert all(abs(f.peak(b) - peak) <= f.deviation <= f.tolerance for b, peak in f.compiled)
    steps = Steps(name, options=options)
    compiled = {b for b, _ in f.compiled}
    for p in f.pieces:
        inside = [b for b in (p.first + 1, (p.first + 2 * p.last) // 3) if p.checked and p.first < b < p.last]
        for b in set(inside) - compiled:
            assert abs(f.peak(b) - steps.peak(b)) <= max(f.tolerance, STEPS * f.peak(b)), b


def test_pieces_of_known_functions() -> None:
    line = fit(lambda b: 100 + 7 * b, 1, 64, 0)
    assert [(p.first, p.last, p.fixed, p.per_sample) for p in line.pieces] == [(1, 64, 100, 7)] and not line.deviation
    bent = fit(lambda b: max(1000 + 2 * b, 700 + 17 * b), 1, 64, 0)
    assert bent.breakpoints == (21,) or bent.breakpoints == (20,)
    assert [p.per_sample for p in bent.pieces] == [2, 17]
    assert all(bent.peak(b) == max(1000 + 2 * b, 700 + 17 * b) for b in range(1, 65))
    aligned = fit(lambda b: -(-(50 + 9 * b) // 64) * 64, 1, 64, 128)
    assert len(aligned.pieces) == 1 and aligned.deviation <= 64
    with pytest.raises(rc.UsageError, match="known for batches 1 to 64, not for 65"):
        line.peak(65)


# -- the biggest batch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "budget"),
    [("mlp4", {}, "2MB"), ("lenet", {}, "8MiB"), ("bert-tiny", {"seq": 16}, 75_000_000)],
)
def test_the_biggest_batch_fits_and_one_more_does_not(name: str, options: dict, budget: int | str) -> None:
    names = [n for n in models.info(name, **options).checkpoints if "residual" not in n]
    found = rc.max_batch(name, budget, checkpoints=names, options=options, slicing=False)
    assert found.names()[:4] == ["plain", "checkpoints", "sqrt", "best-k"] and set(found.names()[4:]) <= {"auto"}
    steps = Steps(name, options=options)
    for s in found.strategies[:4]:
        assert s.batch > 1
        assert steps.peak(s.batch, s.checkpoints) == s.peak_bytes <= found.budget
        assert steps.peak(s.batch + 1, s.checkpoints) == s.next_peak_bytes > found.budget
        assert s.seconds_per_sample == pytest.approx(s.step_seconds / s.batch)
        assert dict(s.curve)[s.batch] == s.peak_bytes and len(s.curve) >= 6
        assert s.overhead == 0 if s.checkpoints is None else s.overhead > -0.01
    assert found.batch == max(s.batch for s in found.strategies)
    assert found["plain"].batch <= found.batch


def test_the_biggest_batch_by_a_plan() -> None:
    pytest.importorskip("ortools", reason="the planners' cuts need the extra `plan`")
    found = rc.max_batch("resnet18", "200MiB", options=SHALLOW, effort=0.02)
    auto, steps = found["auto"], Steps("resnet18", options=SHALLOW)
    assert auto.peak_bytes <= found.budget < auto.next_peak_bytes and auto.overhead > 0
    assert auto.batch >= max(s.batch for s in found.strategies if s is not auto)
    plan = lowest_plan(steps, auto.batch)
    assert plan is not None and steps.peak(auto.batch, plan.kept) <= 1.05 * auto.peak_bytes
    # a budget on the command line finds a plan for that batch
    program, loss = steps.program(auto.batch)
    assert compile_step(program, loss, rc.Adam(), budget=found.budget, effort=0.02).figures.peak_bytes <= found.budget


def test_the_biggest_batch_in_slices() -> None:
    found = rc.max_batch("mlp", "100KB", optimizer=rc.SGD(0.1))
    whole, best = found["plain"], found["slices"]
    assert best.slices == ("all:0:4",) and best.batch > 2 * whole.batch and best.batch % 4 == 0
    sliced = Steps("mlp", optimizer=rc.RecomputeOptimizer(rc.SGD(0.1)).set_slices("all:0:4"))
    assert sliced.peak(best.batch) == best.peak_bytes <= found.budget < best.next_peak_bytes
    assert any(n.startswith(f"slices: 4 of {best.batch // 4:,}, where the search ends") for n in found.notes)
    assert f"--batch {found.batch} --" in str(found)
    without = rc.max_batch("mlp", "100KB", optimizer=rc.SGD(0.1), slicing=False)
    assert not any(s.slices for s in without.strategies) and without["plain"].batch == whole.batch


def test_a_batch_that_only_the_search_limits_is_reported() -> None:
    found = rc.max_batch("mlp", "64GiB", slicing=False)
    assert found.batch == 1 << 20 and "the search ends at batch 1,048,576" in found.notes[-1]


def test_a_plan_is_not_used_for_other_operators() -> None:
    # at batch 1 the gradients of what is the same for all samples need no sum: the numbers are of other operators
    options = {"layers": 1, "hidden": 32, "heads": 2, "seq": 32, "vocab": 100}
    steps = Steps("gpt2-tiny", options=options)
    auto = lowest_plan(steps, 8)
    assert auto is not None and steps.peak(8, auto.kept) < steps.peak(8)
    with pytest.raises(rc.UsageError, match="at batch 1, gpt2-tiny has other operators than the plan"):
        steps.peak(1, auto.kept)
    found = rc.max_batch("gpt2-tiny", "8MB", options=options, slicing=False)
    assert found["auto"].peak_bytes <= found.budget


def test_the_search_asks_little_and_looks_past_a_dip() -> None:
    asked: list[int] = []

    def line(b: int) -> int:
        asked.append(b)
        return 1000 + 37 * b

    assert largest_fitting(line, 1_000_000) == 27_000 and len(set(asked)) < 12
    assert largest_fitting(line, 1036) == 0 and largest_fitting(line, 1037) == 1
    assert largest_fitting(lambda b: 100 * b if b < 7 else 60 * b, 650) == 10
    assert largest_fitting(lambda b: b * b * b, 10**9) == 1000
    assert largest_fitting(lambda b: 5, 10) == 1 << 20


def test_strategies_pick_candidates_evenly() -> None:
    program, _ = Steps("resnet18", options=NARROW).program(2)
    candidates, _ = checkpoint_candidates(program.block)
    names = [c.value.name for c in candidates]
    assert spaced(candidates, len(names)) == tuple(names)
    assert len(spaced(candidates, 3)) == 3
    chosen = equal_work(candidates, 3)
    ends = [names.index(n) for n in chosen]
    work = [sum(c.flops for c in candidates[a:b]) for a, b in zip([0, *ends], [*ends, None], strict=True)]
    assert max(work) < 2.5 * min(work)


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 16 << 30), ("16GB", 16 * 10**9), ("500MB", 500 * 10**6), ("1.5G", 3 << 29), ("64 kib", 65536),
     ("4096", 4096), (4096, 4096)],
)  # fmt: skip
def test_amounts_of_memory(text: str | int, size: int) -> None:
    assert as_bytes(text) == size


@pytest.mark.parametrize("text", ["", "abc", "16QiB", "-1GiB", "1e9", "0", "0.2", "16 GiB GiB", 0, -5])
def test_nonsense_amounts(text: str | int) -> None:
    with pytest.raises(rc.UsageError, match=r"expected e\.g\. 16GiB|must be more than 0"):
        as_bytes(text)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_free_dimensions_besides_the_batch() -> None:
    model = two_inputs("N", "T", 300)
    for asked in (lambda: rc.estimate(model), lambda: rc.max_batch(model, "1GiB")):
        with pytest.raises(rc.UsageError, match=r"T \(axis 1 of x\).*--dim T=16"):
            asked()
    found = rc.estimate(model, input_shapes={"x": [4, 7, 300]}, batch=8)
    assert found.batch == 8 and found.peak_bytes > rc.estimate(model, input_shapes={"x": [4, 7, 300]}).peak_bytes


def test_a_fixed_batch_is_opened(tmp_path: Path) -> None:
    """As `load` does, which needs the weights."""
    model = two_inputs(4, 300)
    assert rc.estimate(model).batch == 4 and rc.estimate(model).by_batch is None
    with pytest.raises(rc.ModelError, match="'w' has external data: load the model by its path"):
        rc.max_batch(model, "1GiB")
    onnx.save(rc.models.build("lenet", batch=2), tmp_path / "fixed.onnx")
    found = rc.estimate(str(tmp_path / "fixed.onnx"), batch=5)
    assert found.batch == 5 and found.by_batch is not None
    assert found.peak_bytes == rc.estimate("lenet", batch=5).peak_bytes
    open_ = rc.max_batch("lenet", "20MiB", slicing=False)
    assert rc.max_batch(str(tmp_path / "fixed.onnx"), "20MiB", slicing=False).batch == open_.batch > 2


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["lenet", "--memory-budget", "16QiB", "--max-batch"], "--memory-budget: cannot read '16QiB'"),
        (["lenet", "--memory-budget", "0", "--max-batch"], "must be more than 0 bytes"),
        (["lenet", "--max-batch"], "--max-batch needs --memory-budget SIZE"),
        (["lenet", "--max-batch", "--memory-budget", "1GiB", "--run", "1"], "leave out --run"),
        (["lenet", "--estimate", "--batch", "0"], "--batch must be at least 1, not 0"),
        (["lenet", "--memory-budget", "500kB", "--max-batch"], "cannot hold even batch 1 of lenet: it takes at least"),
        (["resnet51", "--estimate"], "did you mean resnet50"),
        (["lenet", "--seq", "8", "--estimate"], "has no option 'seq'"),
        (["lenet", "--estimate", "--checkpoints", "nothing"], "no value is called 'nothing'"),
    ],
)
def test_errors(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert why in err and "Traceback" not in err


def test_a_batch_beyond_the_budget_is_refused_with_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*SHALLOW_WORDS, "--batch", "256", "--run", "1", "--memory-budget", "114MiB", "--checkpoints", "logits"]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert "building" not in out  # nothing was built
    assert "resnet18 at batch 256 with these checkpoints takes" in err and "but --memory-budget is 114.00 MiB" in err
    assert "the biggest batch that fits like this is" in err
    assert "the cheapest plan that makes batch 256 fit is" in err
    if "'auto'" in err:
        assert f"--memory-budget {114 << 20}, without --checkpoints" in err
    else:
        names = err.rpartition("--checkpoints ")[2].splitlines()[0].split(",")
        steps = Steps("resnet18", options=SHALLOW)
        assert steps.peak(256, names) <= 114 << 20 < steps.peak(256)


def test_a_batch_beyond_the_budget_is_made_to_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ortools", reason="the planners' cuts need the extra `plan`")
    report = tmp_path / "report.json"
    command = [*SHALLOW_WORDS, "--batch", "256", "--json", str(report)]
    assert main([*command, "--run", "1", "--memory-budget", "114MiB", "--effort", ".02"]) == 0
    found = json.loads(report.read_text())
    assert found["run"]["measured_peak_bytes"] == found["planned"]["peak_bytes"] <= 114 << 20
    assert found["plain"]["peak_bytes"] > 114 << 20
    capsys.readouterr()
    assert main([*command, "--memory-budget", "84MiB"]) == 2
    err = capsys.readouterr().err
    assert "no schedule fits into" in err and "the biggest batch that fits without recomputation is" in err


def test_a_step_beyond_this_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recompute.cli.memory.available_memory", lambda: 2 << 20)
    assert main(["lenet", "--batch", "64", "--run", "1"]) == 1
    err = capsys.readouterr().err
    assert "lenet at batch 64 takes" in err and "this machine has only 2.00 MiB available" in err
    assert "the biggest batch that fits like this is" in err


# -- the command line -------------------------------------------------------------------------------------------------


def test_max_batch_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main([MLP, "--memory-budget", "1MB", "--max-batch", "--json", str(report)]) == 0
    out = capsys.readouterr().out
    found = json.loads(report.read_text())["max_batch"]
    assert found["budget"] == 10**6 and found["batch"] == max(s["batch"] for s in found["strategies"])
    assert {"strategy", "checkpoints", "batch", "peak_bytes", "step_seconds", "overhead", "curve"} <= set(
        found["strategies"][0]
    )
    for word in ("plain", "sqrt", "best-k", "biggest batch:", f"batch {found['strategies'][-1]['curve'][-1][0]:,}"):
        assert word in out


def test_estimate_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    command = ["bert-tiny", "--seq", "16", "--batch", "2", "--checkpoints", "layer.0.out", "--estimate"]
    assert main([*command, "--json", str(report)]) == 0
    out = capsys.readouterr().out
    found = json.loads(report.read_text())
    e = found["estimate"]
    assert sum(e["by_role"].values()) == e["peak_bytes"] == found["recompute"]["peak_bytes"]
    assert e["by_batch"]["pieces"][0]["first"] == 1 and e["checkpoints"][0]["name"] == "layer.0.out"
    for word in ("alive at the peak", "by layer", "recomputed FLOPs", "memory by batch", "at operator"):
        assert word in out
    assert found["batch"] == 2 and found["inputs"]["input_ids"] == "i64[2,16]"


def test_an_estimate_does_not_keep_from_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MLP, "--batch", "4", "--estimate", "--run", "1", "--memory-budget", "1MB"]) == 0
    out = capsys.readouterr().out
    assert "alive at the peak" in out and "as predicted" in out


def test_shapes_of_a_network_of_the_zoo_are_refused() -> None:
    with pytest.raises(rc.UsageError, match="'lenet' is a network of the zoo, which has options"):
        rc.estimate("lenet", input_shapes={"x": [4, 1, 28, 28]})


def test_inputs_of_several_sizes_fix_the_batch() -> None:
    """Shapes that differ in their first dimension are taken as they are, not all at one batch."""
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [
                onnx.helper.make_node("MatMul", ["x", "w"], ["a"]),
                onnx.helper.make_node("MatMul", ["y", "w"], ["b"]),
                onnx.helper.make_node("Concat", ["a", "b"], ["logits"], axis=0),
            ],
            "two",
            [onnx.helper.make_tensor_value_info(n, 1, [d, 5]) for n, d in (("x", "N"), ("y", "M"))],
            [onnx.helper.make_tensor_value_info("logits", 1, None)],
            [onnx.numpy_helper.from_array(np.ones((5, 3), np.float32), "w")],
        )
    )
    shapes = {"x": [2, 5], "y": [4, 5]}
    found = rc.estimate(model, input_shapes=shapes)
    assert found.batch == 2 and found.by_batch is None
    with pytest.raises(rc.UsageError, match="fixes its batch at 2"):
        rc.estimate(model, input_shapes=shapes, batch=3)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize(("network", "batch"), [("lenet", 32), ("resnet18", 8), ("mobilenet_v2", 8), ("vit-tiny", 4)])
def test_the_process_is_within_five_percent(network: str, batch: int) -> None:
    """Estimated in one process, trained in another."""
    high = "int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) << 10"
    estimate = f"import recompute as rc; print(rc.estimate({network!r}, batch={batch}).process_bytes)"
    trains = f"""
import re
import numpy as np
import recompute as rc
from recompute.compiling.sources import Loading
from recompute.compiling.steps import Steps
step = Steps({network!r}, loading=Loading(weights=True)).compile({batch}).program
feed = {{v.name: np.zeros(v.shape, v.value.type.numpy) for v in step.inputs}}
executor = rc.Executor()
for _ in range(3):
    executor.run(step, feed)
print({high})
"""
    _, predicted, measured = (  # the first compiles kernels
        int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for code in (trains, estimate, trains)
    )
    assert 0.95 < predicted / measured < 1.05, (predicted, measured)


def test_the_process_of_other_places_is_unknown() -> None:
    assert rc.estimate("mlp", target=rc.Target(place="cuda:0", cost="h100")).process_bytes is None
