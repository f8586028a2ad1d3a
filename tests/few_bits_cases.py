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


def packed(n: int, k: int, size: int = 32, bits: int | str = 4, seed: int = 0) -> dict[str, np.ndarray]:
    """Codes, scales and zero points of a matrix [n, k] of small numbers; `bits`: also "nf4" and "fp4", flat."""
    g, blocks = np.random.default_rng(seed), -(-k // size)
    if isinstance(bits, str):
        codes = g.integers(0, 256, n * k // 2).astype(np.uint8)
        return {"codes": codes, "scales": (g.uniform(1, 3, n * blocks) / k**0.5).astype(np.float32)}
    return {
        "codes": g.integers(0, 256, (n, blocks, size * bits // 8)).astype(np.uint8),
        "scales": (g.uniform(0.5, 1.5, (n, blocks)) / (2**bits / 3 * k**0.5)).astype(np.float32),
        "zeros": g.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8),
    }


def whole(parts: dict[str, np.ndarray], k: int, size: int = 32, bits: int | str = 4) -> np.ndarray:
    """The matrix [n, k] in floats."""
    how = {"table": bits} if isinstance(bits, str) else {"bits": bits}
    op = DequantizeNBits(K=k, block_size=size, **how)
    n = parts["scales"].size // op.blocks
    out = np.empty((n, k), np.float32)
    given = [*(a.reshape(n, -1) for a in parts.values()), None][:3]
    types = [None if a is None else rc.language.types.TensorType.of(a) for a in (*given, out)]
    room = [np.empty(t.shape, t.numpy) for t in op.scratch(types[:3], types[3:])]
    op.compute(given, [out], room)
    return out


def model(nodes: Sequence[onnx.NodeProto], arrays: dict[str, np.ndarray], x: list, kind: int = 1) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", kind, x)]
    tensors = [from_array(a, name) for name, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name="y")], tensors)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def two_layers(k: int = 64, n: int = 96, *, floats: bool = False, bits: int | str = 4) -> onnx.ModelProto:
    """Ids to rows of a table, a norm that trains, W2 relu(W1 x + b): in few bits, or the same numbers in floats.

    `bits`: also "nf4" and "fp4" (MatMulBnb4), with the table in 4 bits.
    """
    names = {"table": (20, k), "up": (n, k), "down": (k, n)}
    own = {"table": 4} if isinstance(bits, str) else {}
    parts = {t: packed(*shape, bits=own.get(t, bits), seed=i) for i, (t, shape) in enumerate(names.items())}
    g = np.random.default_rng(9)
    arrays: dict[str, np.ndarray] = {"g": g.uniform(0.5, 1.5, k).astype("f4"), "b": g.standard_normal(n).astype("f4")}

    def linear(name: str, x: str, y: str, bias: str = "") -> list[onnx.NodeProto]:
        if floats:
            product = helper.make_node("MatMul", [x, name], [f"{y}.p" if bias else y])
            return [product, helper.make_node("Add", [f"{y}.p", bias], [y])] if bias else [product]
        ins = [x, *(f"{name}.{part}" for part in parts[name]), *(["", bias] if bias else [])]
        sizes = dict(zip("NK", names[name], strict=True))
        if isinstance(bits, str):
            kind, out = int(bits == "nf4"), f"{y}.p" if bias else y
            product = helper.make_node("MatMulBnb4", ins[:3], [out], domain=MS, block_size=32, quant_type=kind, **sizes)
            return [product, helper.make_node("Add", [out, bias], [y])] if bias else [product]
        return [helper.make_node("MatMulNBits", ins, [y], domain=MS, bits=bits, block_size=32, **sizes)]

    if floats:
        arrays["table"] = whole(parts["table"], k, bits=own.get("table", bits))
        arrays |= {name: whole(parts[name], names[name][1], bits=bits).T for name in ("up", "down")}
        first = helper.make_node("Gather", ["table", "x"], ["e"])
    else:
        for name, found in parts.items():
            arrays |= {f"{name}.{part}": a for part, a in found.items()}
        arrays["table.codes"] = arrays["table.codes"].reshape(20, -1)
        ins = ["table.codes", "x", "table.scales", "table.zeros"]
        first = helper.make_node(
            "GatherBlockQuantized", ins, ["e"], domain=MS, bits=own.get("table", bits), block_size=32
        )
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


def generating(layers: int = 2, d: int = 64, heads: int = 4, groups: int = 2, vocab: int = 40) -> onnx.ModelProto:
    """A decoder as ONNX Runtime GenAI has it: a past for each layer, and a mask that gives lengths alone."""
    size, arrays, nodes = d // heads, dict[str, np.ndarray](), list[onnx.NodeProto]()

    def put(op_type: str, ins: list[str], *outs: str, domain: str = MS, **given: Any) -> str:
        nodes.append(helper.make_node(op_type, ins, outs, name=outs[0], domain=domain, **given))
        return outs[0]

    def weight(name: str, n: int, k: int) -> list[str]:
        found = packed(n, k, seed=len(arrays))
        names = [f"{name}.{end}" for end in ("weight_Q4", "weight_scales", "weight_zero_points")]
        arrays.update(zip(names, found.values(), strict=True))
        return names

    def linear(x: str, name: str, n: int, k: int = d) -> str:
        return put("MatMulNBits", [x, *weight(name, n, k)], f"{name}.out", N=n, K=k, bits=4, block_size=32)

    arrays |= {"axes": np.array([1]), "one": np.array([1]), "first": np.array(1), "norm": np.ones(d, "f4")}
    angles = np.outer(np.arange(32), 1e4 ** (-np.arange(size // 2) / (size // 2)))
    arrays |= {"cos_cache": np.cos(angles).astype("f4"), "sin_cache": np.sin(angles).astype("f4")}
    put("ReduceSum", ["attention_mask", "axes"], "sums", domain="")
    put("Cast", [put("Sub", ["sums", "one"], "last", domain="")], "seqlens_k", domain="", to=6)
    put("Shape", ["attention_mask"], "shape", domain="")
    put("Cast", [put("Gather", ["shape", "first"], "length", domain="")], "total", domain="", to=6)
    table = weight("embed_tokens", vocab, d)
    arrays[table[0]] = arrays[table[0]].reshape(vocab, -1)
    ins = [table[0], "input_ids", *table[1:]]
    x = put("GatherBlockQuantized", ins, "embed.out", bits=4, block_size=32)
    y = put("SimplifiedLayerNormalization", [x, "norm"], "norm.0", domain="", epsilon=1e-5)
    for i in range(layers):
        at = f"layers.{i}"
        widths = {"q": d, "k": groups * size, "v": groups * size}
        parts = [linear(y, f"{at}.attn.{p}_proj.MatMul", n) for p, n in widths.items()]
        ends = [f"past_key_values.{i}.{p}" for p in ("key", "value")]
        ins = [*parts, *ends, "seqlens_k", "total", "cos_cache", "sin_cache"]
        outs = [f"{at}.attention", *(f"present.{i}.{p}" for p in ("key", "value"))]
        y = put("GroupQueryAttention", ins, *outs, num_heads=heads, kv_num_heads=groups, do_rotary=1)
        y = linear(y, f"{at}.o_proj.MatMul", d)
        put("SkipSimplifiedLayerNormalization", [x, y, "norm"], f"{at}.norm", "", "", f"{at}.sum", epsilon=1e-5)
        x, y = f"{at}.sum", f"{at}.norm"
    put("Identity", [linear(y, "lm_head.MatMul", vocab)], "logits", domain="")
    made = model(nodes, arrays, [])
    del made.graph.input[:], made.graph.output[:]
    batch, steps, total = "batch_size", "sequence_length", "total_sequence_length"
    for name, dims in (("input_ids", [batch, steps]), ("attention_mask", [batch, total])):
        made.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.INT64, dims))
    made.graph.output.append(helper.make_tensor_value_info("logits", 1, [batch, steps, vocab]))
    for i in range(layers):
        for p in ("key", "value"):
            dims = [batch, groups, "past_sequence_length", size]
            made.graph.input.append(helper.make_tensor_value_info(f"past_key_values.{i}.{p}", 1, dims))
            made.graph.output.append(helper.make_tensor_value_info(f"present.{i}.{p}", 1, [batch, groups, total, size]))
    return made
