"""Folders of adapters, and adapters in a model's metadata, that are damaged or hostile: one clear error each."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.numpy_helper import from_array
from safetensors.numpy import save_file

import recompute as rc
from recompute.errors import ModelError, RecomputeError, UsageError
from recompute.support.json_values import unfit
from recompute.tuning.lora import adapters_of
from recompute.tuning.peft import _alphas

F = onnx.TensorProto.FLOAT
A, B = np.ones((4, 16), np.float32), np.ones((8, 4), np.float32)
PLAIN = {"l.lora_A.weight": A, "l.lora_B.weight": B}
DEEP = "[" * 100_000


def model() -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "l.weight"], ["y"], transB=1)],
        "g",
        [helper.make_tensor_value_info("x", F, [2, 16])],
        [helper.make_tensor_value_info("y", F, [2, 8])],
        [from_array(np.ones((8, 16), np.float32), "l.weight")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def folder(path: Path, config: dict[str, Any] | str, tensors: dict[str, np.ndarray] | bytes = PLAIN) -> Path:
    given = config if isinstance(config, str) else json.dumps({"peft_type": "LORA", "lora_alpha": 8, **config})
    (path / "adapter_config.json").write_text(given)
    weights = path / "adapter_model.safetensors"
    if isinstance(tensors, bytes):
        weights.write_bytes(tensors)
    else:
        save_file({f"base_model.model.{n}": np.ascontiguousarray(a) for n, a in tensors.items()}, weights)
    return path


CONFIGS: list[tuple[Any, str]] = [
    (DEEP, "is damaged"),
    ("", "is damaged"),
    ("[]", "not of LoRA but of None"),
    ("5", "not of LoRA"),
    ({"peft_type": ["LORA"]}, "not of LoRA but of"),
    ({"peft_type": "x" * 10**6}, "not of LoRA but of"),
    ({"lora_alpha": 10**400}, "lora_alpha must be a finite number"),
    ('{"peft_type": "LORA", "lora_alpha": NaN}', "finite"),
    ('{"peft_type": "LORA", "lora_alpha": 1e999}', "finite"),
    ({"lora_alpha": None}, "finite"),
    ({"lora_alpha": "8"}, "'8'"),
    ({"lora_alpha": True}, "finite"),
    ({"lora_alpha": [8]}, "finite"),
    ({"lora_dropout": "x"}, "lora_dropout must be"),
    ({"lora_dropout": 2}, "dropout 2"),
    ({"lora_dropout": -0.5}, "dropout -0.5"),
    ({"use_rslora": "yes"}, "use_rslora"),
    ({"alpha_pattern": [1]}, "alpha_pattern must be"),
    ({"alpha_pattern": "l"}, "alpha_pattern must be"),
    ({"alpha_pattern": {"l": None}}, "finite"),
    ({"alpha_pattern": {"l": "1"}}, "finite"),
    ({"alpha_pattern": {"(": 1}}, "not a regular expression"),
    ({"alpha_pattern": {"a)|(b": 1}}, "not a regular"),
    ({"alpha_pattern": {"(?=l)l": 1}}, "invalid perl"),
    ({"alpha_pattern": {r"(a)\1": 1}}, "invalid escape"),
    ({"alpha_pattern": {"(a{1000}){1000}": 1}}, "repetition"),
    ({"alpha_pattern": {"(" * 9000 + ")" * 9000: 1}}, "too long|nesting"),
    ({"alpha_pattern": {f"(a{i}|b)": 1 for i in range(999)}}, "too long: name the modules"),
]
TENSORS: list[tuple[Any, str]] = [
    (b"", "is damaged"),
    (b"\xff" * 64, "is damaged"),
    ({"l.lora_A.weight": A}, "is not complete"),
    ({**PLAIN, "l.lora_A.weight": np.float32(1)}, "rank 0|is .1. for"),
    ({**PLAIN, "l.lora_A.weight": A[:0]}, "rank 0"),
    ({**PLAIN, "l.lora_A.weight": A[0]}, r"A of 'l' is \[16\]"),
    ({**PLAIN, "l.lora_B.weight": B[:1]}, r"B of 'l' is \[1"),
    ({**PLAIN, "l.lora_magnitude_vector": A}, "magnitude of 'l' is"),
    ({f"m.{n}": a for n, a in PLAIN.items()}, ""),
    ({"other.weight": A}, "the model has no module 'other.weight'"),
    ({"l.weight": A}, r"'l.weight' is \[4, 16\]"),
    ({f"{k}.{n}": a for n, a in PLAIN.items() for k in ("a", "b")}, "has a value .* already"),
]


@pytest.mark.parametrize(("config", "why"), CONFIGS, ids=[str(i) for i in range(len(CONFIGS))])
def test_configurations(config: Any, why: str, tmp_path: Path) -> None:
    if isinstance(config, dict) and why not in ("finite", "alpha_pattern must be") and "alpha_pattern" in config:
        pytest.importorskip("re2")
    with pytest.raises(ModelError, match=why) as caught:
        rc.load_adapter(model(), folder(tmp_path, config))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("tensors", "why"), TENSORS, ids=[str(i) for i in range(len(TENSORS))])
def test_tensors(tensors: Any, why: str, tmp_path: Path) -> None:
    given = folder(tmp_path, {}, tensors)
    if not why:  # a name that ends with the module's
        assert len(adapters_of(rc.load_adapter(model(), given))) == 1
        return
    with pytest.raises((ModelError, UsageError), match=why):
        rc.load_adapter(model(), given)


def test_patterns_that_backtrack_take_no_time(tmp_path: Path) -> None:
    """`re` takes 2^40 steps for this one."""
    pytest.importorskip("re2")
    tensors = {f"{'a' * 40}.{n}": a for n, a in PLAIN.items()}
    start = time.process_time()
    found = rc.load_adapter(model(), folder(tmp_path, {"alpha_pattern": {"(a+)+x": 4}}, tensors))
    assert adapters_of(found)[0].alpha == 8 and time.process_time() - start < 5


MODULES = ("l", "layers.0.q", "model.layers.0.q", "layers.10.q", "xlayers.0.q", "layersx0.q", "q", "kq", "a.b-c.q", "")


@pytest.mark.parametrize(
    "pattern",
    ["q", "layers.0.q", r"layers\.0\.q", "^layers.0.q", "^layers.0.q$", r"layers\.\d+\.q", "layers.(0|10).q", ".*q",
     "l|q", "[kq]q?", "b-c.q", r"b\-c\.q", "..", "$", "", "^"],
)  # fmt: skip
def test_patterns_fit_as_in_peft(pattern: str) -> None:
    """PEFT's rule (tuners_utils): `re.match(rf"(.*\\.)?({key})$", name)`."""
    pytest.importorskip("re2")
    alpha_of = _alphas({"alpha_pattern": {pattern: 2.0}, "lora_alpha": 1}, "f")
    for module in MODULES:
        wanted = re.match(rf"(.*\.)?({pattern})$", module)
        assert alpha_of(module) == (2.0 if wanted else 1.0), (pattern, module)


def described(**changes: Any) -> onnx.ModelProto:
    made = rc.lora(model(), ["l.weight"], r=2)
    for p in made.metadata_props:
        if p.key == "recompute.adapters":
            (told,) = json.loads(p.value)
            told.update(changes)
            p.value = json.dumps([{k: v for k, v in told.items() if v != "no"}])
    return made


@pytest.mark.parametrize("changes", [
    {"factor": "x"}, {"factor": None}, {"factor": float("nan")}, {"factor": 10**400}, {"alpha": True}, {"r": "2"},
    {"r": 0}, {"r": 10**400}, {"r": 2.5}, {"r": 3}, {"dropout": 1}, {"kind": "other"}, {"kind": 1}, {"weight": None},
    {"weight": "none"}, {"weight": ["l.weight"]}, {"module": 5}, {"module": "other"}, {"turned": 1}, {"turned": False},
    {"dora": "no!"}, {"dora": True}, {"sites": 5}, {"sites": [{}]}, {"sites": [5]}, {"sites": None}, {"sites": "no"},
    {"sites": [{"output": 1, "base": "b", "bias": "", "added": []}]}, {"kind": "embedding"}, {"further": 1},
    {"sites": [{"output": "y", "base": "b", "bias": "", "added": "y"}]}, {"weight": "no"},
], ids=str)  # fmt: skip
def test_metadata(changes: dict[str, Any]) -> None:
    with pytest.raises(RecomputeError) as caught:
        rc.merge_adapters(described(**changes))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["", DEEP, "{}", "5", "null", "[5]", "[[]]", '["x"]', "[NaN]", "[{}]"])
def test_metadata_that_is_no_list_of_adapters(text: str) -> None:
    made = described()
    for p in made.metadata_props:
        p.value = text if p.key == "recompute.adapters" else p.value
    with pytest.raises(ModelError, match="adapters does not describe adapters"):
        rc.merge_adapters(made)


@pytest.mark.parametrize(
    ("value", "wanted", "why"),
    [
        ({"a": [1, 2.5]}, {"a": [float]}, ""),
        ({"a": 1}, {"b": int}, "x lacks 'b'"),
        ([], {}, "x must be an object"),
        ({"a": 1, "b": "t"}, {...: int}, "x.b must be a whole number, not 't'"),
        (True, int, "not True"),
        (1, bool, "not 1"),
        (None, (str, None), ""),
        (5, (str, None), "x must be a text or null, not 5"),
        ({"a": True}, ({...: float}, None), "x.a"),
        ([["a"], [5]], [[str]], r"x\[1\]\[0\] must be a text, not 5"),
        (10**400, float, r"not 1000+\.\.\."),
        ([1], ([str], None), r"x\[0\] must be a text"),
        ("t", ([str], {...: str}), "a list or an object with names, not 't'"),
    ],
)
def test_what_json_must_be(value: Any, wanted: Any, why: str) -> None:
    found = unfit(value, wanted, "x")
    assert re.search(why, found) if why else not found
