"""Checkpoints and resume: the same bits as a run that was never interrupted, whatever happens in between."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from trainer_cases import data, deep, trainer

import recompute as rc
from recompute.errors import JobError, UsageError
from recompute.trainer.saving import Checkpoints, load


class StopAfter(rc.Callback):
    """Ends a run after a step, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: rc.Trainer, step: int, loss: float) -> None:
        if step == self.step:
            trainer.stop("asked")


def logged(folder: Path) -> list[float]:
    """The losses of the log, in order."""
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, len(steps) + 1))
    return [e["loss"] for e in steps]


def whole(folder: Path) -> tuple[str, list[float]]:
    """A run of three epochs without interruption: the hash of its weights, and its losses."""
    history = trainer().fit(data(), epochs=3, eval_data=data(20, seed=1), save=folder)
    return history.weights_sha256, logged(folder)


@pytest.mark.parametrize("step", [1, 3, 4, 7, 12])
def test_stopped_and_resumed(step: int, tmp_path: Path) -> None:
    wanted = whole(tmp_path / "whole")
    first = trainer(callbacks=[StopAfter(step)]).fit(
        data(), epochs=3, eval_data=data(20, seed=1), save=tmp_path / "cut"
    )
    assert (first.steps, first.stopped) == (step, "asked")
    second = trainer().fit(data(), epochs=3, eval_data=data(20, seed=1), save=tmp_path / "cut", resume=True)
    assert second.resumed_at == step
    assert (second.weights_sha256, logged(tmp_path / "cut")) == wanted
    assert [e["epoch"] for e in second.epochs] == [1, 2, 3]


def test_another_plan_gives_the_same_bits(tmp_path: Path) -> None:
    wanted = whole(tmp_path / "whole")
    trainer(callbacks=[StopAfter(6)]).fit(data(), epochs=3, save=tmp_path / "cut")
    other = rc.RecomputeOptimizer(rc.Adam(1e-2)).set_checkpoints(["r"])
    history = trainer(optimizer=other).fit(data(), epochs=3, save=tmp_path / "cut", resume=True)
    assert (history.weights_sha256, logged(tmp_path / "cut")) == wanted


def test_a_budget_gives_the_same_bits(tmp_path: Path) -> None:
    """A run of a deep network, stopped and then resumed within 70 % of its memory; slices would round otherwise."""
    pytest.importorskip("ortools")

    def run(optimizer: object, folder: Path, *, resume: bool = False, stop: int = 99) -> rc.History:
        made = rc.Trainer(
            rc.load(deep(), batch=256), optimizer, loss="cross_entropy", callbacks=[StopAfter(stop)], quiet=True
        )
        return made.fit(data(1000), epochs=2, save=folder, resume=resume)

    wanted = run(rc.Adam(), tmp_path / "whole")
    plain = run(rc.Adam(), tmp_path / "cut", stop=5)
    within = run(
        rc.RecomputeOptimizer(rc.Adam()).set_budget("70%", effort=0.2, slicing=False), tmp_path / "cut", resume=True
    )
    assert within.resumed_at == plain.steps == 5
    assert within.peak_bytes["measured"] <= 0.7 * plain.peak_bytes["measured"]
    assert within.weights_sha256 == wanted.weights_sha256


def test_a_resume_at_the_end_of_an_epoch_logs_it_once(tmp_path: Path) -> None:
    """The checkpoint of the epoch's last step stands before its evaluation, which is done again."""
    trainer().fit(data(32), epochs=2, save=rc.Saving(tmp_path, steps=2))
    trainer().fit(data(32), epochs=3, save=rc.Saving(tmp_path, steps=2), resume=True)
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [e["epoch"] for e in events if e["event"] == "epoch"] == [1, 2, 3]


def test_a_torn_checkpoint_is_never_chosen(tmp_path: Path) -> None:
    saving = rc.Saving(tmp_path, keep=9)
    trainer().fit(data(), epochs=3, save=saving)
    wanted = whole(tmp_path / "whole")
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [f.name for f in folders] == ["step-000000004", "step-000000008", "step-000000012"]
    state = folders[2] / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-3])
    (folders[1] / "trainer.json").write_text("{")
    history = trainer().fit(data(), epochs=3, save=tmp_path, resume=True)
    assert history.resumed_at == 4
    assert "state.safetensors has" in history.notes[0]
    assert "trainer.json cannot be read" in history.notes[1]
    assert history.weights_sha256 == wanted[0]


def test_a_changed_byte_is_noticed_and_no_complete_one_is_an_error(tmp_path: Path) -> None:
    trainer().fit(data(), epochs=1, save=tmp_path)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    array = bytearray((folder / "state.safetensors").read_bytes())
    array[-1] ^= 1
    (folder / "state.safetensors").write_bytes(array)
    with pytest.raises(JobError, match=r"there is no complete checkpoint: .* has other contents than were written"):
        trainer().fit(data(), epochs=2, save=tmp_path, resume=True)


def test_the_last_ones_and_the_best_stay(tmp_path: Path) -> None:
    class Worse(rc.Callback):
        """Makes the first epoch the best."""

        def on_epoch(self, trainer: rc.Trainer, results: dict) -> None:
            for v in trainer.program.parameters:
                trainer.program.data[v.name][...] += 1

    saving = rc.Saving(tmp_path, keep=2)
    history = trainer(callbacks=[Worse()]).fit(data(), epochs=5, eval_data=data(20, seed=1), save=saving)
    assert history.best is not None
    best = rc.load(str(tmp_path / "best.onnx"), batch=20)
    again = trainer()
    load(again.program, Checkpoints(tmp_path).at(history.best["step"]))
    for name in ("fc1.weight", "fc2.weight"):
        np.testing.assert_array_equal(best.data[name], again.program.data[name])
    steps = {int(p.name[5:]) for p in (tmp_path / "checkpoints").iterdir()}
    assert steps == {history.best["step"], 16, 20}


def test_other_data_batches_or_seeds_are_refused(tmp_path: Path) -> None:
    trainer().fit(data(), epochs=1, save=tmp_path)
    with pytest.raises(UsageError, match="has the checkpoints of a run already"):
        trainer().fit(data(), epochs=2, save=tmp_path)
    for made, samples, what in (
        (trainer(seed=4), data(), "seed was 3, now it is 4"),
        (trainer(batch=8), data(), "batch size was 16, now it is 8"),
        (trainer(), data(49), "data was"),
        (trainer(), data(seed=5), "data was"),
        (trainer(optimizer=rc.SGD(0.1)), data(), "optimizer was Adam, now it is SGD"),
    ):
        with pytest.raises(UsageError, match=what):
            made.fit(samples, epochs=2, save=tmp_path, resume=True)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="checkpoints cannot be written to"):
        trainer().fit(data(), save=tmp_path / "file")


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recompute.trainer import saving

    kept = saving.save_state

    def full(program: object, path: Path, **options: bool) -> None:
        if "step-000000008" in str(path):
            raise OSError(28, "No space left on device")
        kept(program, path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(saving, "save_state", full)
    with pytest.raises(JobError, match=r"cannot write the checkpoint .*: No space left on device"):
        trainer().fit(data(), epochs=3, save=tmp_path)
    monkeypatch.undo()
    history = trainer().fit(data(), epochs=3, save=tmp_path, resume=True)
    assert history.resumed_at == 4
    assert history.weights_sha256 == whole(tmp_path / "whole")[0]


_RUN = """
import os, sys, tempfile
sys.path[:0] = {paths!r}
import recompute as rc
from trainer_cases import data, trainer

def run(folder):
    saving = rc.Saving(folder, steps=5)
    return trainer(batch=4).fit(data(48), epochs=6, eval_data=data(20, seed=1), save=saving, resume=True)

with tempfile.TemporaryDirectory() as folder:
    run(folder)
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            os.write(1, ("trained " + run(line.strip()).weights_sha256 + chr(10)).encode())
            os._exit(0)
        finally:
            os._exit(1)
    print("begun", child, flush=True)
    print("ended", os.waitpid(child, 0)[1], flush=True)
"""


class Processes:
    """Processes that train, resuming what is there: children of one in which a step has been compiled and has run."""

    def __init__(self) -> None:
        code = _RUN.format(paths=[str(Path(__file__).parent), str(Path(rc.__file__).parents[1])])
        self.parent = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._heard() == ["ready"]

    def _heard(self) -> list[str]:
        assert self.parent.stdout is not None
        return self.parent.stdout.readline().split()

    def run(self, folder: Path, seconds: float | None = None) -> str:
        """The hash of the weights that a process trains; "" where it was killed, after these seconds."""
        assert self.parent.stdin is not None
        self.parent.stdin.write(f"{folder}\n")
        told: dict[str, str] = {}
        while "begun" not in told:
            told.update([self._heard()])
        if seconds is not None:
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):  # it has come to its end
                os.kill(int(told["begun"]), signal.SIGKILL)
        while "ended" not in told:
            told.update([self._heard()])
        assert told["ended"] in ("0", str(int(signal.SIGKILL)))
        return told["trained"] if told["ended"] == "0" else ""

    def close(self) -> None:
        """They end."""
        self.parent.communicate(timeout=60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_killed_at_30_random_moments(tmp_path: Path) -> None:
    processes = Processes()
    begun = time.perf_counter()
    wanted = processes.run(tmp_path / "whole")
    took = time.perf_counter() - begun
    losses = logged(tmp_path / "whole")
    draw = random.Random(7)
    kills = runs = 0
    while kills < 30:
        folder = tmp_path / f"run-{runs}"
        runs += 1
        while not (found := processes.run(folder, draw.uniform(0.0, 0.8 * took) if kills < 30 else None)):
            kills += 1
        assert found == wanted
        assert logged(folder) == losses
    processes.close()


def test_ctrl_c_ends_after_the_step_and_saves(tmp_path: Path) -> None:
    """A signal during a step: the run ends after it, in order, and what follows a resume is the same."""

    class Interrupt(rc.Callback):
        def on_step(self, trainer: rc.Trainer, step: int, loss: float) -> None:
            if step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    history = trainer(callbacks=[Interrupt()]).fit(data(), epochs=3, save=tmp_path / "cut")
    assert (history.steps, history.stopped) == (5, "interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = trainer().fit(data(), epochs=3, save=tmp_path / "cut", resume=True)
    assert resumed.weights_sha256 == whole(tmp_path / "whole")[0]
    assert np.isfinite(resumed.epochs[-1]["train"]["loss"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("epoch", 0), ("epoch", 1.5), ("batch", -(10**12)), ("batch", 10**12), ("samples", None), ("total", "x"),
     ("epochs", [1]), ("best", {}), ("best", 5), ("callbacks", [5]), ("step", 4)],
)  # fmt: skip
def test_a_position_that_no_run_has_written_is_an_error(name: str, value: object, tmp_path: Path) -> None:
    trainer().fit(data(32), save=tmp_path)
    (file,) = tmp_path.glob("checkpoints/*/trainer.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(rc.errors.UsageError, match=f"'{name}' in its trainer.json"):
        trainer().fit(data(32), epochs=2, save=tmp_path, resume=True)


def test_a_position_nested_without_end_is_not_complete(tmp_path: Path) -> None:
    trainer().fit(data(32), save=tmp_path)
    (file,) = tmp_path.glob("checkpoints/*/trainer.json")
    file.write_text("[" * 100_000)
    with pytest.raises(JobError, match=r"trainer\.json cannot be read"):
        trainer().fit(data(32), epochs=2, save=tmp_path, resume=True)


def adapted(fill: float = 0.0) -> rc.Trainer:
    """Adapters on the products of a deep network, whose weights are frozen; `fill`: in place of the first of w3."""
    source = deep()
    tensor = next(t for t in source.graph.initializer if t.name == "w3")
    array = np.frombuffer(tensor.raw_data, "f4").copy()
    array[0] = fill or array[0]
    tensor.raw_data = array.tobytes()
    return rc.Trainer(
        rc.lora(rc.load(source, batch=8), "w*", r=1), rc.Adam(1e-2), loss="cross_entropy", seed=3, quiet=True
    )


def test_frozen_weights_are_not_in_checkpoints_and_must_be_those_of_the_run(tmp_path: Path) -> None:
    wanted = adapted().fit(data(), epochs=3, save=tmp_path / "whole")
    first = adapted()
    first.fit(data(), epochs=1, save=tmp_path / "cut")
    (state,) = (tmp_path / "cut").glob("checkpoints/*/state.safetensors")
    header = int.from_bytes(state.read_bytes()[:8], "little")
    names = json.loads(state.read_bytes()[8 : 8 + header])
    assert not [n for n in names if n in {f"w{i}" for i in range(8)}]
    assert len(json.loads(names["__metadata__"]["recompute.unchanged"])) == 8
    history = adapted().fit(data(), epochs=3, save=tmp_path / "cut", resume=True)
    assert history.weights_sha256 == wanted.weights_sha256
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")
    with pytest.raises(UsageError, match="'w3', a frozen weight, has other contents"):
        adapted(fill=2.0).fit(data(), epochs=4, save=tmp_path / "cut", resume=True)
