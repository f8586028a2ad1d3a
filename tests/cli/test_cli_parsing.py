"""The command line's manners: help on one screen, errors of one line with a remedy, early checks, groups, NaN."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from test_cli import MLP

from recompute.cli import main
from recompute.cli.arguments import parser
from recompute.cli.parsing import SHORT


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("-h", "--help"):
        with pytest.raises(SystemExit) as ended:
            main([option])
        assert not ended.value.code
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= 80


def test_help_names_options_that_exist_and_its_example_is_right() -> None:
    known = set(parser()._option_string_actions)
    assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", SHORT)) <= known
    example = SHORT.partition("example: recompute-compile ")[2].split()
    args = parser().parse_args(example)
    assert args.model == "resnet50" and args.memory_budget == "60%" and args.run == 2


def test_help_all_has_every_option_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help-all"])
    out = capsys.readouterr().out
    assert not ended.value.code and out.startswith("usage: recompute-compile MODEL [options]\n")
    for option in parser()._option_string_actions:
        assert option in out
    groups = ["what to compile", "what to write", "what to find out", "how to fit", "pictures", "what to run", "help"]
    assert all(f"\n{title}" in out for title in groups)
    assert max(map(len, out.partition("examples:")[0].splitlines())) <= 100


_PLACES = "place must be cpu, cpu:FOLDER, cuda, cuda:N or emulated"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "fc_1"], "unknown option '--checkpoint' (did you mean --checkpoints?)"),
        (["--checkpoint=fc_1"], "unknown option '--checkpoint' (did you mean --checkpoints?)"),
        (["--bacth", "3"], "unknown option '--bacth' (did you mean --batch?)"),
        (["-batch", "3"], "unknown option '-batch' (did you mean --batch?)"),
        (["--xyzzy"], "unknown option '--xyzzy' (--help-all prints all options)"),
        (["lenet"], "unexpected argument 'lenet': one model is compiled at a time, and each option takes one value "
         "(several names are separated by commas)"),
        (["--batch", "3.5"], "--batch: expected a whole number, not '3.5'"),
        (["--lr", "small"], "--lr: expected a number, not 'small'"),
        (["--lr", "inf"], "--lr: expected a number, not 'inf'"),
        (["--batch"], "--batch needs a value: --batch N"),
        (["-o"], "--output needs a value: --output OUT.onnx"),
        (["--check=yes"], "--check takes no value"),
        (["-q", "-v"], "--verbose and --quiet exclude each other: give one of them"),
        (["--precision", "bf32"], "--precision: unknown value 'bf32' (did you mean tf32, fp32, bf16?); known: fp32, "
         "tf32, bf16, bf16-pure, fp16"),
        (["--memory-budget", "60"], "--memory-budget 60 is 60 bytes: did you mean 60%, or 60GiB? (% is a share of the "
         "plain step's peak)"),
        (["--memory-budget", "5000"], "--memory-budget 5000 is 5000 bytes: did you mean 5000MB? (% is a share of the "
         "plain step's peak)"),
        (["--place", "gpu"], f"{_PLACES}, not 'gpu' (did you mean cuda?)"),
        (["--place", "GPU:1"], f"{_PLACES}, not 'GPU:1' (did you mean cuda:1?)"),
        (["--place", "cpus"], f"{_PLACES}, not 'cpus' (did you mean cpu?)"),
        (["--stop-on-nan"], "--stop-on-nan needs --run N"),
        (["--group", "head"], "--group: cannot read 'head' (expected e.g. 'head.*:lr=1e-3,weight_decay=0')"),
        (["--group", "head:lr"], "--group: cannot read 'head:lr' (expected e.g. 'head.*:lr=1e-3,weight_decay=0')"),
        (["--group", ":lr=1"], "--group: cannot read ':lr=1' (expected e.g. 'head.*:lr=1e-3,weight_decay=0')"),
        (["--group", "a:lr=x"], "--group: 'a:lr=x': expected a number, true or false, not 'x'"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_with_a_remedy(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([MLP, *arguments]) == 2
    assert said(capsys) == f"recompute-compile: error: {message}\n"


def test_small_budgets_with_a_unit_are_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MLP, "--memory-budget", "60B"]) == 2
    assert "no schedule fits into 60 bytes" in said(capsys)


def test_quiet_prints_the_last_loss_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MLP, "--run", "2", "-q", "--json", str(tmp_path / "r.json")]) == 0
    out, err = capsys.readouterr()
    last = json.loads((tmp_path / "r.json").read_text())["run"]["losses"][-1]
    assert err == "" and out == f"loss {last:.6g}\n"
    assert main([MLP, "--run", "1", "-q", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["steps"] == 1


X, LABEL = np.zeros((4, 32), np.float32), np.zeros(4, np.int64)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": X, "label": LABEL},
         r"has no array 'x' for the model's input x: f32\[4,32\] \(did you mean X\?\); it has: X, label"),
        ({"x": X}, r"has no array 'label' for the model's input label: i64\[4\]; it has: x"),
        ({"x": X.astype("f8"), "label": LABEL},
         r"'x' is float64\[4, 32\], but must be f32\[4,32\] .*: store x.astype\('float32'\)"),
        ({"x": X[:, :5], "label": LABEL}, r"'x' is float32\[4, 5\], .*: axis 1 has 5, not 32"),
        ({"x": X[:3], "label": LABEL}, r"'x' is .*: it has 3 samples, fewer than a batch of 4 \(--batch sets"),
        ({"x": X, "label": LABEL[:, None]}, r"'label' is int64\[4, 1\], .*: it has 2 dimensions, not 1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", [[], ["--estimate"], ["--memory-budget", "90%"]])
def test_data_is_checked_before_anything_is_compiled(
    arrays: dict, message: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def compiled(*_: object, **__: object) -> None:
        raise AssertionError("compiled before the data was checked")

    monkeypatch.setattr("recompute.compiling.compiler.compile_step", compiled)
    monkeypatch.setattr("recompute.compiling.steps.compile_step", compiled)
    np.savez(tmp_path / "d.npz", **arrays)
    assert main([MLP, "--batch", "4", "--run", "1", "--data", str(tmp_path / "d.npz"), *more]) == 2
    assert re.search(message, said(capsys))


def test_a_data_file_that_is_none_is_refused_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.npz").write_bytes(b"text")
    assert main(["no-such-model", "--run", "1", "--data", str(tmp_path / "d.npz")]) == 1
    assert "cannot read the data file" in said(capsys)


def test_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = ["--group", "fc_1.*:lr=0.5,weight_decay=0", "--group", "pred.weight,pred.bias:beta1=0.5"]
    assert main([MLP, "-q", "--optimizer", "adamw", *groups, "--dump-ir", str(tmp_path)]) == 0
    lines = next(tmp_path.glob("*-step.rir")).read_text().splitlines()
    updates = {line.split("%")[1].split(":")[0]: line for line in lines if "AdamUpdate(" in line}
    assert all(
        "%learning_rate_0" in updates[n] and "weight_decay" not in updates[n] for n in ("fc_1.weight", "fc_1.bias")
    )
    assert all("beta1=0.5" in updates[n] and "%learning_rate," in updates[n] for n in ("pred.weight", "pred.bias"))
    for group, message in (
        ("fc_9.*:lr=1", "'fc_9.*' matches no parameter"),
        ("*:leraning_rate=1", "did you mean learn"),
    ):
        assert main([MLP, "-q", "--group", group]) == 2
        assert message in said(capsys)


def test_stop_on_nan(capsys: pytest.CaptureFixture[str]) -> None:
    command = [MLP, "--run", "3", "--lr", "1e38", "--optimizer", "sgd", "-q"]
    assert main([*command, "--stop-on-nan"]) == 1
    message = said(capsys)
    assert message.startswith(
        "recompute-compile: error: step 2 of 3: the loss is nan: nothing was updated in this step"
    )
    assert "the first nan comes from\n" in message and "Gemm(" in message
    assert main(command) == 0
    assert capsys.readouterr().out == "loss nan\n"
