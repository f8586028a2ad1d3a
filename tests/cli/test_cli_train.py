"""`recompute-train`: what it prints and writes, and one clear error for each wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import text_cases
import trainer_cases

from recompute.cli.train import main


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with model.onnx, train.npz and test.npz."""
    onnx.save(trainer_cases.model(), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **trainer_cases.data(50))
    np.savez(tmp_path / "test.npz", **trainer_cases.data(21, seed=1))
    return tmp_path


def command(files: Path, *more: str) -> list[str]:
    return [
        str(files / "model.onnx"), "--data", str(files / "train.npz"), "--eval", str(files / "test.npz"), "--batch",
        "16", "--lr", "0.01", *more,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "name"),
    [(["--json", "train.npz"], "train.npz"), (["--json", "model.onnx"], "model.onnx"), (["--save", "."], "model.onnx")],
)  # fmt: skip
def test_what_is_read_is_not_written(
    options: list[str], name: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    before = {p: p.read_bytes() for p in files.iterdir()}
    assert main(command(files, *options)) == 2
    assert f"{options[0]} would overwrite '{name}', which is the" in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in files.iterdir()}


def test_the_whole_way(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, report = files / "run", files / "r.json"
    assert main(command(files, "--epochs", "6", "--save", str(run), "--json", str(report), "--schedule", "cosine",
                        "--warmup", "4", "--clip-norm", "5")) == 0  # fmt: skip
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("peak memory: ")
    assert out[2].startswith("epoch 1/6: train loss ")
    assert "(as predicted)" in out[-2]
    found = json.loads(report.read_text())
    assert [e["epoch"] for e in found["epochs"]] == [1, 2, 3, 4, 5, 6]
    assert found["epochs"][-1]["eval"]["accuracy"] > 0.7
    assert found["epochs"][-1]["eval"]["loss"] < found["epochs"][0]["eval"]["loss"]
    assert found["steps"] == 24
    assert found["peak_bytes"]["predicted"] == found["peak_bytes"]["measured"]
    assert len(found["weights_sha256"]) == 64

    ort = pytest.importorskip("onnxruntime")
    held = trainer_cases.data(21, seed=1)
    (scores,) = ort.InferenceSession(str(run / "model.onnx")).run(["logits"], {"x": held["x"]})
    assert (scores.argmax(1) == held["label"]).mean() == found["epochs"][-1]["eval"]["accuracy"]


def test_resume_with_other_checkpoints_gives_the_same_weights(files: Path) -> None:
    hashes = []
    for name, parts in (("whole", [[]]), ("cut", [[], ["--resume", "--checkpoints", "r"]])):
        for number, more in enumerate(parts):
            epochs = "3" if number == len(parts) - 1 else "1"
            report = files / f"{name}.json"
            assert main(command(files, "--epochs", epochs, "--save", str(files / name), "--json", str(report), "-q",
                                *more)) == 0  # fmt: skip
        found = json.loads(report.read_text())
        hashes.append(found["weights_sha256"])
    assert found["resumed_at"] == 4
    assert hashes[0] == hashes[1]


HALVES = """
from dataclasses import dataclass
from recompute import Role
from recompute.passes import Pass

@dataclass(frozen=True)
class HalveTheGradients(Pass):
    needs = ("gradients",)
    refuses = ("updates",)

    def rewrite(self, program):
        b = program.builder(Role.BACKWARD, "half")
        pairs = [(p, program[g].value) for p, g in program.gradients]
        program.gradients = [(p, b.Mul(g, b.constant(0.5, g)).name) for p, g in pairs]
        program.append(b)
        return program.block
"""


def test_a_pass_of_ones_own_is_in_every_step(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of each gradient at twice the rate gives the same weights."""
    (files / "halves.py").write_text(HALVES)
    inserted = ["--load-passes", str(files / "halves.py"), "--insert-pass", "after:autodiff=halve-the-gradients"]
    hashes = []
    for more in (["--lr", "0.125"], ["--lr", "0.25", *inserted]):
        report = files / "r.json"
        common = ["--optimizer", "sgd", "--epochs", "2", "-q", "--json", str(report)]
        assert main([*command(files), *common, *more]) == 0
        hashes.append(json.loads(report.read_text())["weights_sha256"])
    assert hashes[0] == hashes[1]
    run = [*command(files), "--save", str(files / "run"), "-q"]
    assert main([*run, *inserted]) == 0
    assert main([*run, "--resume", "--epochs", "2"]) == 2
    assert "its option inserted was [Insertion(" in capsys.readouterr().err
    assert main([*run, "--resume", "--epochs", "2", *inserted]) == 0
    assert main([*command(files), "--insert-pass", "after:choose-kernels=dead-code"]) == 2
    assert "no pass 'choose-kernels'" in capsys.readouterr().err


def test_gradient_merge_and_averages(files: Path) -> None:
    report = files / "r.json"
    more = ["--gradient-merge", "2", "--ema", "0.9", "--checkpoints", "r", "--epochs", "2", "-q", "--json", str(report)]
    assert main(command(files, *more)) == 0
    found = json.loads(report.read_text())
    assert found["steps"] == 4
    assert found["peak_bytes"]["predicted"] == found["peak_bytes"]["measured"]


def test_ctrl_c_saves_and_ends_with_130(files: Path) -> None:
    code = "import sys; from recompute.cli.train import main; sys.exit(main(sys.argv[1:]))"
    args = command(files, "--epochs", "100000", "--save", str(files / "run"))
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("epoch 2/"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "(interrupted)" in out
    assert list((files / "run" / "checkpoints").glob("step-*"))
    assert not (files / "run" / "model.onnx").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--resume"], "--resume needs --save DIR"),
        (["--save-steps", "5"], "--save-steps needs --save DIR"),
        (["--memory-budget", "60"], "did you mean 60%, or 60GiB"),
        (["--checkpoints", "r", "--memory-budget", "60%"], "both define what is recomputed"),
        (["--metrics", "acuracy"], "there is no metric 'acuracy' (did you mean accuracy"),
        (["--monitor", "eval.f1"], "no result 'eval.f1' to monitor"),
        (["--optimizer", "adamm"], "unknown optimizer 'adamm' (did you mean adam"),
        (["--batch", "64"], "50 samples, fewer than a batch of 64"),
        (["--dat", "x"], "unknown option '--dat' (did you mean --data"),
        (["--json", "/no/such/folder/r.json"], "cannot be written"),
    ],
)
def test_wrong_requests(files: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = [*more, "--drop-last"] if "--batch" in more else more
    assert main(command(files, *more)) == 2
    error = capsys.readouterr().err
    assert error.startswith("recompute-train: error: ")
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda d: d.pop("label"), 2, "has no column 'label'"),
        (lambda d: d.update(x=d["x"].astype("S8")), 2, "column 'x'"),
        (lambda d: d["x"].__setitem__((3, 0), np.inf), 2, "sample 3"),
        (lambda d: d["label"].__setitem__(5, -1), 2, "has -1 in sample 5"),
        (lambda d: d.update({n: a[:0] for n, a in d.items()}), 2, "have 0 rows"),
        (lambda d: d.update(x=d["x"][:, :5]), 2, "column 'x'"),
        (lambda d: d.update(label=d["label"][:30]), 2, "30"),
    ],
)
def test_bad_data(files: Path, change: object, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    samples = trainer_cases.data(50)
    change(samples)  # type: ignore[operator]
    np.savez(files / "train.npz", **samples)
    assert main(command(files, "--save", str(files / "run"))) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (files / "run" / "checkpoints").exists()


def test_a_fixed_batch_is_opened(files: Path) -> None:
    """The file fixes 10 samples, --batch says 16."""
    model = trainer_cases.model()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 10
    onnx.save(model, files / "model.onnx")
    assert main(command(files)) == 0


def test_a_loss_that_is_not_finite_is_told(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command(files), "--lr", "1e30", "--epochs", "3", "--optimizer", "sgd"]) == 0
    assert "the loss is not finite: stop_on_nan (--stop-on-nan)" in capsys.readouterr().err


def test_files_that_cannot_be_read(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (files / "train.npz").read_bytes()
    for content in (b"", whole[:-100], b"no archive"):
        (files / "train.npz").write_bytes(content)
        assert main(command(files)) == 1
        assert "train.npz" in capsys.readouterr().err
    assert main([str(files / "model.onnx"), "--data", str(files / "none.npz")]) in (1, 2)
    assert "none.npz" in capsys.readouterr().err


def _texts(folder: Path) -> list[str]:
    found = text_cases.texts(20)
    rows = [{n: column[i] for n, column in found.items()} for i in range(20)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    onnx.save(text_cases.text_model("bert"), folder / "bert.onnx")
    return [str(folder / "bert.onnx"), "--data", str(folder / "texts.jsonl"), "--batch", "4"]


def test_buckets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = ["--pad", "input_ids=3:left", "--pad", "label=-100:left", "--pad", "attention_mask=mask:input_ids:left"]
    made = [*_texts(tmp_path), "--buckets", "sequence=4,8,16", "--schedule", "linear", *left]
    assert main([*made, "--json", str(tmp_path / "r.json")]) == 0
    assert "(as predicted)" in capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())
    lengths = [len(row) for row in text_cases.texts(20)["input_ids"]]
    counts = [sum(low < n <= high for n in lengths) for low, high in ((0, 4), (4, 8), (8, 16))]
    assert found["steps"] == sum(-(-count // 4) for count in counts) > 5


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--buckets", "sequence"], "--buckets: cannot read 'sequence'"),
        (["--buckets", "sequence=8,x"], "--buckets: cannot read 'sequence=8,x'"),
        (["--buckets", "seq=8"], "no open dimension is called 'seq' (did you mean sequence?)"),
        (["--buckets", "sequence=4,8"], "more than the largest bucket, 8"),
        (["--buckets", "sequence=16", "--pad", "label"], "--pad: cannot read 'label'"),
        (["--dim", "sequence=16", "--pad", "label=0"], "there are none: give buckets"),
    ],
)
def test_buckets_that_cannot_be(more: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_texts(tmp_path), *more]) == 2
    assert text in capsys.readouterr().err
