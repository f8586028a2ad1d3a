"""Ranks that do not have the same: an error on all of them before the first step, with the rank and the thing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import trainer_cases
from distributed_cases import environment
from trainer_cases import data, trainer

import recompute as rc
from recompute.errors import UsageError
from recompute.launch import mpiexec
from recompute.runtime.communication.agreement import check_same
from recompute.trainer.ranks import ranks_of
from recompute.training.origin import digest, held, options_of

HERE = Path(__file__)
MESH = "dp=2"


def ranks_run(line: Callable[[int], list[str]], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs another command line on each of two ranks."""
    python, folders = sys.executable, (HERE.parent, HERE.parents[1])
    command = [mpiexec(), "-n", "1", python, *line(0), ":", "-n", "1", python, *line(1)]
    return subprocess.run(
        command, env=environment(*folders), capture_output=True, text=True, timeout=timeout, check=False
    )


# -- the cases, of which rank 1 has something else ------------------------------------------------------------------


def made(rank: int, what: str, zero: int = 0) -> rc.Trainer:
    """A trainer; that of rank 1 differs in one thing."""
    other = what if rank else ""
    rate = 2e-2 if other == "Adam.learning_rate" else 1e-2
    options: dict[str, Any] = {"optimizer": rc.Adam(rate), "zero": zero}
    if other == "optimizer":
        options["optimizer"] = rc.SGD(1e-2)
    if other == "precision":
        options["optimizer"] = rc.MixedPrecision(rc.Adam(1e-2), "fp16")
    elif what == "precision":
        options["optimizer"] = rc.MixedPrecision(rc.Adam(1e-2), "bf16")
    if other == "RecomputeOptimizer":
        options["optimizer"] = rc.RecomputeOptimizer(rc.Adam(rate)).set_checkpoints(["r"])
    if other == "zero":
        options["zero"] = 1
    if other == "micro_batches":
        options["micro_batches"] = 4
    if other == "seed":
        options["seed"] = 4
    if other == "batch":
        options["batch"] = 8
    if other != "model" and other != "contents":
        return trainer(mesh=MESH, **options)
    file = trainer_cases.model(dropout=0.5 if other == "model" else 0.25)
    if other == "contents":
        (weight,) = (i for i in file.graph.initializer if i.name == "fc2.weight")
        array = onnx.numpy_helper.to_array(weight).copy()
        array[3, 1] += 1
        weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    program = rc.load(file, batch=16, seed=1)
    return rc.Trainer(program, rc.Adam(rate), loss="cross_entropy", seed=3, mesh=MESH, zero=zero, quiet=True)


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except UsageError as e:
        return str(e)
    return "nothing"


def fitted(rank: int, what: str, folder: Path, zero: int = 0) -> object:
    """The run of a rank; that of rank 1 differs in one thing."""
    other = what if rank else ""
    one = made(rank, what, zero)
    arrays = data(40 if other == "samples" else 48)
    if other == "data":
        arrays["x"][17, 3] += 1
    if other == "state":
        one.program.data["fc1.weight.moment1"] = np.ones((8, 16), np.float32)
    return one.fit(
        arrays, epochs=2 if other == "epochs" else 1, eval_data=data(16) if other == "evaluation" else None,
        shuffle=other != "shuffle", drop_last=other == "drop_last", save=folder if other == "save" else None,
    )  # fmt: skip


#: what differs → what the error names
CASES = {
    **{name: name for name in ("Adam.learning_rate", "precision", "zero", "seed", "batch",
                               "model", "epochs", "data", "drop_last", "save", "micro_batches",
                               "optimizer")},
    "RecomputeOptimizer": "checkpoints", "contents": "contents of 'fc2.weight'",
    "samples": "samples of the data", "shuffle": "shuffle of the data",
    "state": "contents of 'fc1.weight.moment1'",
    "evaluation": "evaluation: False on rank 0; True on rank 1",
}  # fmt: skip


def streamed(rank: int, what: str) -> list[dict[str, np.ndarray]]:
    """Batches; rank 1 has fewer of them, or one of another size."""
    sizes = [16, 16, 16]
    if rank:
        sizes = [16, 16] if what == "stream" else [16, 8, 16]
    return [data(count, seed) for seed, count in enumerate(sizes)]


def step(rank: int, what: str, zero: int) -> None:
    """A step by an executor, without a trainer."""
    file = trainer_cases.model()
    if rank and what == "contents":
        file.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((8, 16), np.float32), "fc1.weight"))
    program = rc.load(file, batch=16, seed=1)
    loss = rc.losses.cross_entropy(program["logits"])
    rate = 0.5 if rank and what == "rate" else 0.1
    rc.DataParallel(rc.Adam(rate), rc.Mesh.of(dp=2), rank, zero=zero, batch=16).minimize(loss)
    rows = {n: a[8 * rank : 8 * rank + 8] for n, a in data(16).items()}  # each rank has data of its own
    rc.Executor().run(program, rows, [loss])


HAND = """program p {{
  input %x: f32[4,3]
  param %w: f32[3,5]
  param %own: f32[3,5]
  const %lr: f32[] = [{rate}]
  %y: f32[4,5] = Gemm(%x, %w)
  %g: f32[3,5] = Gemm(%x, %y) {{transA=1}}
  communicate %s: f32[3,5] = AllReduce(%g) {{axis="dp", ranks=2, number=0}}
  communicate %t: f32[3,5] = CommWait(%s, %g)
  %w: f32[3,5] = SGDUpdate(%w, %t, %lr)
  %own: f32[3,5] = SGDUpdate(%own, %g, %lr)
  output %y
}}"""

#: what differs → what the error names
HAND_CASES = {"w": "w", "rate": "lr"}


def by_hand(rank: int, what: str) -> None:
    """A step of a program of no mesh, whose gradients it adds up itself; the weights %own are each rank's."""
    other = what if rank else ""
    arrays = {n: np.full((3, 5), 2.0 if other == n else 1.0, np.float32) for n in ("w", "own")}
    program = rc.Program(rc.verify(rc.parse(HAND.format(rate=0.5 if other == "rate" else 0.1))), arrays)
    rc.Executor(mesh=MESH).run(program, {"x": np.full((4, 3), rank + 1, np.float32)})
    assert not np.array_equal(arrays["w"], np.ones((3, 5)))


def _main(folder: Path) -> None:
    rank = int(os.environ["PMI_RANK"])
    found = {what: said(lambda what=what: fitted(rank, what, folder)) for what in CASES}  # type: ignore[misc]
    for zero in (1, 3):
        found[f"contents, zero {zero}"] = said(lambda zero=zero: fitted(rank, "contents", folder, zero))  # type: ignore[misc]
    for what in ("contents", "rate", "nothing"):
        for zero in (0, 3):
            found[f"step: {what}, {zero}"] = said(lambda w=what, z=zero: step(rank, w, z))  # type: ignore[misc]
    for what in ("w", "rate", "own"):
        found[f"by hand: {what}"] = said(lambda w=what: by_hand(rank, w))  # type: ignore[misc]
    one = made(rank, "")
    for what in ("stream", "sizes"):
        found[what] = said(lambda w=what: made(rank, "").fit(streamed(rank, w)))  # type: ignore[misc]
    found["evaluated stream"] = said(lambda: made(rank, "").evaluate(streamed(rank, "stream")))
    found["evaluated"] = said(lambda: one.evaluate(data(16, seed=rank)))
    (folder / f"{rank}.json").write_text(json.dumps(found))


# -- the tests ------------------------------------------------------------------------------------------------------


def test_every_difference_is_named_on_all_ranks(mpi: None, tmp_path: Path) -> None:
    started = time.monotonic()
    done = ranks_run(lambda rank: [str(HERE), str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert time.monotonic() - started < 60
    found, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert found == other
    wanted = {what: f"the ranks do not have the same {name}" for what, name in CASES.items()}
    wanted |= {f"contents, zero {z}": "the ranks do not have the same contents of 'fc2.weight'" for z in (1, 3)}
    for zero in (0, 3):
        wanted[f"step: contents, {zero}"] = "the ranks do not have the same contents of 'fc1.weight'"
        wanted[f"step: rate, {zero}"] = (
            "the ranks do not have the same Adam.learning_rate: 0.1 on rank 0; 0.5 on rank 1"
        )
        wanted[f"step: nothing, {zero}"] = "nothing"
    wanted |= {f"by hand: {n}": f"the ranks do not have the same contents of '{v}':" for n, v in HAND_CASES.items()}
    wanted["by hand: own"] = "nothing"
    wanted["stream"] = "the ranks do not have the same batch 3 of "
    wanted["sizes"] = wanted["evaluated stream"] = "the ranks do not have the same batch 2 of "
    wanted["evaluated"] = "the ranks do not have the same data of the evaluation"
    assert {what: text[: len(wanted[what])] for what, text in found.items()} == wanted
    assert "0.01 on rank 0; 0.02 on rank 1; ranks train one model together" in found["Adam.learning_rate"]


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (["--mesh", "dp=1"], "the ranks do not have the same mesh: dp=2 on rank 0; dp=1 on rank 1"),
        ([], "the ranks do not have the same mesh: dp=2 on rank 0; none on rank 1"),
        (["--mesh", "dp=2", "--epoch", "3"], "rank 1: unknown option '--epoch'"),
    ],
)
def test_a_rank_with_another_command_line_ends_all(mpi: None, others: list[str], text: str, tmp_path: Path) -> None:
    onnx.save(trainer_cases.model(), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **data(32))
    run = "import sys; from recompute.cli.train import main; sys.exit(main())"
    line = ["-c", run, str(tmp_path / "model.onnx"), "--data", str(tmp_path / "train.npz"), "--batch", "16"]
    done = ranks_run(lambda rank: [*line, *(others if rank else ["--mesh", "dp=2"])])
    assert done.returncode != 0
    assert f"error: {text}" in done.stderr, done.stderr


def test_a_process_that_never_begins_is_waited_for_no_longer(mpi: None) -> None:
    """MPI waits for it for ever by itself."""
    begin = "import os; os.environ['RECOMPUTE_DEADLINE'] = '.2'; import recompute as rc; rc.Executor(mesh='dp=2')"
    done = ranks_run(lambda rank: ["-c", "pass" if rank else begin])
    assert done.returncode != 0
    assert "recompute: rank 0 has waited for 2 s for all processes to begin; all ranks end" in done.stderr


def test_a_difference_names_the_ranks() -> None:
    check_same([({"a": "1"}, {"x": "d"}), ({"a": "1"}, {"y": "e"})])  # values that the other does not have
    with pytest.raises(UsageError, match="not have the same a: 1 on ranks 0, 2; 2 on rank 1; ranks train one model"):
        check_same([({"a": a}, {}) for a in "121"])
    with pytest.raises(UsageError, match="not have the same a: 1 on rank 0; none on rank 1"):
        check_same([({"a": "1"}, {}), ({}, {})])
    with pytest.raises(UsageError, match="same contents of x, and 1 more: digest d on rank 1; digest e on rank 2"):
        check_same([({}, {}), ({}, {"x": "d", "y": "d"}), ({}, {"x": "e", "y": "e"})])


def test_digests_are_of_contents() -> None:
    """The same for the same elements, however they lie in memory; another one for another type, shape or element."""
    a = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert digest(a) == digest(a.copy(order="F")) == digest(np.repeat(a, 2, axis=0)[::2])
    assert digest(np.broadcast_to(np.float32(3), (5, 7))) == digest(np.full((5, 7), 3, np.float32))
    assert len({digest(x) for x in (a, a + (a == 23), a.reshape(6, 4), a.view(np.int32), a[:3], a[:0])}) == 6


def test_parts_have_the_name_of_their_place() -> None:
    """Ranks that have the same part compare it; others do not."""

    def parts(rank: int, mesh: rc.Mesh, zero: int) -> dict[str, str]:
        program = rc.load(trainer_cases.model(normalised=False, dropout=0), batch=16, seed=1)
        loss = rc.losses.cross_entropy(program["logits"])
        rc.DataParallel(rc.Adam(), mesh, rank, zero=zero, batch=16).minimize(loss)
        return held(program)

    zero = [parts(rank, rc.Mesh.of(dp=2), 1) for rank in (0, 1)]
    cut = [n for n in zero[0] if "fc1.weight'" in n]
    assert cut == ["'fc1.weight' (part from 0)"] and "'fc1.weight' (part from 64)" in zero[1]
    grid = [parts(rank, rc.Mesh.of(dp=2, tp=2), 0) for rank in range(4)]
    assert grid[0] == grid[2] and grid[1] == grid[3]
    names = [{n for n in g if "part" in n} for g in grid]
    assert names[0] and not names[0] & names[1]


def test_options_are_described() -> None:
    found = options_of(rc.MixedPrecision(rc.Adam(rc.lr.CosineAnnealingDecay(0.1, 9)), "fp16").spec)
    assert found["optimizer"] == "Adam" and found["precision"] == "'fp16'"
    assert found["Adam.learning_rate"] == "CosineAnnealingDecay(learning_rate=0.1, T_max=9, eta_min=0.0)"
    assert not [text for text in found.values() if re.search("0x[0-9a-f]{6}", text)]


def test_without_a_launcher_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PMI_SIZE", raising=False)
    assert ranks_of("dp=1").mesh == rc.Mesh.of(dp=1)
    assert trainer(mesh="dp=1").program.origin is None


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
