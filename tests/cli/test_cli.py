"""The command line: what it prints and writes, and one clear error with the right exit code for each wrong input."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from recompute import models, parse, show
from recompute.cli import main

MLP = str(Path(models.__file__).parent / "mlp.onnx")


def small_model(op: str = "Relu", **options: object) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, options.get("shape", [2, 3]))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    w = helper.make_tensor("w", TensorProto.FLOAT, [3, 3], np.eye(3, dtype="f4").tobytes(), raw=True)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
        helper.make_node(op, ["h"], ["y"], name="second", domain=str(options.get("domain", ""))),
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("custom", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], [w]), opset_imports=opsets)


def test_the_documented_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MLP, "--checkpoints", "fc_1,pred"]) == 0
    out = capsys.readouterr().out
    for word in ("recomputed operators", "peak memory", "kept for the backward pass", "estimated step time"):
        assert word in out
    assert "checkpoints: fc_1, pred" in out


def test_the_report_for_machines(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = ["mlp4", "--batch", "64", "--checkpoints", "relu_*", "--run", "3", "--check", "-q"]
    assert main([*command, "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["run"]["measured_peak_bytes"] == found["recompute"]["peak_bytes"]
    assert found["recompute"]["peak_bytes"] <= found["plain"]["peak_bytes"]
    assert found["checkpoints"] == ["relu_1", "relu_2", "relu_3"]
    assert len(found["run"]["losses"]) == len(found["run"]["step_seconds"]) == 3
    assert found["check"]["steps"]["same_bits"]
    assert isinstance(found["recompute"]["recomputed_operators"], int) and found["recompute"]["kept_bytes"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_json_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MLP, "--checkpoints", "fc_1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == ["fc_1"]


def test_checkpoints_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("# the first layer\nfc_1\n\npred\n")
    assert main([MLP, "--checkpoints", f"@{kept}"]) == 0
    assert "checkpoints: fc_1, pred" in capsys.readouterr().out


def test_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resnet18", "--option", "image=32", "--batch", "2", "--list-checkpoints"]) == 0
    out = capsys.readouterr().out
    assert "layer1.0.out" in out and "layer4.1.out" in out and "layer1.0.conv1" not in out


@pytest.mark.parametrize(("option", "field"), [("--list-checkpoints", "candidates"), ("--list-parameters", "tensors")])
def test_json_of_lists(option: str, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MLP, option, "--json", "-", "-q"]) == 0
    out, err = capsys.readouterr()
    names = [entry["name"] for entry in json.loads(out)[field]]
    assert names[0].startswith("fc_1") and all(n in err for n in names)


def test_lists_go_with_nothing_that_they_would_not_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--list-models", "--list-parameters", "--list-checkpoints", "--print-passes"):
        for other in (["--check"], ["-o", str(tmp_path / "s.onnx")], ["--report", str(tmp_path / "r.html")]):
            assert main([MLP, option, *other]) == 2
            assert f"{option} prints a list and stops: leave out --" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["-o", "m.onnx"], ["--json", "d.npz"], ["--save-trained", "link.onnx"], ["--report", "m.onnx"]]
)
def test_what_is_read_is_not_written(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.onnx").write_bytes(Path(MLP).read_bytes())
    Path("link.onnx").symlink_to("m.onnx")
    np.savez("d.npz", x=np.zeros((2, 32), np.float32), label=np.zeros(2, np.int64))
    assert main(["m.onnx", "--data", "d.npz", "--run", "1", *options]) == 2
    assert "would overwrite" in capsys.readouterr().err
    assert Path("m.onnx").read_bytes() == Path(MLP).read_bytes()


@pytest.mark.parametrize("doing", ["--compare", "--pareto", "--look", "--save-problem=p.json"])
def test_what_draws_no_step_goes_with_no_picture(doing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for picture in ("--report=r.html", "--plot=p.svg", "--trace=t.json", "--snapshot=s.pickle"):
        assert main([MLP, doing, picture]) == 2
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("option", ["--checkpoints=fc_1", "--strategy=auto", "--offload", "--slice=all:0:2"])
def test_what_compiles_nothing_takes_no_plan(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MLP, "--look", option]) == 2
    assert "compiles nothing" in capsys.readouterr().err


def test_a_segmentation_network(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--option", "width=2", "--option", "image=16,32"]
    assert main(["unet", *options, "--batch", "1", "--checkpoints", "down?.out", "--run", "1"]) == 0
    out = capsys.readouterr().out
    assert "cross_entropy, as 'logits' has 2 scores for every pixel" in out and "down4.out" in out
    assert main(["unet", "--option", "width=2", "--option", "image=16", "--list-checkpoints"]) == 0


def test_dump_ir(tmp_path: Path) -> None:
    assert main([MLP, "--checkpoints", "fc_1", "--dump-ir", str(tmp_path / "ir"), "-q"]) == 0
    names = sorted(p.name for p in (tmp_path / "ir").iterdir())
    first = ["forward", "find-norms", "find-gates", "find-attention", "keep-forward", "find-head", "autodiff"]
    assert names[:7] == [f"{i:02d}-{name}.rir" for i, name in enumerate(first)]
    assert names[-3:] == [f"{len(names) - 3:02d}-liveness.rir", f"{len(names) - 2:02d}-memory-plan.rir",
                          f"{len(names) - 1:02d}-in-best-order.rir"]  # fmt: skip
    assert show(parse((tmp_path / "ir" / names[-1]).read_text())) == (tmp_path / "ir" / names[-2]).read_text()


def test_data_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.npz"
    g = np.random.default_rng(0)
    np.savez(data, x=g.standard_normal((8, 32)).astype("f4"), label=g.integers(0, 2, 8))
    assert main([MLP, "--batch", "4", "--run", "4", "--data", str(data)]) == 0
    assert "as predicted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        ([], 2, "give a model"),
        (["nothing.onnx"], 2, "neither a file nor a network"),
        (["resnet51"], 2, "did you mean resnet50"),
        ([MLP, "--checkpoints", "nope"], 2, "no value is called 'nope'"),
        ([MLP, "--checkpoints", "fc_2"], 2, "did you mean fc_1"),
        ([MLP, "--checkpoints", "@/no/such/file"], 2, "cannot read"),
        ([MLP, "--checkpoints", ","], 2, "--checkpoints is empty"),
        ([MLP, "--batch", "0"], 2, "--batch must be at least 1"),
        ([MLP, "--run", "0"], 2, "--run needs at least 1 step"),
        ([MLP, "--loss", "nope"], 2, "unknown loss 'nope'"),
        ([MLP, "--optimizer", "adamm"], 2, "did you mean adam"),
        ([MLP, "--input-shapes", "x:32"], 2, "--input-shapes"),
        ([MLP, "--input-shapes", "y:[2,32]"], 2, "no input is called 'y'"),
        ([MLP, "--input-shapes", "x:[2,33]"], 2, "does not fit"),
        ([MLP, "--trainable", "nope"], 2, "no float initializer is called 'nope'"),
        ([MLP, "--data", "x.npz"], 2, "--data needs --run"),
        ([MLP, "--data", "/no/such.npz", "--run", "1"], 1, "cannot read the data file"),
        ([MLP, "--json", "/no/such/folder/report.json"], 2, "does not exist"),
        (["mlp", "--option", "nope=1"], 2, "no option 'nope'"),
        ([MLP, "--batch", "9" * 20], 2, "bytes"),
        ([MLP, "-o", "."], 2, "it is a folder"),
        ([MLP, "-o", "-"], 2, "--output cannot write to standard output"),
        ([MLP, "--report", "-"], 2, "--report cannot write to standard output"),
        ([MLP, "--batch", "1" + "0" * 11, "--run", "1"], 1, "this machine has"),
        ([MLP, "--batch", "1" + "0" * 11, "--check"], 1, "this machine has"),
        ([MLP, "--json", "/tmp"], 2, "it is a folder"),
        ([MLP, "--dump-ir", MLP], 2, "is not a folder"),
        ([MLP, "--dump-ir", MLP + "/x"], 2, "is not a folder"),
    ],
)
def test_wrong_requests(arguments: list[str], code: int, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert why in error and "Traceback" not in error
    assert len([line for line in error.splitlines() if "error:" in line]) == 1


def wrong_files(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Broken models by name: the file, and what the error must say."""
    found: dict[str, tuple[Path, str]] = {}

    def add(name: str, content: bytes, why: str) -> None:
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(content)
        found[name] = (path, why)

    whole = Path(MLP).read_bytes()
    add("truncated", whole[: len(whole) // 2], "truncated")
    add("empty", b"", "holds no graph")
    add("text", b"this is no model at all", "no ONNX model")
    add("unknown", small_model("NoSuchOp", domain="custom").SerializeToString(), "node 'second' (custom.NoSuchOp)")
    add("open", small_model(shape=[2, None]).SerializeToString(), "--dim x.1=16")
    outside = small_model()
    t = outside.graph.initializer[0]
    t.ClearField("raw_data")
    t.data_location = TensorProto.EXTERNAL
    t.external_data.add(key="location", value="../../etc/passwd")
    add("outside", outside.SerializeToString(), "points outside the model's folder: '../../etc/passwd'")
    huge = small_model()
    huge.graph.initializer[0].dims[:] = [1 << 40, 1 << 20]
    add("huge", huge.SerializeToString(), "the limit is")
    short = small_model()
    short.graph.initializer[0].dims[:] = [4, 4]
    add("short", short.SerializeToString(), "needs 64 bytes, the file has 36")
    cycle = small_model()
    cycle.graph.node[0].input[0] = "y"
    add("cycle", cycle.SerializeToString(), "which nothing before it writes")
    return found


@pytest.mark.parametrize("name", ["truncated", "empty", "text", "unknown", "open", "outside", "huge", "short", "cycle"])
def test_wrong_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, why = wrong_files(tmp_path)[name]
    out = tmp_path / "out"
    out.mkdir()
    code = main([str(path), "-o", str(out / "step.onnx"), "--json", str(out / "report.json")])
    error = capsys.readouterr().err
    assert code == (2 if name == "open" else 1), error
    assert why in error and "Traceback" not in error
    assert not list(out.iterdir()), "a failed job leaves no file behind"


def test_verbose_shows_where_and_keeps_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MLP, "--checkpoints", "nope", "-v"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and error.rstrip().endswith("(did you mean pred?)")


def test_a_run_that_fails_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "data.npz", tmp_path / "out"
    out.mkdir()
    np.savez(data, x=np.zeros((4, 32), np.float32), label=np.full(4, 1000))
    arguments = [MLP, "--batch", "4", "--run", "1", "--data", str(data)]
    assert main([*arguments, "-o", str(out / "step.onnx"), "--json", str(out / "report.json")]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert not list(out.iterdir())


def test_losses_that_are_no_numbers_make_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MLP, "--run", "3", "--lr", "1e38", "--optimizer", "sgd", "--json", "-", "-q"]) == 0
    text = capsys.readouterr().out
    assert "NaN" not in text and json.loads(text)["run"]["losses"][-1] is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_pipes_and_devices_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    assert main([MLP, "-q", "--json", str(pipe)]) == 0
    reader.join(10)
    assert json.loads(found[0])["plain"] and pipe.is_fifo()


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MLP, "--checkpoints", "x,pred", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
