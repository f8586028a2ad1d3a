"""`--check` and budgets that are too small: what slices promise, data that is given, and budgets that work."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from recompute.cli import main

needs_solver = pytest.mark.skipif(
    importlib.util.find_spec("ortools") is None,
    reason="plans for a budget need the extra plan (ortools)",
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file: x [N, 3, 16, 16] → Conv → Relu → GlobalAveragePool → Gemm, whose activations are large."""
    g = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(g.standard_normal(s).astype(np.float32) / 4, n)
        for n, s in (("w", (16, 3, 3, 3)), ("fc", (4, 16)))
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Exp", ["c"], ["e"]),
        helper.make_node("GlobalAveragePool", ["e"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "fc"], ["y"], transB=1),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 16, 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])
    graph = helper.make_graph(nodes, "wide", [x], [y], weights)
    path = tmp_path_factory.mktemp("models") / "wide.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return str(path)


def report(tmp_path: Path, *words: str) -> dict[str, Any]:
    """What a successful command writes as JSON."""
    assert main([*words, "--json", str(tmp_path / "r.json"), "-q"]) == 0
    return json.loads((tmp_path / "r.json").read_text())


@needs_solver
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_slices_are_held_to_their_own_promise(optimizer: str, wide: str, tmp_path: Path) -> None:
    """Sums over slices are close, and not the same bits: Adam makes steps of full size of the difference."""
    found = report(tmp_path, wide, "--batch", "8", "--memory-budget", "60%", "--check", "--optimizer", optimizer)
    assert found["planned"]["slices"]
    slices = found["check"]["slices"]
    assert slices["passed"] and slices["tolerance"] == 1024 * 2**-24  # roundings of float32
    assert slices["relative_error"] <= slices["tolerance"] and slices["loss_error"] <= slices["tolerance"]


@needs_solver
def test_gradients_that_are_wrong_do_not_pass(
    wide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from recompute.analysis import check

    monkeypatch.setattr(check, "slices_tolerance", lambda program: -1.0)
    assert main([wide, "--batch", "8", "--memory-budget", "60%", "--check"]) == 1
    assert "--check found a difference" in capsys.readouterr().err


def test_a_check_feeds_the_data_that_is_given(wide: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feed = {"x": np.full((2, 3, 16, 16), 100, np.float32), "label": np.zeros(2, np.int64)}
    np.savez(tmp_path / "d.npz", **feed)
    words = [wide, "--batch", "2", "--checkpoints", "c", "--check", "--data", str(tmp_path / "d.npz")]
    main([*words, "--json", str(tmp_path / "r.json")])
    losses = json.loads((tmp_path / "r.json").read_text())["check"]["steps"]["losses"]
    assert losses[0] is None  # no finite number: exp(100 · w) overflows; synthetic data does not
    assert None not in report(tmp_path, *words[:6])["check"]["steps"]["losses"]


def test_bound_inputs_are_bound_for_onnx_runtime_too(tmp_path: Path) -> None:
    """y = rate · x · w: the exported file still has the input that --set binds."""
    pytest.importorskip("onnxruntime")
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Mul", ["z", "rate"], ["y"])]
    w = numpy_helper.from_array(np.eye(3, dtype=np.float32), "w")
    inputs = [value("x", 1, ["N", 3]), value("rate", 1, [1])]
    graph = helper.make_graph(nodes, "g", inputs, [value("y", 1, ["N", 3])], [w])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    found = report(tmp_path, str(path), "--batch", "2", "--set", "rate=3", "--check")
    assert found["check"]["forward"]["largest_relative_difference"] < 1e-6


def test_maps_of_scikit_learn_are_passed_over(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    ml, value = "ai.onnx.ml", helper.make_tensor_value_info
    options = {"coefficients": [1.0, -1.0, 0.5, 2.0], "intercepts": [0.0, 1.0], "classlabels_ints": [0, 1]}
    nodes = [
        helper.make_node("LinearClassifier", ["x"], ["label", "y"], domain=ml, **options),
        helper.make_node("ZipMap", ["y"], ["map"], domain=ml, classlabels_int64s=[0, 1]),
    ]
    entry = helper.make_sequence_type_proto(helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, [])))
    outputs = [value("label", 7, ["N"]), onnx.ValueInfoProto(name="map", type=entry)]
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["N", 2])], outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ml, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    found = report(tmp_path, str(tmp_path / "m.onnx"), "--batch", "4", "--check")
    assert found["check"]["forward"]["largest_relative_difference"] < 1e-6


@pytest.mark.parametrize(("axis", "code"), [(1, 0), (0, 1)])
def test_rows_are_compared_with_the_file(
    axis: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch of 3 of a file that fixes 1; a softmax over the batch, which loading has let pass, is found."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr("recompute.importer.rebatch._differs", lambda *_: "")
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Softmax", ["z"], ["y"], axis=axis)]
    w = numpy_helper.from_array(np.eye(3, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "g", [value("x", 1, [1, 3])], [value("y", 1, [1, 3])], [w])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    assert main([str(path), "--batch", "3", "--loss", "mse", "--check"]) == code
    said = re.search(r"of rows and the file, one batch at a time, (\S+)", capsys.readouterr().out)
    assert said is not None and (float(said[1]) > 0.1) == bool(code)


def test_probabilities_are_compared_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sigmoids about 1e-9 a difference of 1e-11 is none; of the scores themselves it is one."""
    pytest.importorskip("onnxruntime")
    from recompute.analysis import check

    relative, given = check._relative, []
    monkeypatch.setattr(check, "_relative", lambda a, b, least: given.append(least) or relative(a, b, least))
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Sigmoid", ["z"], ["y"])]
    w = numpy_helper.from_array(np.eye(3, dtype=np.float32), "w")
    outputs = [value(n, 1, ["N", 3]) for n in "yz"]
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["N", 3])], outputs, [w])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    report(tmp_path, str(path), "--batch", "2", "--check", "--loss", "bce:y")
    assert given == [1.0, 1e-30]
    assert relative(np.array([1e-9]), np.array([1.01e-9]), 1.0) < check.FORWARD_TOLERANCE


@needs_solver
@pytest.mark.parametrize("words", [[], ["--no-slicing"], ["--optimizer", "sgd"]])
@pytest.mark.parametrize("share", ["1%", "30%"])
def test_the_budget_that_an_error_names_works(
    share: str, words: list[str], wide: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [wide, "--batch", "4", *words]
    if main([*command, "--memory-budget", share]) == 0:
        pytest.fail("the budget is large enough")
    said = capsys.readouterr().err
    named = re.search(r"Give a budget of (\d+B) or more", said)
    assert named is not None and "Every plan holds parameters 1,984" in said
    found = report(tmp_path, *command, "--memory-budget", named[1])
    step = found["recompute"] or found["plain"]
    assert step["peak_bytes"] <= int(named[1][:-1])


@needs_solver
def test_less_than_parameters_and_state_is_refused_without_a_search(
    wide: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from recompute.passes.planners.fit.with_slices import Sliced

    monkeypatch.setattr(Sliced, "quickly", lambda self: pytest.fail("a search"))
    assert main([wide, "--batch", "4", "--memory-budget", "2%"]) == 2
    # 496 numbers, and Adam's two moments of each beside its step and rate
    assert "at least 5,9" in (said := capsys.readouterr().err) and "parameters 1,984 + optimizer state 3,9" in said


def test_what_lowers_weights_and_state_is_said_where_these_are_most(wide: str) -> None:
    import recompute as rc
    from recompute.passes.planners.fit.refusal import held_bytes, held_text

    program = rc.load(wide, batch=1)
    rc.Adam().minimize(rc.losses.mse(program))
    held = held_bytes(program.block)
    assert "80% of the plain step" in held_text(program.block, held * 5 // 4)
    assert "What lowers that: an optimizer with less state" in held_text(program.block, held * 5 // 4)
    assert "What lowers that" not in held_text(program.block, held * 5)


def test_a_mesh_that_divides_nothing_is_refused(wide: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([wide, "--batch", "4", "--mesh", "tp=3"]) == 2
    assert "nothing is divided along tp: its 3 ranks would hold and compute the same" in capsys.readouterr().err
