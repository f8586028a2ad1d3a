"""Weights in few bits (com.microsoft's MatMulNBits, GatherBlockQuantized) stay packed, and pass gradients on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.numpy_helper import from_array

import recompute as rc
from recompute.ops.linear.nbits import DequantizeNBits, MatMulNBits

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


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_around_trains_as_beside_the_same_numbers_in_floats(bits: int) -> None:
    losses, found, program = trained(two_layers(bits=bits), rc.SGD(0.05))
    theirs, wanted, _ = trained(two_layers(bits=bits, floats=True), rc.SGD(0.05), ["g", "b"])
    assert losses[1] < losses[0] and sorted(found) == ["b", "g"]
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-6)
    listed = {t.name: t for t in program.tensors}
    assert listed["up.codes"].why == "integers of a frozen weight" and not listed["up.scales"].trains


def test_codes_stay_packed_and_the_whole_weight_is_never_there() -> None:
    """Packed, the three take an eighth of floats; at a time a part of one is dequantised."""
    k, n = 768, 6144
    source = two_layers(k, n)
    _, _, program = trained(source, rc.SGD(0.05), steps=1)
    block = rc.Executor().planned(program, [program.loss])
    used = {v.name for v in program.block.buffers}
    stored = sum(program.data[name].nbytes for name in used if name.partition(".")[0] in ("table", "up", "down"))
    floats = 4 * (2 * n * k + 20 * k)
    assert stored < 0.18 * floats and all(program.data[f"{w}.codes"].dtype == np.uint8 for w in ("table", "up", "down"))
    assert [o.op.transB for o in block.operators if isinstance(o.op, MatMulNBits)] == [1, 1, 0, 0]
    values = {v.name: v for o in block.operators for v in (*o.writes(), *o.scratch)}
    assert max(v.nbytes for v in values.values()) <= 4 << 20 < floats / 4


def test_recomputation_keeps_the_bits() -> None:
    plain = trained(two_layers(512, 640), rc.Adam(0.01))
    again = trained(two_layers(512, 640), rc.RecomputeOptimizer(rc.Adam(0.01)).set_checkpoints(["s"]))
    assert any(o.role.name == "RECOMPUTE" for o in again[2].block.operators)
    assert plain[0] == again[0]
    for name, array in plain[1].items():
        assert np.array_equal(array, again[1][name])


def test_what_is_not_supported_is_refused_by_name() -> None:
    parts = packed(8, 32)
    for more, given, said in (
        (["order"], {}, "g_idx"),
        ([], {"weight_prepacked": 1}, "weight_prepacked"),
        ([], {"block_size": 24}, "block_size=24"),
        ([], {"K": 64}, "x must be floats with 64 along the last axis"),
    ):
        options = {"N": 8, "K": 32, "block_size": 32, "bits": 4, **given}
        node = helper.make_node("MatMulNBits", ["x", *parts, *more], ["y"], domain=MS, **options)
        source = model([node], {**parts, "order": np.arange(32, dtype=np.int32)}, [3, 32])
        with pytest.raises(rc.ModelError, match=said):
            rc.load(source)
    node = helper.make_node("MatMulNBits", ["x", *parts], ["y"], domain=MS, N=8, K=32, block_size=32)
    with pytest.raises(rc.UsageError, match="scales"):
        rc.load(model([node], parts, [3, 32]), trainable=["scales"])
