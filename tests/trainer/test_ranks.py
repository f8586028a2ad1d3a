"""Several processes: the same bits, files and decisions for any number of ranks; one clear error for what cannot be."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import trainer_cases
from distributed_cases import environment
from trainer_cases import data, trainer

import recompute as rc
from recompute.cli.train import main
from recompute.errors import UsageError
from recompute.language.types import TensorType
from recompute.launch import mpiexec
from recompute.support.tensor_file import layout
from recompute.trainer.ranks import ONE, Ranks, ranks_of, shared
from recompute.trainer.whole import weights_sha256, write_state
from recompute.training.parts import parts_of, whole_types
from recompute.training.state import set_state_dict, state_dict

HERE = Path(__file__)
#: where ranks find this file's cases
FOLDERS = (HERE.parent, HERE.parents[1])


def ranks_run(count: int, *arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Runs this file's cases, or recompute-train, on several ranks."""
    return subprocess.run(
        [mpiexec(), "-n", str(count), sys.executable, *arguments], env=environment(*FOLDERS), capture_output=True,
        text=True, timeout=timeout, check=False,
    )  # fmt: skip


def said(history: rc.History) -> dict[str, Any]:
    """What must not depend on the number of ranks."""
    epochs = [{k: v for k, v in e.items() if "second" not in k} for e in history.epochs]
    return {"epochs": epochs, "weights": history.weights_sha256, "best": history.best, "steps": history.steps}


def files(folder: Path) -> dict[str, str]:
    """Hashes of the checkpoints and models of a run."""
    found = sorted([*folder.glob("checkpoints/*/state.safetensors"), *folder.glob("*.onnx")])
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


# -- the cases, which run on all ranks ------------------------------------------------------------------------------


def made(mesh: str, zero: int = 0, **options: Any) -> rc.Trainer:
    """Clipping, averages and metrics; the last batches of data(45) and data(21) cannot be shared equally."""
    optimizer = rc.ExponentialMovingAverage(rc.Adam(1e-2, grad_clip=rc.clip.ClipGradByGlobalNorm(0.5)), 0.9)
    return trainer(optimizer=optimizer, metrics=(rc.metrics.Accuracy(),), mesh=mesh, zero=zero, **options)


def whole_run(mesh: str, zero: int, folder: Path, epochs: int = 3, *, resume: bool = False) -> dict[str, Any]:
    one = made(mesh, zero)
    history = one.fit(data(45), epochs=epochs, eval_data=data(21, seed=1), resume=resume,
                      save=rc.Saving(folder, steps=2, keep=9, log_ranks=True))  # fmt: skip
    assert all(r["peak_bytes"]["predicted"] == r["peak_bytes"]["measured"] for r in history.ranks)
    assert [r["rank"] for r in history.ranks] == list(range(one.ranks.size))
    scores = one.predict(data(7, seed=2), ["logits"])["logits"]
    evaluated = one.evaluate(data(9, seed=2))
    return {**said(history), "predicted": scores.tobytes().hex(), "evaluated": evaluated, "files": files(folder)}


class _Asks(rc.Callback):
    """Is called on rank 0 alone, and ends the run after step 3."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, trainer: rc.Trainer, step: int, loss: float) -> None:
        assert trainer.ranks.rank == 0
        self.steps.append(step)
        if step == 3:
            trainer.stop("asked")


class _Signals(rc.data.Dataset):
    """Sends Ctrl-C to the last rank while it reads its third batch."""

    def __init__(self, rank: int, own: int) -> None:
        self.arrays, self.rank, self.own, self.reads, self.name = data(48), rank, own, 0, "signals"
        self.columns = {n: (a.dtype, a.shape[1:]) for n, a in self.arrays.items()}

    def __len__(self) -> int:
        return 48

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        part = len(indices) == self.own
        self.reads += part
        if part and self.reads == 3 and self.rank:
            os.kill(os.getpid(), signal.SIGINT)
        return {n: a[indices] for n, a in self.arrays.items()}


def _cases(folder: Path, size: int, more: bool) -> dict[str, Any]:
    """What ranks find; the file of rank 0 has it."""
    mesh, asks, cut = f"dp={size}", _Asks(), folder / f"cut-for-{size}"
    found: dict[str, Any] = {
        f"zero {z}": whole_run(mesh, z, folder / f"{size}-{z}")
        for z in ((3,) if cut.exists() else (0,) if more else (1,))
    }
    if cut.exists():  # others have ended there, and had the rest
        return {**found, "resumed": whole_run(mesh, 2, cut, resume=True)}
    history = made(mesh, 1, callbacks=[asks]).fit(
        data(45), epochs=3, eval_data=data(21, seed=1), save=rc.Saving(folder / f"cut-by-{size}", keep=9)
    )
    found["asked"] = [history.stopped, history.steps, asks.steps]
    if not more:
        return found
    one = made(mesh, 1)
    history = one.fit(_Signals(one.ranks.rank, 16 // size), epochs=9, shuffle=False, save=folder / f"signalled-{size}")
    found["signalled"] = [history.stopped, history.steps < 27, bool([*folder.glob(f"signalled-{size}/*.onnx")])]
    stopping = rc.EarlyStopping("train.loss", patience=1, min_delta=9.0)
    history = made(mesh, 1, callbacks=[stopping]).fit(data(32), epochs=9)
    found["early"] = [history.stopped[:31], len(history.epochs)]
    try:
        trainer(metrics=(_Refuses(),), mesh=mesh).fit(data(32), eval_data=data(20))
    except UsageError as e:
        found["metric"] = str(e)
    found["nan"] = _not_finite(mesh, size)
    return found


def _not_finite(mesh: str, size: int) -> list[str]:
    """What each rank says of a sample, of the last rank's, from which NaN comes."""
    program = rc.load(trainer_cases.model(normalised=False), batch=16)
    loss = rc.stop_on_nan(rc.losses.cross_entropy(program["logits"]))
    one = rc.Trainer(program, rc.Adam(), loss=loss, mesh=mesh, quiet=True)
    arrays = data(32)
    arrays["x"][30] = 3e38
    try:
        one.fit(arrays, shuffle=False)
    except rc.errors.NotFiniteError as e:
        return one.ranks.collect("errors", str(e))
    return []


class _Refuses(rc.metrics.Accuracy):
    """Finds fault with every batch; rank 0 alone sees them."""

    def update(self, outputs: Any, batch: Any) -> None:
        raise UsageError("no label fits")


def _main(folder: Path, more: bool) -> None:
    size = int(os.environ["PMI_SIZE"])
    found = _cases(folder, size, more)
    same = {n: found[n] for n in found if n != "asked"}
    answers = ranks_of(f"dp={size}").collect("the answers", same)
    assert all(a == same for a in answers), "the ranks found different results"
    if int(os.environ["PMI_RANK"]) == 0:
        (folder / f"{size}.json").write_text(json.dumps(found))


# -- the tests ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of one process with the mesh dp=1."""
    return whole_run("dp=1", 0, tmp_path_factory.mktemp("one"))


def test_two_ranks(mpi: None, one: dict[str, Any], tmp_path: Path) -> None:
    """Steps, evaluation and files of two ranks; what they saved goes on in one process."""
    done = ranks_run(2, str(HERE), str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "2.json").read_text())
    assert found["zero 1"] == one
    assert found["asked"] == ["asked", 3, [1, 2, 3]]
    logs = [(tmp_path / "2-1" / n).read_text().splitlines() for n in ("log.jsonl", "log.rank1.jsonl")]
    losses = [[json.loads(line).get("loss") for line in log] for log in logs]
    assert losses[0] == losses[1]
    resumed = whole_run("dp=1", 0, tmp_path / "cut-by-2", resume=True)
    assert without_files(resumed) == without_files(one)
    assert resumed["files"]["model.onnx"] == one["files"]["model.onnx"]


def without_files(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "files"}


def test_more_on_two_and_four_ranks(mpi: None, one: dict[str, Any], tmp_path: Path) -> None:
    """Other stages; signals, early stopping and errors end all ranks alike; four ranks go on where two have ended."""
    two, four = {}, {}
    for size, found in ((2, two), (4, four)):
        done = ranks_run(size, str(HERE), str(tmp_path), "more", timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        found.update(json.loads((tmp_path / f"{size}.json").read_text()))
        if size == 2:
            shutil.copytree(tmp_path / "cut-by-2", tmp_path / "cut-for-4")
    assert two["zero 0"] == four["zero 3"] == one
    assert two["signalled"] == ["interrupted", True, False]
    assert two["early"] == ["train.loss has not improved for", 2]
    assert two["metric"] == "no label fits"
    assert all("step 2: the loss is nan" in text for text in two["nan"])
    assert "comes from another rank" in two["nan"][0] and "where %" in two["nan"][1]
    assert without_files(four["resumed"]) == without_files(one)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    onnx.save(trainer_cases.model(), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **data(48))
    return [str(tmp_path / "model.onnx"), "--data", str(tmp_path / "train.npz"), "--batch", "16"]


def test_the_command_says_everything_once(mpi: None, command: list[str], tmp_path: Path) -> None:
    run = ["-c", "import sys; from recompute.cli.train import main; sys.exit(main())", *command]
    report = tmp_path / "two.json"
    done = ranks_run(2, *run, "--mesh", "dp=2", "--zero", "1", "--json", str(report))
    assert done.returncode == 0, done.stderr
    assert main([*command, "--mesh", "dp=1", "--json", str(tmp_path / "one.json")]) == 0
    two, one = (json.loads((tmp_path / n).read_text()) for n in ("two.json", "one.json"))
    assert two["weights_sha256"] == one["weights_sha256"]
    assert [r["peak_bytes"]["measured"] for r in two["ranks"]] == [two["peak_bytes"]["predicted"]] * 2
    assert {"rank", "peak_bytes", "resident_growth"} == two["ranks"][1].keys()
    assert done.stdout.count("peak memory: ") == done.stdout.count("epoch 1/1") == 1
    assert "on each of 2 ranks" in done.stdout
    done = ranks_run(2, *run, "--mesh", "dp=4")
    assert done.returncode == 2
    assert done.stderr.count("mpiexec -n 4 recompute-train ... --mesh dp=4") == 1
    done = ranks_run(2, *run, "--mesh", "dp=2", "--loss", "nosuch")
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    done = ranks_run(2, *run, "--mesh", "dp=1")
    assert done.stderr.count("start it without mpiexec") == 1


def test_started_alone(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("mpi4py") is None:
        assert main([*command, "--mesh", "dp=4"]) == 1
        assert "onnx-recompute[mpi]" in capsys.readouterr().err
        return
    code = f"import sys; from recompute.cli.train import main; sys.exit(main({[*command, '--mesh', 'dp=4']!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert "start it as `mpiexec -n 4 recompute-train ... --mesh dp=4`" in done.stderr or "MPI library" in done.stderr


def of_batch(batch: int) -> rc.Program:
    return rc.load(trainer_cases.model(), batch=batch)


def test_what_does_not_fit() -> None:
    with pytest.raises(UsageError, match="zero is of ranks: give a mesh"):
        trainer(zero=1)
    with pytest.raises(UsageError, match="16 samples cannot be cut into 3 equal micro-batches"):
        trainer(mesh="dp=1", micro_batches=3)
    two = Ranks(rc.Mesh.of(dp=2))
    with pytest.raises(UsageError, match="15 samples cannot be shared equally by 2 ranks"):
        shared(rc.Adam(), two, of_batch(15), 0, None)
    with pytest.raises(UsageError, match="12 micro-batches on 2 ranks are 6 on each: give a power of two"):
        shared(rc.Adam(), two, of_batch(24), 0, 12)


@pytest.mark.parametrize(
    ("batch", "ranks", "merged", "pieces"),
    [(32, 1, 1, 8), (32, 4, 1, 8), (12, 1, 1, 4), (12, 4, 1, 4), (12, 3, 1, 6), (32, 16, 1, 16), (7, 1, 1, 1),
     (16, 1, 2, 8), (16, 2, 16, 16)],
)  # fmt: skip
def test_micro_batches_by_default(batch: int, ranks: int, merged: int, pieces: int) -> None:
    many = Ranks(rc.Mesh.of(dp=ranks))
    optimizer = rc.Adam() if merged == 1 else rc.GradientMerge(rc.Adam(), merged)
    found: Any = shared(optimizer, many, of_batch(batch), 0, None)
    assert found.spec.parallel.micro_batches == pieces
    assert found.spec.parallel.batch == batch * merged


def test_a_run_with_other_micro_batches_is_refused(tmp_path: Path) -> None:
    trainer(mesh="dp=1").fit(data(32), save=tmp_path)
    for options, what in (
        ({}, "this is without a mesh"),
        ({"mesh": "dp=1", "micro_batches": 4}, "4 micro-batches a step"),
    ):
        with pytest.raises(UsageError, match=what):
            trainer(**options).fit(data(32), epochs=2, save=tmp_path, resume=True)  # type: ignore[arg-type]


class _Fake(Ranks):
    """One of two ranks without the other: what they have together is given."""

    def __init__(self, rank: int) -> None:
        super().__init__(rc.Mesh.of(dp=2))
        self.rank, self.size = rank, 2

    def collect(self, what: str, value: Any) -> list[Any]:
        return [value, None]


def divided(rank: int) -> rc.Program:
    program = rc.load(trainer_cases.model(), batch=32, seed=1)
    loss = rc.losses.cross_entropy(program["logits"])
    rc.DataParallel(rc.Adam(), rc.Mesh.of(dp=2), rank, zero=1, micro_batches=32, batch=32).minimize(loss)
    return program


def test_a_file_in_slices_is_that_of_one_process(tmp_path: Path) -> None:
    """Two ranks write what each has; the file is `rc.save_state`'s; each reads its part of it."""
    one = trainer(mesh="dp=1").program
    for i, name in enumerate(one.data):
        one.data[name] = (
            (np.arange(one.data[name].size) % 97 + i).astype(one.data[name].dtype).reshape(one.data[name].shape)
        )
    rc.save_state(one, tmp_path / "one")
    write_state(one, tmp_path / "same", ONE)
    assert (tmp_path / "same").read_bytes() == (tmp_path / "one").read_bytes()
    programs = [divided(0), divided(1)]
    for program in programs:
        rc.load_state(program, tmp_path / "one")
        assert {str(t) for t in whole_types(program).values()} == {str(t) for t in whole_types(one).values()}
    assert any(0 < p.count < programs[1].data[n].size for n, p in parts_of(programs[1]).items())  # zeros follow
    write_state(programs[0], tmp_path / "two", _Fake(0))
    with open(tmp_path / "two", "rb") as file:
        before = file.read()
    assert before != (tmp_path / "one").read_bytes()
    write_state(programs[1], tmp_path / "two", _Fake(1))
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    assert weights_sha256(one, ONE) != weights_sha256(trainer().program, ONE)


def test_what_a_rank_has_alone_is_not_saved(tmp_path: Path) -> None:
    program = divided(1)
    for call in (lambda: rc.save_state(program, tmp_path / "x"), lambda: state_dict(program),
                 lambda: set_state_dict(program, {})):  # fmt: skip
        with pytest.raises(UsageError, match="divided among ranks: this one has a part of its parameters"):
            call()


def test_the_layout_is_the_librarys() -> None:
    """Names that JSON escapes, all kinds of types, empty tensors."""
    from safetensors.numpy import save

    types = {
        "b": "f32[2,3]", 'quo"ted\\': "f64[1]", "é": "i64[3]", "z": "f16[]", "flag": "bool[5]", "bf": "bf16[2]",
        "none": "u8[0,2]", "tab\t": "i8[7]", "eight": "f8e4m3fn[3]",
    }  # fmt: skip
    parsed = {n: TensorType.parse(t) for n, t in types.items()}
    wanted = save({n: np.zeros(t.shape, t.numpy) for n, t in parsed.items()}, metadata={"format": "np"})
    header, offsets, size = layout({n: (t.numpy, t.shape) for n, t in parsed.items()})
    assert header == wanted[: len(header)]
    assert len(header) + size == len(wanted)
    assert offsets.keys() == parsed.keys()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), len(sys.argv) > 2)
