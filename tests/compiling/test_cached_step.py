"""A compiled step from a file: the same bits, nothing imported that compiles; files that are not trusted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import recompute as rc
from recompute.compiling import cached
from recompute.errors import ModelError, UsageError
from recompute.language import kernels
from recompute.runtime.cpu.device import jit

#: trains LeNet, and prints losses, whether something was compiled, and warnings
SCRIPT = """
import json, sys, warnings
import numpy as np
import recompute as rc
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    step = rc.cached_step("lenet", "Adam", learning_rate=1e-3, batch=4, cache=sys.argv[1])
feed = {"x": np.random.default_rng(0).standard_normal((4, 1, 28, 28), dtype=np.float32), "label": np.arange(4)}
losses = [step.run(feed) for _ in range(3)]
kept = {n: a.tobytes().hex() for n, a in step.values.items()}
step.save(sys.argv[1] + "/saved")
losses.append(step.run(feed))
step.load(sys.argv[1] + "/saved")
again = step.run(feed)
found = {"losses": losses, "again": again, "imported": sorted(sys.modules), "warned": [str(w.message) for w in warned]}
found |= {"tested": step.evaluate(feed)["loss"].item(), "peak": step.peak_bytes, "values": kept}
wrong = {"labels": {**feed, "label": feed["label"] + 20}, "shape": {**feed, "x": feed["x"][:3]}, "none": {}}
for name, other in wrong.items():
    try:
        step.run(other)
    except rc.RecomputeError as e:
        found[name] = f"{type(e).__name__}: {e}"
print(json.dumps(found))
"""
#: the same by an Executor of the same kernels
EXECUTOR = """
import json
import numpy as np
import recompute as rc
rc.build_for("x86_64", "native")
program = rc.load(rc.models.build("lenet"), batch=4)
loss = rc.losses.cross_entropy(program).name
step = rc.compile_step(program, loss, rc.Adam(learning_rate=1e-3))
feed = {"x": np.random.default_rng(0).standard_normal((4, 1, 28, 28), dtype=np.float32), "label": np.arange(4)}
executor = rc.Executor()
losses = [executor.run(step.program, feed, [loss])[0].item() for _ in range(3)]
values = {n: a.tobytes().hex() for n, a in step.program.data.items()}
losses.append(executor.run(step.program, feed, [loss])[0].item())
print(json.dumps({"losses": losses, "values": values, "peak": step.figures.peak_bytes}))
"""
needs_compiler = pytest.mark.skipif(
    bool(jit.unavailable()) or shutil.which("gcc") is None or os.uname().machine != "x86_64",
    reason="needs numba, a C compiler and x86-64",
)


def started(script: str, *given: object) -> Any:
    """What a process prints."""
    command = [sys.executable, "-c", script, *map(str, given)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@needs_compiler
@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    first, second, executor = started(SCRIPT, tmp_path), started(SCRIPT, tmp_path), started(EXECUTOR)
    assert first["losses"] == second["losses"] == executor["losses"]
    assert first["again"] == first["losses"][3]
    assert second["values"] == {n: executor["values"][n] for n in second["values"]}
    assert second["peak"] == executor["peak"]
    for one in (first, second):
        assert not {"onnx", "recompute.passes", "llvmlite"} & set(one["imported"]), "a copy of the process has compiled"
        assert one["labels"].startswith("JobError: label 2") and "takes float32[4, 1, 28, 28]" in one["shape"]
        assert one["none"] == "UsageError: input 'x' is not fed"
    (file,) = (tmp_path / "steps").glob("*.step")
    assert file.stat().st_mode & 0o077 == 0
    whole = file.read_bytes()

    def damaged(contents: bytes) -> Any:
        file.write_bytes(contents)
        found = started(SCRIPT, tmp_path)
        assert file.read_bytes() == whole, "made again"
        return found

    at = len(whole) // 3
    for contents in (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], whole[:at]):
        assert damaged(contents)["losses"] == first["losses"]
    (tmp_path / "steps").chmod(0o777)
    other = started(SCRIPT, tmp_path)
    assert other["losses"] == first["losses"] and "others may write to it" in other["warned"][0]


def key(tmp_path: Path, model: str | None = None, **changes: Any) -> str:
    """The name of a step's file."""
    if model is None:
        model = str(tmp_path / "model.onnx")
        onnx.save(rc.models.build("mlp"), model)
    given = {"optimizer": "Adam", "arguments": {}, "batch": 4, "loss": None, "checkpoints": None, "budget": None}
    return cached._Job(model, **{**given, **changes}).key()


def test_a_file_is_named_by_all_that_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = key(tmp_path)
    assert same == key(tmp_path)
    changed = onnx.load(tmp_path / "model.onnx")
    changed.graph.initializer[0].raw_data = bytes(len(changed.graph.initializer[0].raw_data))
    onnx.save(changed, tmp_path / "other.onnx")
    others = [
        key(tmp_path, str(tmp_path / "other.onnx")), key(tmp_path, "lenet"), key(tmp_path, batch=5),
        key(tmp_path, loss="mse"), key(tmp_path, checkpoints=["a"]), key(tmp_path, budget="80%"),
        key(tmp_path, optimizer="SGD"), key(tmp_path, arguments={"learning_rate": 0.1}),
        *(key(tmp_path, optimizer=cached._asked(o, {})) for o in (rc.Adam(0.1), rc.Adam(0.2), rc.Adam(0.1, beta1=0.5))),
    ]  # fmt: skip
    with monkeypatch.context() as m:
        m.setenv("RECOMPUTE_PROCESSOR", "amd-avx2")
        others.append(key(tmp_path))
    with monkeypatch.context() as m:  # another version of LLVM beside the same files of ours
        m.setattr(cached.importlib.util, "find_spec", lambda name: None)
        others.append(key(tmp_path))
    monkeypatch.setattr(cached, "_stamp", lambda: "another version of the package")
    others.append(key(tmp_path))
    assert len({same, *others}) == len(others) + 1


def _ours(names: tuple[str, ...]) -> Any:
    """A function as of this package, which a key would name without what it closes over."""
    decays = lambda name: name in names  # noqa: E731
    decays.__module__ = "recompute.training.clip"
    return decays


def test_what_cannot_name_a_file_is_refused(tmp_path: Path) -> None:
    class Mine(rc.Adam):
        pass

    mine = rc.Adam(0.1, apply_decay_param_fun=lambda name: name == "w")
    meshed = rc.DataParallel(rc.Adam(0.1), rank=0, mesh="dp=2")
    inside = rc.Adam(0.1, apply_decay_param_fun=_ours(("w",)))
    refused = {
        "rule, of type": Mine(0.1),
        "decays, '": mine,
        "decays, '_ours": inside,
        "leave out targets, cost models and meshes": meshed,
    }
    for says, optimizer in refused.items():
        with pytest.raises(UsageError, match=says):
            rc.cached_step("mlp", optimizer, cache=tmp_path)
    with pytest.raises(UsageError, match="'beta1' is an argument of an optimizer that is named"):
        rc.cached_step("mlp", rc.Adam(0.1), beta1=0.5, cache=tmp_path)
    with pytest.raises(UsageError, match="learning_rate must be a number or a text"):
        rc.cached_step("mlp", "Adam", learning_rate=np.ones(3), cache=tmp_path)
    onnx.save(rc.models.build("mlp"), tmp_path / "two.onnx", save_as_external_data=True, size_threshold=0)
    with pytest.raises(UsageError, match="has weights in other files"):
        rc.cached_step(tmp_path / "two.onnx", "Adam", cache=tmp_path)
    with pytest.raises((UsageError, ModelError)):
        rc.cached_step(tmp_path / "none.onnx", "Adam", cache=tmp_path)
    with pytest.raises(UsageError, match=r"no optimizer 'adam' \(did you mean Adam"):
        rc.cached_step("mlp", "adam", cache=tmp_path)
    assert not (tmp_path / "steps").exists()


def test_portable_bits_are_no_cached_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_portable", [True])
    with pytest.raises(UsageError, match="a cached step has the bits of this processor"):
        rc.cached_step("mlp", "Adam", cache=tmp_path)


def test_a_model_that_changes_meanwhile_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled as it is then, and the file would have the name of what it was."""
    model = tmp_path / "model.onnx"
    onnx.save(rc.models.build("mlp"), model)

    def compiled(job: Any) -> bytes:
        onnx.save(rc.models.build("lenet"), model)
        return b"a step"

    monkeypatch.setattr(cached, "_elsewhere", compiled)
    monkeypatch.setattr(cached, "LoadedStep", lambda file: file)
    assert rc.cached_step(model, "Adam", cache=tmp_path) == b"a step"
    assert not list(tmp_path.glob("steps/*.step"))
    monkeypatch.setattr(cached, "_elsewhere", lambda job: b"a step")
    rc.cached_step(model, "Adam", cache=tmp_path)
    assert len(list(tmp_path.glob("steps/*.step"))) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="copies of a process")
def test_threads_get_their_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread asks for a step just before the copy begins."""
    mine, other = (cached._Job(name, "Adam", {}, 1, None, None, None) for name in ("mine", "other"))

    class Pool(futures.ProcessPoolExecutor):
        def submit(self, *args: Any, **options: Any) -> Any:
            cached._work[:] = [other]
            return super().submit(*args, **options)

    monkeypatch.setattr(futures, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(cached._Job, "made", lambda self: self.model.encode())
    assert cached._elsewhere(mine) == b"mine"
