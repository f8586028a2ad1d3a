"""Gradients of ONNX models: ours must be those of ONNX Runtime's gradient graph.

tests/data/onnxruntime_training/README.md says how the references were made; nothing here needs that package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_operator_reference as single
from test_pytorch_reference import CASES, FOLDER, program_of

import recompute as rc

with np.load(Path(__file__).parents[1] / "data" / "onnxruntime_training" / "gradients.npz") as _file:
    POOLS = dict(_file)
INDEX = json.loads(POOLS["index"].tobytes())
SAMPLES = 8


def by_model(section: str) -> dict[str, dict[str, Any]]:
    """Model → name of the value → where its gradient is."""
    found: dict[str, dict[str, Any]] = {}
    for key, place in INDEX[section].items():
        model, value = key.split("/", 1) if section == "networks" else key.rsplit("/", 1)
        found.setdefault(model, {})[value] = place
    return found


OPERATORS, NETWORKS = by_model("operators"), by_model("networks")


#: ONNX Runtime's gradient at a bound is 1, PyTorch's and ours 0 (docs/extremes.md)
OTHERWISE = {"Clip at the limits"}


@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - OTHERWISE))
def test_operators(name: str) -> None:
    found = single.run(single.CASES[name], "f32")
    for value, (at, shape) in OPERATORS[name].items():
        want = POOLS["values"][at : at + int(np.prod(shape))].reshape(shape)
        g = found.get(f"d{value}", np.zeros(shape, np.float32))
        single.check(f"gradient of {value}", g, want, 2e-5)  # each is within 1e-5 of PyTorch's


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    case = next(c for c in CASES if c["file"] == name)
    program, feed, loss = program_of(case, np.load(FOLDER / case["npz"]), mode="file")
    pairs = rc.SGD(learning_rate=0.0).backward(program[loss])
    grads = rc.Executor(schedule=False).run(program, feed, [g for _, g in pairs])
    found = {p.name: g for (p, _), g in zip(pairs, grads, strict=True)}
    samples = {n: POOLS["values"][at : at + SAMPLES + 1] for n, (at, _) in NETWORKS[name].items()}
    largest = max(s[-1] for s in samples.values())
    for value, (_, at) in NETWORKS[name].items():
        g = found[value].astype(np.float64).ravel()
        mine = np.append(g[POOLS["places"][at : at + SAMPLES]], np.linalg.norm(g))
        np.testing.assert_allclose(mine, samples[value], rtol=0, atol=1e-5 * largest, err_msg=value)
