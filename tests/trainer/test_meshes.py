"""Meshes with other axes than dp: the results, files and checkpoints of one process; memory to the byte."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import trainer_cases
from safetensors.numpy import load_file
from test_ranks import files, ranks_run, said
from trainer_cases import data, trainer

import recompute as rc
from recompute.cli.train import main
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.communication.verify_ranks import verify_ranks
from recompute.errors import UsageError
from recompute.language.program import Program
from recompute.passes.pipelines.borders import Stages, without_borders
from recompute.passes.pipelines.forward import own_forward
from recompute.passes.pipelines.schedules import Pipe
from recompute.trainer.ranks import Ranks, ranks_of

# -- the cases, which run on all ranks ------------------------------------------------------------------------------


class _Stops(rc.Callback):
    """Ends the run after step 4, within its second epoch."""

    def on_step(self, trainer: rc.Trainer, step: int, loss: float) -> None:
        if step == 4:
            trainer.stop("asked")


def run(mesh: str, folder: Path, zero: int = 0, *, resume: bool = False, stops: bool = False) -> dict[str, Any]:
    """Dropout, running statistics, clipping, averages, metrics, and last batches that are smaller.

    Gradients that are zeros but for rounding stay so: Adam's epsilon is large.
    """
    adam = rc.Adam(1e-2, epsilon=1e-3, grad_clip=rc.clip.ClipGradByGlobalNorm(0.5))
    one = trainer(optimizer=rc.ExponentialMovingAverage(adam, 0.9), metrics=(rc.metrics.Accuracy(),), mesh=mesh,
                  zero=zero, callbacks=[_Stops()] if stops else ())  # fmt: skip
    history = one.fit(data(45), epochs=3, eval_data=data(21, seed=1), resume=resume, save=rc.Saving(folder, keep=9))
    assert all(r["peak_bytes"]["predicted"] == r["peak_bytes"]["measured"] for r in history.ranks)
    assert [r["rank"] for r in history.ranks] == list(range(one.ranks.size))
    scores = one.predict(data(7, seed=2), ["logits"])["logits"]
    found = {**said(history), "evaluated": one.evaluate(data(9, seed=2)), "predicted": scores.tolist()}
    return {**found, "notes": history.notes, "files": files(folder)}


def not_finite(mesh: str) -> str:
    """The error of a run in which NaN comes from a sample of the second batch."""
    program = rc.load(trainer_cases.model(normalised=False), batch=16)
    loss = rc.stop_on_nan(rc.losses.cross_entropy(program["logits"]))
    arrays = data(32)
    arrays["x"][30] = 3e38
    with pytest.raises(rc.errors.NotFiniteError) as e:
        rc.Trainer(program, rc.Adam(), loss=loss, mesh=mesh, quiet=True).fit(arrays, shuffle=False)
    return str(e.value)


def _main(mesh: str, folder: Path, zero: int) -> None:
    """Writes what rank 0 finds; all find the same."""
    found = {"all": run(mesh, folder / "all", zero), "cut": run(mesh, folder / "cut", zero, stops=True)}
    own = ranks_of(mesh).first("a copy", lambda: shutil.copytree(folder / "cut", folder / "own"))
    found["resumed"] = run(mesh, own, zero, resume=True)
    found["other"] = run(mesh, folder / "other", zero, resume=True)
    found["nan"] = {"text": ranks_of(mesh).collect("errors", not_finite(mesh))[0]}
    answers = ranks_of(mesh).collect("the answers", found)
    assert all(a == found for a in answers), "the ranks found different results"
    if int(os.environ["PMI_RANK"]) == 0:
        (folder / "found.json").write_text(json.dumps(found))


# -- the tests ------------------------------------------------------------------------------------------------------


def _without_files(found: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in found.items() if n not in ("files", "notes")}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds, and the folder of a run that was ended early."""
    folder = tmp_path_factory.mktemp("one")
    return {"all": run("dp=1", folder / "all"), "cut": run("dp=1", folder / "cut", stops=True), "folder": folder}


def _on_ranks(mesh: str, folder: Path, one: dict[str, Any], zero: int = 0) -> dict[str, Any]:
    """What the ranks of a mesh find, which also go on where one process was ended."""
    shutil.copytree(one["folder"] / "cut", folder / "other")
    done = ranks_run(Mesh.parse(mesh).ranks, __file__, mesh, str(folder), str(zero), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert "step 2: the loss is nan" in found["nan"]["text"]
    return found


@pytest.mark.parametrize(("mesh", "zero"), [("pp=2", 0), pytest.param("dp=2,pp=2", 1, marks=pytest.mark.slow)])
def test_a_pipeline_has_the_bits_of_one_process(
    mpi: None, mesh: str, zero: int, one: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, results of evaluations, weights, checkpoints and models; each goes on where the other was ended."""
    found = _on_ranks(mesh, tmp_path, one, zero)
    assert found["all"] == one["all"]
    assert found["cut"] == one["cut"]
    for name in ("resumed", "other"):
        assert _without_files(found[name]) == _without_files(one["all"])
        assert found[name]["files"]["model.onnx"] == one["all"]["files"]["model.onnx"]
    assert _without_files(run("dp=1", tmp_path / "cut", resume=True)) == _without_files(one["all"])


@pytest.mark.parametrize(("mesh", "zero"), [("tp=2", 0), pytest.param("dp=2,tp=2", 3, marks=pytest.mark.slow)])
def test_divided_operators_have_the_results_of_one_process(
    mpi: None, mesh: str, zero: int, one: dict[str, Any], tmp_path: Path
) -> None:
    """But for the order of sums; the bits are those of a run that was not ended."""
    found = _on_ranks(mesh, tmp_path, one, zero)
    assert found["all"]["notes"] == []
    assert _without_files(found["resumed"]) == _without_files(found["all"])
    here = run("dp=1", tmp_path / "cut", resume=True)
    for other in (found["all"], found["other"], here):
        for epoch, wanted in zip(other["epochs"], one["all"]["epochs"], strict=True):
            assert epoch["train"]["loss"] == pytest.approx(wanted["train"]["loss"], rel=1e-5)
            assert epoch["eval"] == pytest.approx(wanted["eval"], rel=1e-5)
        np.testing.assert_allclose(other["predicted"], one["all"]["predicted"], rtol=1e-4, atol=1e-5)
    ended = "checkpoints/step-000000009/state.safetensors"
    own, wanted = (load_file(folder / "all" / ended) for folder in (tmp_path, one["folder"]))
    assert own.keys() == wanted.keys()
    for name, array in wanted.items():  # the gradient of the bias before the normalisation is rounding alone
        np.testing.assert_allclose(own[name], array, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    onnx.save(trainer_cases.deep(), tmp_path / "model.onnx")
    for name, count in (("train", 45), ("test", 21)):
        np.savez(tmp_path / f"{name}.npz", **data(count))
    files = ["--data", str(tmp_path / "train.npz"), "--eval", str(tmp_path / "test.npz")]
    return [str(tmp_path / "model.onnx"), *files, "--batch", "16"]


def test_the_command_on_two_stages(mpi: None, command: list[str], tmp_path: Path) -> None:
    start = ["-c", "import sys; from recompute.cli.train import main; sys.exit(main())", *command]
    done = ranks_run(2, *start, "--mesh", "pp=2", "--json", str(tmp_path / "two.json"))
    assert done.returncode == 0, done.stderr
    assert main([*command, "--mesh", "dp=1", "--json", str(tmp_path / "one.json")]) == 0
    two, one = (json.loads((tmp_path / n).read_text()) for n in ("two.json", "one.json"))
    assert two["weights_sha256"] == one["weights_sha256"]
    assert two["epochs"][0]["eval"] == one["epochs"][0]["eval"]
    peaks = [r["peak_bytes"] for r in two["ranks"]]
    assert all(p["predicted"] == p["measured"] for p in peaks)
    assert all(p["measured"] < one["peak_bytes"]["measured"] for p in peaks)
    assert done.stdout.count("on rank 0; at most ") == 1
    done = ranks_run(2, *start, "--mesh", "pp=2", "--memory-budget", "80%")
    assert done.returncode == 2
    assert done.stderr.count("error: a pipeline (mesh pp=2) and a budget") == 1
    done = ranks_run(2, *start, "--mesh", "tp=3")
    assert done.returncode == 2
    assert done.stderr.count("mpiexec -n 3 recompute-train ... --mesh tp=3") == 1


def test_an_axis_along_which_nothing_is_divided_is_said() -> None:
    made = trainer(mesh="dp=1,tp=1")
    made.ranks.mesh = Mesh.of(tp=2, pp=1)  # whose ranks do what one does
    assert len(made.programs.idle_axes()) == 1
    assert "divided along tp" in made.programs.idle_axes()[0]


def test_shares_of_a_batch() -> None:
    """Ranks along dp read other rows; those along other axes the same."""
    ranks = Ranks(Mesh.of(pp=2, dp=2, tp=2))
    assert ranks.shares == 2
    assert [ranks.share_of(r) for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    first: dict[tuple[str, ...], list[int]] = {(): [], ("dp",): [], ("dp", "pp"): []}
    for ranks.rank in range(8):
        for others, found in first.items():
            if ranks.is_first(*others):
                found.append(ranks.rank)
    assert first == {(): [0], ("dp",): [0, 2], ("dp", "pp"): [0, 2, 4, 6]}
    with pytest.raises(UsageError, match="the mesh has no axis"):
        ranks_of("")


def _forward(cuts: tuple[str, ...]) -> Program:
    """A forward pass in inference mode, in stages, of a network in which a value skips some."""
    text = """program p {
      input %x: f32[4,3]
      input %m: f32[4,3]
      param %w: f32[3,3]
      param %v: f32[3,3]
      %k: f32[4,3] = Tanh(%m)
      %a: f32[4,3] = MatMul(%x, %w)
      %b: f32[4,3] = Tanh(%a)
      %c: f32[4,3] = MatMul(%b, %v)
      %d: f32[4,3] = Mul(%c, %k)
      %e: f32[4,3] = Add(%d, %a)
      output %d, %e
    }"""
    g = np.random.default_rng(0)
    arrays = {n: g.standard_normal((3, 3)).astype(np.float32) for n in ("w", "v")}
    return Program(Stages(cuts).run(rc.parse(text)), arrays)


@pytest.mark.parametrize(("ranks", "chunks"), [(4, 1), (2, 2)])
def test_a_forward_pass_in_stages(ranks: int, chunks: int) -> None:
    """Each rank has its own stages' parameters and outputs; the values are those of one rank."""
    program = _forward(("a", "b", "c"))
    pipe = Pipe("pp", ranks, 0, "interleaved" if chunks > 1 else "1f1b", chunks)
    blocks = [own_forward(program.block, pipe.at(r)) for r in range(ranks)]
    mesh = Mesh.of(pp=ranks)
    verify_ranks(blocks, mesh)
    held = [[v.name for v in b.parameters] for b in blocks]
    assert held == ([["w"], [], ["v"], []] if ranks == 4 else [["w", "v"], []])
    assert [b.outputs for b in blocks] == [()] * (ranks - 1) + [("d", "e")]
    feed = {n: np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32) for n in ("x", "m")}
    data = [{n: program.data[n] for n in names} for names in held]
    found = LockStep(blocks, mesh, data).run([feed] * ranks)[-1]
    whole = Program(without_borders(program.block), dict(program.data))
    for name, value in zip(("d", "e"), rc.Executor().run(whole, feed, ["d", "e"]), strict=True):
        np.testing.assert_array_equal(found[name], value)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
