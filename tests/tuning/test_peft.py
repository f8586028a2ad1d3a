"""Adapters beside PEFT's own: its files, its outputs, and how it trains them (tests/data/make_peft.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.numpy_helper import from_array
from safetensors.numpy import load_file

import recompute as rc

onnxruntime = pytest.importorskip("onnxruntime")

FOLDER = Path(__file__).parents[1] / "data" / "peft"
KNOWN = np.load(FOLDER / "reference.npz")
NAMES = ("lora", "dora", "embedding", "head")


def base(form: str = "torch", numbers: Any = np.float32, batch: int | str = 3) -> onnx.ModelProto:
    """The script's network as exporters write it: weights turned by a Transpose ("torch"), stored turned ("turned"), or
    read by Gemm ("gemm")."""
    weights = {n.removeprefix("base."): KNOWN[n].astype(numbers) for n in KNOWN.files if n.startswith("base.")}
    nodes = [helper.make_node("Gather", ["embed.weight", "ids"], ["h"], axis=0)]
    source = "h"
    if form == "gemm":
        weights["rows"], weights["back"] = np.array([-1, 12]), np.array([-1, 5, 7])
        nodes.append(helper.make_node("Reshape", ["h", "rows"], ["h2"]))
        nodes.append(helper.make_node("Gemm", ["h2", "q.weight", "q.bias"], ["qb"], transB=1))
        nodes.append(helper.make_node("Tanh", ["qb"], ["t"]))
        nodes.append(helper.make_node("Gemm", ["t", "score.weight"], ["flat"], transB=1))
        nodes.append(helper.make_node("Reshape", ["flat", "back"], ["scores"]))
    else:
        names = {"q": "q.weight", "score": "score.weight"}
        for n, w in names.items():
            if form == "torch":
                nodes.append(helper.make_node("Transpose", [w], [f"{n}.t"], perm=[1, 0]))
                names[n] = f"{n}.t"
            else:
                weights[w] = np.ascontiguousarray(weights[w].T)
        nodes.append(helper.make_node("MatMul", [source, names["q"]], ["qx"]))
        nodes.append(helper.make_node("Add", ["qx", "q.bias"], ["qb"]))
        nodes.append(helper.make_node("Tanh", ["qb"], ["t"]))
        nodes.append(helper.make_node("MatMul", ["t", names["score"]], ["scores"]))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(numbers))
    graph = helper.make_graph(
        nodes, "peft",
        [helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, [batch, 5])],
        [helper.make_tensor_value_info("scores", kind, [batch, 5, 7])],
        [from_array(a, n) for n, a in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def run(model: onnx.ModelProto) -> np.ndarray:
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"ids": KNOWN["ids"]})[0]


@pytest.mark.parametrize("form", ["torch", "turned", "gemm"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_peft(name: str, form: str) -> None:
    model = rc.load_adapter(base(form), FOLDER / name)
    program = rc.load(model)
    (scores,) = program.evaluate({"ids": KNOWN["ids"]})
    for found in (scores, run(model), run(rc.export_trained(program)), run(rc.merge_adapters(model))):
        np.testing.assert_allclose(found, KNOWN[f"{name}.scores"], rtol=0, atol=1e-5)
    assert abs(run(base(form)) - scores).max() > 1e-2
    assert [n.op_type for n in rc.merge_adapters(model).graph.node] == [n.op_type for n in base(form).graph.node]


@pytest.mark.parametrize("form", ["torch", "turned", "gemm"])
@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_peft_in_float64(name: str, form: str) -> None:
    program = rc.load_adapter(rc.load(base(form, np.float64)), FOLDER / name)
    loss = rc.losses.cross_entropy(program["scores"])
    rc.Adam(float(KNOWN["rate"])).minimize(loss)
    executor = rc.Executor()
    feed = {"ids": KNOWN["ids"], "label": KNOWN["labels"]}
    losses = [float(executor.run(program, feed, [loss])[0]) for _ in KNOWN[f"{name}.losses"]]
    np.testing.assert_allclose(losses, KNOWN[f"{name}.losses"], rtol=1e-9)
    assert losses[-1] < losses[0] - 0.05
    (scores,) = program.evaluate({"ids": KNOWN["ids"]})
    np.testing.assert_allclose(scores, KNOWN[f"{name}.trained_scores"], rtol=0, atol=1e-7)
    np.testing.assert_allclose(run(rc.merge_adapters(program)), scores, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_files_are_those_of_peft(name: str, tmp_path: Path) -> None:
    model = rc.load_adapter(rc.load(base()), FOLDER / name)
    rc.save_adapter(model, tmp_path / "own")
    own, theirs = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "own", FOLDER / name))
    assert {n: (a.shape, a.dtype) for n, a in own.items()} == {n: (a.shape, a.dtype) for n, a in theirs.items()}
    assert all(np.array_equal(own[n], theirs[n]) for n in theirs)
    config, known = (json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path / "own", FOLDER / name))
    assert config.keys() <= known.keys() and sorted(config["target_modules"]) == sorted(known["target_modules"])
    (scores,) = model.evaluate({"ids": KNOWN["ids"]})
    (again,) = rc.load_adapter(rc.load(base("turned")), tmp_path / "own").evaluate({"ids": KNOWN["ids"]})
    np.testing.assert_allclose(again, scores, rtol=0, atol=1e-6)


def test_names_with_a_prefix(tmp_path: Path) -> None:
    model = rc.lora(base(), ["q.weight"], r=2)
    rc.save_adapter(model, tmp_path, prefix="model.")
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert set(names) == {f"base_model.model.model.q.lora_{p}.weight" for p in "AB"}
    again = rc.load_adapter(base(), tmp_path)
    assert [p.name for p in rc.load(again).parameters] == ["q.lora_A.weight", "q.lora_B.weight"]


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(rc.ModelError, match="cannot read the adapter in"):
        rc.load_adapter(base(), tmp_path)
    shutil.copytree(FOLDER / "lora", tmp_path / "a")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(rc.ModelError, match="is damaged"):
        rc.load_adapter(base(), tmp_path / "a")
    shutil.copytree(FOLDER / "lora", tmp_path / "b")
    (tmp_path / "b" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(rc.ModelError, match="not of LoRA but of 'IA3'"):
        rc.load_adapter(base(), tmp_path / "b")
    other = rc.models.build("lenet", batch=1)
    with pytest.raises(rc.UsageError, match="the model has no module 'q'"):
        rc.load_adapter(other, FOLDER / "lora")
    with pytest.raises(rc.UsageError, match=r"rc\.lora or rc\.load_adapter"):
        rc.save_adapter(base(), tmp_path)
