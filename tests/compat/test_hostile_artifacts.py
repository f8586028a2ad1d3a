"""Files of the training interface that are truncated, of wrong types or of different models: one clear error each."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from recompute.compat.onnxruntime_training import api, artifacts
from recompute.errors import RecomputeError

H, N, T = onnx.helper, onnx.numpy_helper, onnx.TensorProto
X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
Y = np.array([0, 1, 2, 0])
ENTRIES = {"checkpoint": "recompute.checkpoint", "onnx": "recompute.artifact"}
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a small network, after a step."""
    folder = tmp_path_factory.mktemp("artifacts")
    tensors = {"w": X[:3], "b": np.zeros(3, np.float32)}
    graph = H.make_graph(
        [H.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)],
        "g",
        [H.make_tensor_value_info("x", T.FLOAT, ["N", 6])],
        [H.make_tensor_value_info("y", T.FLOAT, ["N", 3])],
        [N.from_array(a, k) for k, a in tensors.items()],
    )
    model = H.make_model(graph, opset_imports=[H.make_opsetid("", 17)], ir_version=8)
    artifacts.generate_artifacts(
        model, ["w"], ["b"], artifacts.LossType.CrossEntropyLoss, artifacts.OptimType.AdamW, folder
    )
    state = used(folder)
    api.CheckpointState.save_checkpoint(state, folder / "checkpoint", include_optimizer_state=True)
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def used(folder: Path) -> api.CheckpointState:
    """What a training does with the files."""
    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = api.Optimizer(folder / "optimizer_model.onnx", module)
    module(X, Y)
    optimizer.step()
    module.eval()(X, Y)
    module.get_contiguous_parameters()
    module.export_model_for_inferencing(folder / "inference.onnx", ["y"])
    return state


Change = Callable[[Path], Any]


def bytes_of(name: str, change: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def told(change: Callable[[dict], Any] | Any, name: str = "training_model.onnx") -> Change:
    """The description in a model changed, or replaced by a text."""

    def made(folder: Path) -> None:
        model = onnx.load(folder / name)
        (entry,) = (p for p in model.metadata_props if p.key == ENTRIES["onnx"])
        found = json.loads(entry.value)
        entry.value = change if isinstance(change, str) else json.dumps(change(found) or found)
        onnx.save(model, folder / name)

    return made


def graph(change: Callable[[onnx.ModelProto], Any], name: str = "training_model.onnx") -> Change:
    def made(folder: Path) -> None:
        model = onnx.load(folder / name)
        change(model)
        onnx.save(model, folder / name)

    return made


def checkpoint(change: Callable[[dict, dict], Any] | str) -> Change:
    """The description and arrays of the checkpoint changed."""

    def made(folder: Path) -> None:
        path = folder / "checkpoint"
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        text, arrays = header["__metadata__"][ENTRIES["checkpoint"]], load_file(path)
        if not isinstance(change, str):
            found = json.loads(text)
            text = json.dumps(change(found, arrays) or found)
        save_file(arrays, path, {ENTRIES["checkpoint"]: text if not isinstance(change, str) else change})

    return made


def put(**values: Any) -> Callable[..., Any]:
    return lambda found, *_: found.update(values)


def without(name: str) -> Callable[..., Any]:
    return lambda found, *_: (found.pop(name), None)[1]


def arrays(change: Callable[[dict], Any]) -> Callable[..., None]:
    def made(found: dict, given: dict) -> None:
        change(given)

    return made


def cyclic(model: onnx.ModelProto) -> None:
    model.graph.node.extend([H.make_node("Relu", ["q"], ["p"]), H.make_node("Relu", ["p"], ["q"])])
    model.graph.node[0].input[0] = "q"


def wide(model: onnx.ModelProto) -> None:
    for i in model.graph.input:
        if i.name == "w":
            i.type.tensor_type.shape.dim[0].dim_value = 1 << 62


def typed(model: onnx.ModelProto) -> None:
    for i in model.graph.input:
        if i.name == "w":
            i.type.tensor_type.elem_type = T.INT64


def sequence(model: onnx.ModelProto) -> None:
    for i in model.graph.input:
        if i.name == "w":
            i.type.CopyFrom(H.make_sequence_type_proto(H.make_tensor_type_proto(T.FLOAT, [3, 6])))


def unnamed(model: onnx.ModelProto) -> None:
    kept = [i for i in model.graph.input if i.name != "w"]
    del model.graph.input[:]
    model.graph.input.extend(kept)


FILES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
HUGE = np.zeros((0, 1 << 40), np.float32)
HOSTILE: dict[str, Change] = {
    **{f"{n} is missing": lambda f, n=n: (f / n).unlink() for n in FILES},
    **{f"{n} is empty": bytes_of(n, lambda b: b"") for n in FILES},
    **{f"{n} is cut": bytes_of(n, lambda b: b[: len(b) // 2]) for n in FILES},
    **{f"{n} is noise": bytes_of(n, lambda b: bytes(range(256)) * 4) for n in FILES},
    **{f"{n} is a folder": lambda f, n=n: ((f / n).unlink(), (f / n).mkdir()) for n in FILES},
    **{f"description {v!r:.12}": told(v) for v in ("", "5", "null", "[]", "{}", DEEP, '"model"', "NaN", "{")},
    **{f"without {k}": told(without(k)) for k in ("kind", "loss", "loss_inputs", "outputs", "trained", "frozen",
                                                  "checkpoints", "memory_budget")},
    **{f"{k} is {v!r}": told(put(**{k: v})) for k, v in (
        ("kind", 5), ("kind", "optimizer"), ("loss", "Other"), ("loss", ["MSELoss"]), ("loss", "MSELoss"), ("loss", {}),
        ("loss_inputs", "y"), ("loss_inputs", [5]), ("loss_inputs", ["z"]), ("loss_inputs", ["y", "x", "x"]),
        ("loss_inputs", ["y", "x"]), ("outputs", 5), ("outputs", ["none"]), ("outputs", [None]), ("trained", None),
        ("trained", "w"), ("trained", []), ("trained", [["w"]]), ("trained", ["w", "w"]), ("trained", ["w", "q"]),
        ("trained", ["x"]), ("trained", {"w": 1}), ("frozen", ["w"]), ("frozen", []), ("frozen", 1.5),
        ("checkpoints", "y"), ("checkpoints", [1]), ("memory_budget", "much"),
        ("memory_budget", -5), ("memory_budget", [1]), ("memory_budget", True), ("memory_budget", "1 byte"),
    )},
    **{f"optimizer {k} is {v!r}": told(put(**{k: v}), "optimizer_model.onnx") for k, v in (
        ("name", "Lion"), ("name", None), ("name", ["SGD"]), ("kind", "model"),
    )},
    "the model in the optimizer's place": lambda f: (f / "eval_model.onnx").replace(f / "optimizer_model.onnx"),
    "a weight of another shape in the model": graph(lambda m: m.graph.input[1].type.tensor_type.shape.dim.pop()),
    "a weight of 2^62 rows": graph(wide), "a weight of whole numbers": graph(typed), "a sequence": graph(sequence),
    "a weight that is no input": graph(unnamed), "a cycle": graph(cyclic),
    "no nodes": graph(lambda m: m.graph.ClearField("node")),
    "no outputs": graph(lambda m: m.graph.ClearField("output")),
    "no inputs": graph(lambda m: m.graph.ClearField("input")),
    "an unknown operator": graph(lambda m: setattr(m.graph.node[0], "op_type", "Unknown")),
    "an evaluation model of other nodes": graph(lambda m: m.graph.ClearField("node"), "eval_model.onnx"),
    "an evaluation model of other weights": told(put(trained=["w", "q"]), "eval_model.onnx"),
    "a node without inputs": graph(lambda m: m.graph.node[0].ClearField("input")),
    **{f"checkpoint {v!r:.12}": checkpoint(v) for v in ("", "5", "null", "[]", "{}", DEEP, "{")},
    **{f"checkpoint without {k}": checkpoint(without(k)) for k in ("weights", "trained", "properties", "optimizer")},
    **{f"checkpoint's {k} is {v!r:.40}": checkpoint(put(**{k: v})) for k, v in (
        ("weights", "wb"), ("weights", [["w"]]), ("weights", ["w"]), ("weights", ["w", "b", "c"]), ("weights", {}),
        ("trained", 5), ("trained", ["q"]), ("trained", ["w", "w"]), ("trained", ["w", "b"]), ("trained", [None]),
        ("trained", []), ("properties", []), ("properties", {"a": [1]}), ("properties", {"a": None}),
        ("properties", 7), ("optimizer", [["steps", 1]]), ("optimizer", {"steps": "1"}), ("optimizer", {"steps": -1}),
        ("optimizer", {"steps": 1.5}), ("optimizer", {"steps": 10**30}), ("optimizer", {"steps": True}),
        ("optimizer", {"learning_rate": None}), ("optimizer", {"learning_rate": float("nan")}),
        ("optimizer", {"learning_rate": 10**400}), ("optimizer", {"other": 1}), ("optimizer", None),
    )},
    "checkpoint's weight has another shape": checkpoint(arrays(put(**{"weight/w": X[:2]}))),
    "checkpoint's weight has another type": checkpoint(arrays(put(**{"weight/w": X[:3].astype(np.float64)}))),
    "checkpoint's weight is missing": checkpoint(arrays(without("weight/w"))),
    "checkpoint's weight is huge and empty": checkpoint(arrays(put(**{"weight/w": HUGE}))),
    "checkpoint's weight is a number": checkpoint(arrays(put(**{"weight/w": np.array(1, np.float32)}))),
    "checkpoint's moment has another shape": checkpoint(arrays(put(**{"moment/w/m": X[:2]}))),
    "checkpoint's moment has another type": checkpoint(arrays(put(**{"moment/w/v": np.zeros((3, 6), np.int8)}))),
    "checkpoint's moment of nothing": checkpoint(arrays(put(**{"moment/q/m": X[:2]}))),
    "a checkpoint without a description": lambda f: save_file({"weight/w": X}, f / "checkpoint"),
    "a checkpoint with a long header": lambda f: (f / "checkpoint").write_bytes(struct.pack("<Q", 1 << 60) + b"{}"),
}  # fmt: skip


def test_the_files_as_they_are(written: dict[str, bytes], tmp_path: Path) -> None:
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
    used(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", HOSTILE)
def test_one_clear_error(what: str, written: dict[str, bytes], tmp_path: Path) -> None:
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
    HOSTILE[what](tmp_path)
    with pytest.raises(RecomputeError) as caught:
        used(tmp_path)
    assert str(caught.value).strip() and len(str(caught.value)) < 2000
