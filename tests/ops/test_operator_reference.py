"""Single operators: values and gradients must be PyTorch's own, in float64 and float32.

tests/data/operators/README.md says how the references were made; nothing here needs PyTorch.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import recompute as rc
from recompute.passes.gradient.autodiff import differentiate

FOLDER = Path(__file__).parents[1] / "data" / "operators"
FILES = ("operators", "vision")
#: of the largest element
TOLERANCE = {"f64": 1e-10, "f32": 1e-5}
#: ONNX's function body has float32 constants, or its type rule has no float64
ONLY_FLOAT32 = {"MeanVarianceNormalization", "QuantizeLinear"}


@functools.cache
def pools(file: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{file}.npz") as arrays:
        return dict(arrays)


CASES = {c["name"]: {"file": f, **c} for f in FILES for c in json.loads(pools(f)["index"].tobytes())["cases"]}


def array(case: dict[str, Any], entry: dict[str, Any], dtype: str) -> np.ndarray:
    """An array of the case's file; floats in the dtype that is judged."""
    kind = {"f64": "values64", "f32": "values32"}[dtype] if entry["dtype"] == "float" else entry["dtype"]
    found = pools(case["file"])[kind][entry["at"] : entry["at"] + int(np.prod(entry["shape"]))].reshape(entry["shape"])
    return found.astype(np.float64) if dtype == "f64" and found.dtype == np.float32 else found


def in_doubles(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float64 in place of float32 (but for Resize's scales, which are always float32)."""
    for v in (*model.graph.input, *model.graph.output):
        if v.type.tensor_type.elem_type == TensorProto.FLOAT:
            v.type.tensor_type.elem_type = TensorProto.DOUBLE
    for t in model.graph.initializer:
        if t.data_type == TensorProto.FLOAT and model.graph.node[0].op_type != "Resize":
            t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float64), t.name))
    return model


def run(case: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Our outputs by name, and our gradients by `d` and the input's name."""
    at, size = case["model"]
    model = onnx.load_from_string(pools(case["file"])["models"][at : at + size].tobytes())
    program = rc.load(in_doubles(model) if dtype == "f64" else model, mode="file", quantization="ste")
    fetch = {n: n for n in case["outputs"]}
    if case["grads"]:
        program.block, pairs = differentiate(program.block, "loss", list(case["grads"]))
        fetch |= {f"d{p.name}": g.name for p, g in pairs}
    feed = {n: array(case, e, dtype) for n, e in case["inputs"].items()}
    with np.errstate(all="ignore"):
        found = rc.Executor().run(program, feed, list(fetch.values()))
    return dict(zip(fetch, found, strict=True))


def check(name: str, found: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    assert found.shape == want.shape and found.dtype == want.dtype, f"{name}: {found.dtype}{found.shape}"
    if want.dtype.kind != "f":
        np.testing.assert_array_equal(found, want, err_msg=name)
    elif want.size:
        largest = np.abs(want[np.isfinite(want)]).max(initial=0.0)
        np.testing.assert_allclose(found, want, rtol=0, atol=tolerance * largest, err_msg=name)


@pytest.mark.parametrize("dtype", ["f64", "f32"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_pytorchs(name: str, dtype: str) -> None:
    case = CASES[name]
    if dtype == "f64" and case["op"] in ONLY_FLOAT32:
        pytest.skip("ONNX has it in float32 only")
    found = run(case, dtype)
    for output, entry in case["outputs"].items():
        check(output, found[output], array(case, entry, dtype), TOLERANCE[dtype])
    for value, entry in case["grads"].items():
        want = array(case, entry, dtype)
        g = found.get(f"d{value}", np.zeros(want.shape, want.dtype))  # no pair: nothing depends on it
        check(f"gradient of {value}", g, want, TOLERANCE[dtype])
