"""The folder of a run: one run at a time, no links followed, nothing left of killed runs, options told when resumed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from trainer_cases import data, trainer

import recompute as rc
from recompute.errors import JobError, UsageError
from recompute.trainer.folder import LOCK, occupied
from recompute.trainer.log import Log


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a run of two steps."""
    trainer().fit(data(32), save=tmp_path)
    return tmp_path


def resumed(folder: Path, epochs: int = 2, **options: Any) -> rc.History:
    return trainer(**options).fit(data(32), epochs=epochs, save=folder, resume=True)


def test_a_second_run_is_told_who_has_the_folder(tmp_path: Path) -> None:
    with occupied(tmp_path), pytest.raises(UsageError, match=f"another run writes .*process {os.getpid()} on "):
        trainer().fit(data(32), save=tmp_path)
    assert not (tmp_path / LOCK).exists()
    (tmp_path / LOCK).write_text("process 1 on a machine that was switched off")  # nobody holds it
    trainer().fit(data(32), save=tmp_path)


def test_the_system_ends_the_lock_of_a_killed_run(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with occupied(tmp_path):
            os.write(write, b".")
            signal.pause()  # until it is killed
    assert os.read(read, 1) == b"."
    with pytest.raises(UsageError, match=f"process {child} on "), occupied(tmp_path):
        pass
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    with occupied(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / LOCK).read_text()


def test_links_are_not_followed(saved: Path) -> None:
    victim = saved.parent / "victim"
    victim.write_text("precious")
    for name in (".log.jsonl.tmp", ".log.jsonl.00000000.tmp"):
        (saved / name).symlink_to(victim)
    lines = (saved / "log.jsonl").read_text().splitlines()
    (saved / "log.jsonl").rename(saved / "kept")
    (saved / "log.jsonl").symlink_to("kept")
    resumed(saved)
    assert victim.read_text() == "precious"
    assert not (saved / "log.jsonl").is_symlink()
    assert (saved / "kept").read_text().splitlines() == lines
    (saved / LOCK).symlink_to(victim)
    with pytest.raises(JobError, match="cannot write to the folder"):
        resumed(saved, 3)
    assert victim.read_text() == "precious"


def test_what_killed_runs_leave_is_removed(saved: Path) -> None:
    left = [
        ".log.jsonl.0123abcd.tmp", ".log.rank1.jsonl.0123abcd.tmp", ".model.onnx.0123abcd.tmp",
        ".model.onnx.0123abcd.data.0123abcd.tmp", ".best.onnx.0123abcd.tmp", f".{'0' * 32}.tmp.0123abcd.tmp",
    ]  # fmt: skip
    others = [".mine.0123abcd.tmp", "log.jsonl.tmp", ".model.onnx.tmp"]
    for name in (*left, *others):
        (saved / name).write_text("")
    part = saved / "checkpoints" / ".step-000000009.0123abcd.tmp"
    part.mkdir()
    (part / "state.safetensors").write_text("")
    resumed(saved)
    assert not [name for name in left if (saved / name).exists()]
    assert not part.exists()
    assert all((saved / name).exists() for name in others)


def test_a_log_that_no_run_has_written(tmp_path: Path) -> None:
    """Lines that cannot be read are left out, as those cut off by a kill are."""
    fine = json.dumps({"event": "step", "step": 1, "loss": 0.5})
    (tmp_path / "log.jsonl").write_text(f"{'[' * 200_000}\n{fine}\n{{\n\udcff\n[]\n", errors="surrogateescape")
    Log(tmp_path, 5).close()
    assert (tmp_path / "log.jsonl").read_text() == f"{fine}\n"
    (tmp_path / "log.jsonl").unlink()
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(JobError, match="is no file"):
        Log(tmp_path, 5)


def test_a_pipe_is_no_checkpoint(saved: Path) -> None:
    (folder,) = (saved / "checkpoints").iterdir()
    (folder / "trainer.json").unlink()
    os.mkfifo(folder / "trainer.json")
    with pytest.raises(JobError, match=r"trainer.json: it is a pipe"):
        resumed(saved)


@pytest.mark.parametrize(
    ("name", "value"),
    [("epochs", [{}]), ("epochs", [{"train": {"loss": "x"}}]), ("callbacks", [{"waited": "x"}]),
     ("callbacks", [{"waited": None}]), ("state", []), ("state", {"bytes": {}})],
)  # fmt: skip
def test_a_position_that_no_run_has_written(name: str, value: object, saved: Path) -> None:
    (file,) = saved.glob("checkpoints/*/trainer.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(rc.RecomputeError, match=f"'{name}' in its trainer.json|json cannot be read|has .* bytes"):
        resumed(saved, callbacks=[rc.EarlyStopping("train.loss", 3)])


@pytest.mark.parametrize(("name", "change"), [("total", 0.5), ("samples", 1), ("micro_batches", {})])
def test_a_position_with_another_number(name: str, change: object, tmp_path: Path) -> None:
    trainer().fit(data(32), save=rc.Saving(tmp_path, steps=1, keep=9))
    file, last = sorted(tmp_path.glob("checkpoints/*/trainer.json"))
    last.unlink()
    position = json.loads(file.read_text())
    value = position[name] + change if isinstance(change, (int, float)) else change
    file.write_text(json.dumps({**position, name: value}))
    with pytest.raises(UsageError, match=r"'sha256' in its trainer\.json|with a mesh and \{\} micro-batches"):
        resumed(tmp_path)
    del position["sha256"]  # as an earlier version has written it
    file.write_text(json.dumps(position))
    assert resumed(tmp_path).steps == 4


def schedule(steps: int) -> Any:
    return rc.lr.CosineAnnealingDecay(1e-2, steps)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": rc.Adam(2e-2)}, "option Adam.learning_rate was 0.01, now it is 0.02"),
        ({"optimizer": rc.Adam(1e-2, beta1=0.8)}, "option Adam.beta1 was 0.9, now it is 0.8"),
        ({"optimizer": rc.Adam(schedule(4))}, r"option Adam.learning_rate was 0.01, now it is CosineAnnealingDecay\("),
    ],
)
def test_other_options_are_refused(options: dict[str, Any], said: str, saved: Path) -> None:
    with pytest.raises(UsageError, match=f"cannot go on: its {said}"):
        resumed(saved, **options)


def test_a_schedule_over_more_epochs_is_told(tmp_path: Path) -> None:
    trainer(optimizer=rc.Adam(schedule(2))).fit(data(32), save=tmp_path)
    history = resumed(tmp_path, 2, optimizer=rc.Adam(schedule(4)))
    assert "schedule is another one" in history.notes[0]
    assert "T_max=2" in history.notes[0] and "T_max=4" in history.notes[0]
    with pytest.raises(UsageError, match=r"option Adam.learning_rate was Cosine.*T_max=4.*T_max=8"):
        resumed(tmp_path, 2, optimizer=rc.Adam(schedule(8)))


def test_drop_last_and_recomputation(saved: Path) -> None:
    """What is recomputed changes no bit, and may differ."""
    with pytest.raises(UsageError, match="option drop_last was False, now it is True"):
        trainer().fit(data(32), epochs=2, save=saved, resume=True, drop_last=True)
    resumed(saved, optimizer=rc.RecomputeOptimizer(rc.Adam(1e-2)).set_checkpoints(["r"]))
    (file, _) = sorted(saved.glob("checkpoints/*/trainer.json"))
    position = json.loads(file.read_text())
    assert position["options"]["Adam.learning_rate"] == "0.01"
