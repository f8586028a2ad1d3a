"""A small classifier with dropout and batch normalisation, and data for it, for the tests of the trainer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import recompute as rc


def model(dropout: float = 0.25, normalised: bool = True) -> onnx.ModelProto:
    """x f32[N, 8] → logits f32[N, 3]."""
    g = np.random.default_rng(5)
    weights = {
        "fc1.weight": g.standard_normal((8, 16)) / 3, "fc1.bias": np.zeros(16),
        "fc2.weight": g.standard_normal((16, 3)) / 4,
        "bn.scale": np.ones(16), "bn.bias": np.zeros(16), "bn.mean": np.zeros(16), "bn.var": np.ones(16),
    }  # fmt: skip
    nodes = [helper.make_node("Gemm", ["x", "fc1.weight", "fc1.bias"], ["h"])]
    last = "h"
    if normalised:
        norm = ["h", "bn.scale", "bn.bias", "bn.mean", "bn.var"]
        nodes.append(helper.make_node("BatchNormalization", norm, ["n"], training_mode=0))
        last = "n"
    nodes.append(helper.make_node("Relu", [last], ["r"]))
    if dropout:
        nodes.append(helper.make_node("Dropout", ["r", "ratio"], ["d"]))
        weights["ratio"] = np.array(dropout)
    nodes.append(helper.make_node("MatMul", ["d" if dropout else "r", "fc2.weight"], ["logits"]))
    used = {n for node in nodes for n in node.input}
    graph = helper.make_graph(
        nodes, "small", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items() if n in used],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def deep(layers: int = 8) -> onnx.ModelProto:
    """x f32[N, 8] → logits f32[N, 3] through layers of Gemm and Tanh, whose outputs take most of the memory."""
    g = np.random.default_rng(6)
    widths = [8] + [16] * (layers - 1) + [3]
    nodes, weights, last = [], {}, "x"
    for i, (rows, columns) in enumerate(pairwise(widths)):
        weights[f"w{i}"] = (g.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)
        out = "logits" if i == layers - 1 else f"h{i}"
        nodes.append(helper.make_node("MatMul", [last, f"w{i}"], [out]))
        if out != "logits":
            last = f"t{i}"
            nodes.append(helper.make_node("Tanh", [out], [last]))
    graph = helper.make_graph(
        nodes, "deep", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def data(count: int = 50, seed: int = 0) -> dict[str, np.ndarray]:
    """Three classes that can be told apart."""
    g = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((3, 8))
    label = g.integers(0, 3, count)
    return {"x": (centres[label] + 0.7 * g.standard_normal((count, 8))).astype(np.float32), "label": label}


def trainer(
    *, batch: int = 16, optimizer: object = None, seed: int = 3, metrics: tuple = (), **options: object
) -> rc.Trainer:
    """A trainer of the classifier, by Adam."""
    program = rc.load(model(), batch=batch, seed=1)
    loss = rc.losses.cross_entropy(program["logits"])
    return rc.Trainer(program, optimizer or rc.Adam(1e-2), loss=loss, seed=seed, metrics=metrics, quiet=True, **options)
