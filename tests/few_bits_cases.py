"""Models with weights in few bits (com.microsoft's MatMulNBits, GatherBlockQuantized), and the same in floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.numpy_helper import from_array

import recompute as rc
from recompute.ops.linear.nbits import DequantizeNBits

MS = "com.microsoft"


def packed(n: int, k: int, size: int = 32, bits: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    """Codes, scales and zero points of a matrix [n, k] of small numbers."""
    g, blocks = np.random.default_rng(seed), -(-k // size)
    return {
        "codes": g.integers(0, 256, (n, blocks, size * bits // 8)).astype(np.uint8),
        "scales": (g.uniform(0.5, 1.5, (n, blocks)) / (2**bits / 3 * k**0.5)).astype(np.float32),
        "zeros": g.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8),
    }


def whole(parts: dict[str, np.ndarray], k: int, size: int = 32, bits: int = 4) -> np.ndarray:
    """The matrix [n, k] in floats."""
    op = DequantizeNBits(K=k, bits=bits, block_size=size)
    n = len(parts["codes"])
    out = np.empty((n, k), np.float32)
    given = [a.reshape(n, -1) for a in parts.values()]
    types = [rc.language.types.TensorType.of(a) for a in (*given, out)]
    room = [np.empty(t.shape, t.numpy) for t in op.scratch(types[:3], types[3:])]
    op.compute(np, given, [out], room)
    return out


def model(nodes: Sequence[onnx.NodeProto], arrays: dict[str, np.ndarray], x: list, kind: int = 1) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", kind, x)]
    tensors = [from_array(a, name) for name, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name="y")], tensors)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def two_layers(k: int = 64, n: int = 96, *, floats: bool = False, bits: int = 4) -> onnx.ModelProto:
    """Ids to rows of a table, a norm that trains, W2 relu(W1 x + b): in few bits, or the same numbers in floats."""
    names = {"table": (20, k), "up": (n, k), "down": (k, n)}
    parts = {name: packed(*shape, bits=bits, seed=i) for i, (name, shape) in enumerate(names.items())}
    g = np.random.default_rng(9)
    arrays: dict[str, np.ndarray] = {"g": g.uniform(0.5, 1.5, k).astype("f4"), "b": g.standard_normal(n).astype("f4")}

    def linear(name: str, x: str, y: str, bias: str = "") -> list[onnx.NodeProto]:
        if floats:
            product = helper.make_node("MatMul", [x, name], [f"{y}.p" if bias else y])
            return [product, helper.make_node("Add", [f"{y}.p", bias], [y])] if bias else [product]
        ins = [x, *(f"{name}.{part}" for part in parts[name]), *(["", bias] if bias else [])]
        sizes = dict(zip("NK", names[name], strict=True))
        return [helper.make_node("MatMulNBits", ins, [y], domain=MS, bits=bits, block_size=32, **sizes)]

    if floats:
        arrays["table"] = whole(parts["table"], k, bits=bits)
        arrays |= {name: whole(parts[name], names[name][1], bits=bits).T for name in ("up", "down")}
        first = helper.make_node("Gather", ["table", "x"], ["e"])
    else:
        for name, found in parts.items():
            arrays |= {f"{name}.{part}": a for part, a in found.items()}
        arrays["table.codes"] = arrays["table.codes"].reshape(20, -1)
        ins = ["table.codes", "x", "table.scales", "table.zeros"]
        first = helper.make_node("GatherBlockQuantized", ins, ["e"], domain=MS, bits=bits, block_size=32)
    nodes = [
        first, helper.make_node("Mul", ["e", "g"], ["s"]), *linear("up", "s", "h", "b"),
        helper.make_node("Relu", ["h"], ["r"]), *linear("down", "r", "y"),
    ]  # fmt: skip
    return model(nodes, arrays, ["batch", 6], onnx.TensorProto.INT64)


IDS = np.random.default_rng(3).integers(0, 20, (4, 6))


def trained(source: onnx.ModelProto, optimizer: Any, trainable: Any = None, steps: int = 2) -> tuple[list, dict, Any]:
    """Losses, what has trained, and the program."""
    program = rc.load(source, batch=4, trainable=trainable)
    loss = rc.losses.mse(program["y"])
    optimizer.minimize(loss)
    executor = rc.Executor()
    feed = {v.name: IDS if v.name == "x" else np.ones(v.shape, "f4") for v in program.inputs}
    losses = [float(executor.run(program, feed, [loss])[0]) for _ in range(steps)]
    session = executor.session(program, [loss])
    assert session.report.peak == session.measured_peak_bytes
    return losses, {v.name: program.data[v.name] for v in program.block.parameters}, program
