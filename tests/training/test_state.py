"""Saved state: what comes back is the same bits; what does not fit changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import helper
from onnx.numpy_helper import from_array

import recompute as rc
from recompute.errors import ModelError, UsageError
from recompute.support.tensor_file import write_arrays
from recompute.training.parts import parts_of
from recompute.training.state import set_state_dict, state_dict, unchanged

KINDS = {
    "w": ("parameters", np.arange(6, dtype=np.float32).reshape(2, 3)),
    "half": ("parameters", np.array([0.5, -2.0], ml_dtypes.bfloat16)),
    "f16": ("parameters", np.array([[1.5]], np.float16)),
    "mean": ("buffers", np.array([1.0, np.nan, np.inf, -0.0])),
    "mask": ("buffers", np.array([True, False])),
    "empty": ("buffers", np.zeros((0, 3), np.float32)),
    "w.moment_1": ("state", np.ones((2, 3), np.float32)),
    "step": ("state", np.array(7, np.int64)),
    'odd "näme"/\n': ("state", np.array([1, 2], np.uint8)),
}


def program(fill: float | None = None) -> rc.Program:
    """Every kind and element type; `fill`: with these numbers instead."""
    p = rc.Program()
    for name, (kind, array) in KINDS.items():
        p.declare(kind, name, array.copy() if fill is None else np.full_like(array, fill))
    return p


def same(a: rc.Program, b: rc.Program) -> bool:
    return all(a.data[n].tobytes() == b.data[n].tobytes() and a.data[n].shape == b.data[n].shape for n in KINDS)


def test_saved_state_comes_back(tmp_path: Path) -> None:
    """Bit for bit, into the arrays that are there."""
    path = tmp_path / "state.safetensors"
    rc.save_state(program(), path)
    other = program(fill=0)
    arrays = dict(other.data)
    rc.load_state(other, path)
    assert same(other, program())
    assert all(other.data[n] is a for n, a in arrays.items())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("dtype", ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"])
def test_floats_of_8_bits_come_back(tmp_path: Path, dtype: str) -> None:
    """safetensors writes them under names of its own, and does not read them into NumPy."""
    array = np.array([[0.5, 2.0, 4.0]], getattr(ml_dtypes, f"float8_{dtype}"))
    source, target = program(), program(fill=0)
    source.declare("buffers", "small", array)
    target.declare("buffers", "small", np.ones_like(array))
    rc.save_state(source, tmp_path / "s")
    rc.load_state(target, tmp_path / "s")
    assert same(target, program())
    assert target.data["small"].dtype == array.dtype and target.data["small"].tobytes() == array.tobytes()


def test_arrays_that_cannot_be_written_are_replaced(tmp_path: Path) -> None:
    """Views of the model's file stay as they are; what is missing or has another type gets an array."""
    rc.save_state(program(), tmp_path / "s")
    other = program(fill=0)
    other.data["w"].flags.writeable = False
    view = other.data["w"]
    del other.data["step"]
    other.data["mean"] = np.zeros(3)
    rc.load_state(other, tmp_path / "s")
    assert same(other, program())
    assert not view.any() and other.data["w"].flags.writeable


def test_other_tools_read_it(tmp_path: Path) -> None:
    """It is a plain safetensors file, bfloat16 included; any file with these names can be loaded."""
    from safetensors.numpy import load_file, save_file

    rc.save_state(program(), tmp_path / "s")
    found = load_file(tmp_path / "s")
    assert set(found) == set(KINDS) and found["half"].dtype == ml_dtypes.bfloat16
    save_file(found, tmp_path / "again")
    other = program(fill=0)
    rc.load_state(other, tmp_path / "again")
    assert same(other, program())


def test_all_differences_are_listed(tmp_path: Path) -> None:
    """Types, missing and unknown names in one error, and nothing is loaded."""
    source = rc.Program()
    source.declare("parameters", "w", np.zeros((3, 2), np.float32))
    source.declare("parameters", "half", np.zeros(2, np.float16))
    source.declare("parameters", "mask_", np.zeros(2, np.bool_))
    rc.save_state(source, tmp_path / "s")
    target = program()
    with pytest.raises(UsageError) as e:
        rc.load_state(target, tmp_path / "s")
    lines = str(e.value).split("\n  ")
    assert lines[0].endswith("s' does not fit program 'main'; nothing was loaded:")
    assert lines[1:3] == [
        "'w' is f32[3,2] there, the program says f32[2,3]",
        "'half' is f16[2] there, the program says bf16[2]",
    ]
    assert "'step' (i64[]) is missing" in lines
    assert lines[-1] == "the program has no 'mask_' (did you mean mask?)"
    assert same(target, program())
    with pytest.raises(UsageError, match=r"'w' is f32\[3,2\] there"):
        rc.load_state(target, tmp_path / "s", strict=False)


def test_not_strict(tmp_path: Path) -> None:
    """Missing and unknown names are passed over."""
    source = rc.Program()
    source.declare("parameters", "w", np.full((2, 3), 9, np.float32))
    source.declare("parameters", "more", np.zeros(1))
    rc.save_state(source, tmp_path / "s")
    target = program()
    rc.load_state(target, tmp_path / "s", strict=False)
    assert target.data["w"].min() == 9 and target.data["step"] == 7 and "more" not in target.data


def test_many_differences_are_cut_short() -> None:
    """Twenty are enough to see what is wrong."""
    with pytest.raises(UsageError, match="and 39 more"):
        set_state_dict(program(), {f"x{i}": np.zeros(1) for i in range(50)})


def test_a_file_that_cannot_be_read_to_its_end_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array is there before the first one is put into the program."""
    import safetensors

    rc.save_state(program(fill=1), tmp_path / "s")
    opened = safetensors.safe_open

    class Broken:
        def __init__(self, *arguments: object, **options: object) -> None:
            self.file = opened(*arguments, **options)

        def __enter__(self) -> Broken:
            self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> np.ndarray:
            if name == list(KINDS)[-1]:
                raise OSError(5, "Input/output error")
            return self.file.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Broken)
    target = program()
    with pytest.raises(ModelError, match="Input/output error"):
        rc.load_state(target, tmp_path / "s")
    assert same(target, program())


@pytest.mark.parametrize("how", ["missing", "folder", "empty", "cut", "long", "noise", "onnx"])
def test_broken_files(tmp_path: Path, how: str) -> None:
    """A ModelError that names the file, and nothing is loaded."""
    path = tmp_path / "state"
    rc.save_state(program(), path)
    raw = path.read_bytes()
    contents = {
        "empty": b"",
        "cut": raw[:-1],
        "long": raw + b"\0",
        "noise": bytes(range(256)) * 4,
        "onnx": rc.export_step(rc.Program()).SerializeToString(),
    }
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how != "missing":
        path.write_bytes(contents[how])
    target = program(fill=0)
    with pytest.raises(ModelError, match=r"cannot read '.*state'"):
        rc.load_state(target, path)
    assert same(target, program(fill=0))


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    """At whatever byte the file ends."""
    path = tmp_path / "state"
    rc.save_state(program(), path)
    raw = path.read_bytes()
    for n in range(0, len(raw), 7):
        path.write_bytes(raw[:n])
        with pytest.raises(ModelError):
            rc.load_state(program(), path)


def test_a_failure_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half-written file, no temporary one."""
    path = tmp_path / "state"
    rc.save_state(program(), path)
    raw = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as m:
            m.setattr(os, name, fail)
            with pytest.raises(ModelError, match=r"cannot write '.*state': No space left on device"):
                rc.save_state(program(fill=1), path)
    assert path.read_bytes() == raw and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ModelError, match="cannot write"):
        rc.save_state(program(), tmp_path / "no" / "state")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """What it points to is replaced."""
    rc.save_state(program(fill=0), tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    rc.save_state(program(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    other = program(fill=0)
    rc.load_state(other, tmp_path / "real")
    assert same(other, program())


def test_contents_must_be_there(tmp_path: Path) -> None:
    """The error names what has none."""
    p = program()
    del p.data["step"]
    with pytest.raises(UsageError, match=r"'step' \(i64\[\]\) has no contents"):
        rc.save_state(p, tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_state_dict_is_a_copy() -> None:
    """Changing it changes nothing; setting it brings it back."""
    p = program()
    state = state_dict(p)
    assert list(state) == [v.name for v in (*p.block.parameters, *p.block.buffers, *p.block.state)]
    p.data["w"] += 1
    assert state["w"][0, 0] == 0
    set_state_dict(p, state)
    assert same(p, program())
    state["w"] = state["w"].astype(np.float64)
    with pytest.raises(UsageError, match=r"'w' is f64\[2,3\] there"):
        set_state_dict(p, state)
    with pytest.raises(UsageError, match="'w' is object"):
        set_state_dict(p, {"w": None}, strict=False)


def test_training_goes_on_from_saved_state(tmp_path: Path) -> None:
    """Two steps, saved, loaded elsewhere, one more: the bits of three steps."""
    from test_export import batch, training

    straight, first, second = training(), training(), training()
    e = rc.Executor()
    for step in range(3):
        e.run(straight, batch(step))
    for step in range(2):
        e.run(first, batch(step))
    rc.save_state(first, tmp_path / "s")
    e.run(second, batch(9))  # the executor is bound to the arrays already
    rc.load_state(second, tmp_path / "s")
    e.run(second, batch(2))
    assert all(straight.data[n].tobytes() == a.tobytes() for n, a in second.data.items())


def frozen(fill: float = 1.0, plain: bool = False) -> rc.Program:
    """y = x·W·V from a file, W frozen, V trained: a step, or the `plain` forward pass."""
    arrays = {"w": np.full((64, 64), fill, "f4"), "v": np.ones((64, 2), "f4")}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("MatMul", ["h", "v"], ["y"])]
    x = [helper.make_tensor_value_info("x", 1, ["n", 64])]
    tensors = [from_array(a, n) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", x, [helper.make_tensor_value_info("y", 1, ["n", 2])], tensors)
    p = rc.load(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), batch=2, trainable=["v"]
    )
    if not plain:
        rc.Adam().minimize(rc.losses.mse(p["y"]))
    return p


def test_frozen_weights_of_the_file_are_left_out_and_checked(tmp_path: Path) -> None:
    source, path = frozen(), tmp_path / "s"
    source.data["v"] = np.full((64, 2), 5, "f4")
    rc.save_state(source, path, whole=False)
    assert path.stat().st_size < 64 * 64 * 4
    target = frozen()
    rc.load_state(target, path)
    assert (target.data["v"] == 5).all() and (target.data["w"] == 1).all()
    other = frozen(2)
    with pytest.raises(UsageError, match="'w', a frozen weight, has other contents"):
        rc.load_state(other, path)
    assert (other.data["v"] == 1).all()
    rc.load_state(other, path, strict=False)
    assert (other.data["v"] == 5).all() and (other.data["w"] == 2).all()
    rc.save_state(source, path)
    rc.load_state(frozen(2), path)  # all of it is there


def test_frozen_weights_that_are_no_longer_those_of_the_file_are_saved(tmp_path: Path) -> None:
    source, target = frozen(), frozen()
    source.data["w"] = np.full((64, 64), 3, "f4")
    rc.save_state(source, tmp_path / "s", whole=False)
    rc.load_state(target, tmp_path / "s")
    assert (target.data["w"] == 3).all()


@pytest.mark.parametrize("told", ["[", "[1]", '{"w": 1}', "[" * 10000])
def test_damaged_digests_are_refused(tmp_path: Path, told: str) -> None:
    write_arrays({}, tmp_path / "s", {"recompute.unchanged": told})
    with pytest.raises(ModelError, match="damaged metadata"):
        rc.load_state(frozen(), tmp_path / "s")


def test_ranks_leave_out_what_they_have_of_frozen_weights_of_the_file(tmp_path: Path) -> None:
    """ZeRO and divided operators: their file is that of one process, whose digests are of whole weights."""
    one = frozen()
    rc.save_state(one, tmp_path / "one", whole=False)
    for how, axes in (({"zero": 1}, {"dp": 2}), ({}, {"tp": 2})):
        for rank in (0, 1):
            p = frozen(plain=True)
            loss = rc.losses.mse(p["y"])
            if "tp" in axes:
                rc.shard(p, "w", dim=1)
            rc.DataParallel(rc.Adam(), rc.Mesh.of(**axes), rank, **how).minimize(loss)
            assert ("w" in parts_of(p)) == ("tp" in axes)
            assert unchanged(p) == unchanged(one) and list(unchanged(p)) == ["w"]
            rc.load_state(p, tmp_path / "one")
            p.data["w"] = p.data["w"] + 1
            with pytest.raises(UsageError, match="'w', a frozen weight, has other contents"):
                rc.load_state(p, tmp_path / "one")
