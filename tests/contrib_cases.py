"""Small applications of com.microsoft's operators, for tests/ops/test_contrib.py and tests/data/make_contrib.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows int4 and uint4 by it
import numpy as np
import onnx
from onnx import helper
from onnx.numpy_helper import from_array

_COUNT = itertools.count(1)


def f(*shape: int) -> np.ndarray:
    """Numbers between -1 and 1, others each time, the same on every machine."""
    n = int(np.prod(shape))
    return np.sin(np.arange(n) * 1.7 + next(_COUNT) * 0.37).astype(np.float32).reshape(shape)


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def case(
    op: str,
    inputs: list,
    outputs: int = 1,
    fed: tuple = (0,),
    domain: str = "com.microsoft",
    opset: int = 18,
    **given: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node, and its feed; inputs that are not `fed` are initializers."""
    names = ["" if a is None else f"i{i}" for i, a in enumerate(inputs)]
    arrays = {n: np.asarray(a) for n, a in zip(names, inputs, strict=True) if n}
    feed = {n: a for n, a in arrays.items() if int(n[1:]) in fed}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feed.items()
    ]
    made = helper.make_node(op, names, [f"o{i}" for i in range(outputs)], domain=domain, **given)
    graph = helper.make_graph(
        [made], "g", infos, [onnx.ValueInfoProto(name=o) for o in made.output],
        [from_array(a, n) for n, a in arrays.items() if n not in feed],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), feed


def cases() -> dict[str, tuple[onnx.ModelProto, dict[str, np.ndarray]]]:
    """Every case by name.  ONNX Runtime's CPU provider runs all of them."""
    global _COUNT
    _COUNT = itertools.count(1)
    found = dict(_simple())
    found.update(_attention())
    found.update(_rotary())
    found.update(_quantized())
    found.update(_few_bits())
    found.update(_bnb4())
    return found


def _simple() -> Iterator[tuple[str, Any]]:
    x, b = f(3, 4), f(4)
    for op in ("Gelu", "FastGelu", "QuickGelu"):
        yield op, case(op, [x])
    yield "FastGelu bias", case("FastGelu", [x, b])
    yield "BiasGelu", case("BiasGelu", [x, b])
    for ta, tb, ba, bb in itertools.product((0, 1), repeat=4):
        sides = []
        for t, batch, shape in ((ta, ba, (3, 4)), (tb, bb, (4, 5))):
            shape = shape[::-1] if t else shape
            sides.append(f(shape[0], 2, shape[1]) if batch else f(2, *shape))
        given = {"transA": ta, "transB": tb, "transBatchA": ba, "transBatchB": bb}
        yield f"FusedMatMul {ta}{tb}{ba}{bb}", case("FusedMatMul", sides, alpha=0.5, **given)
    yield "TransposeMatMul", case("TransposeMatMul", [f(4, 3), f(4, 5)], transA=1)
    yield "FusedGemm", case("FusedGemm", [x, f(5, 4), f(5)], transB=1, alpha=0.5, beta=2.0, activation="LeakyRelu",
                            activation_alpha=0.3)  # fmt: skip
    yield "CDist", case("CDist", [x, f(5, 4)], metric="euclidean")
    x, g = f(2, 3, 4), (f(4), f(4), f(4))
    yield "LayerNormalization of opset 13", case("LayerNormalization", [x, *g[:2]], 3, domain="", opset=13)
    yield "SimplifiedLayerNormalization", case("SimplifiedLayerNormalization", [x, g[0]], 2, domain="", axis=-1)
    yield "SkipLayerNormalization", case("SkipLayerNormalization", [x, f(2, 3, 4), *g], 4, (0, 1))
    yield "SkipLayerNormalization plain", case("SkipLayerNormalization", [x, f(3, 4), g[0]], 1, (0, 1), epsilon=1e-3)
    yield "SkipSimplifiedLayerNormalization", case("SkipSimplifiedLayerNormalization", [x, x + 1, *g[:2]], 1, (0, 1))
    ids, kinds = i32([1, 2, 3], [4, 0, 2]), i32([0, 0, 1], [1, 1, 0])
    tables, mask = (f(6, 4), f(8, 4), f(2, 4)), i32([1, 1, 0], [1, 1, 1])
    embed = "EmbedLayerNormalization"
    yield embed, case(embed, [ids, kinds, *tables, *g[:2], mask], 3, (0, 1, 7))
    yield embed + " plain", case(embed, [ids, None, *tables[:2], None, *g[:2]], 2)
    yield embed + " at", case(embed, [ids, kinds, *tables, *g[:2], None, i32([2, 1, 0], [3, 4, 5])], 2, (0, 1, 8))
    image, kernel = f(1, 2, 5, 5), f(3, 2, 3, 3)
    yield "FusedConv", case("FusedConv", [image, kernel, f(3), f(1, 3, 5, 5)], 1, (0, 3), pads=[1, 1, 1, 1],
                            activation="Relu")  # fmt: skip
    yield "FusedConv leaky", case("FusedConv", [image, kernel], activation="LeakyRelu", activation_params=[0.1])
    yield "FusedConv clip", case("FusedConv", [image, kernel], activation="Clip", activation_params=[-0.5, 0.5])
    pads = "ConvTransposeWithDynamicPads"
    yield pads, case(pads, [image, f(2, 3, 3, 3), np.array([1, 1, 1, 1])], strides=[2, 2])
    yield "Trilu", case("Trilu", [f(4, 4), np.array(1)], upper=0)
    yield "ExpandDims", case("ExpandDims", [f(4, 4), i32(1)[0]])
    for kind in ("relu", "gelu", "silu", "identity"):
        experts = [f(6, 8), f(6, 4), f(4, 16, 8), f(4, 16), f(4, 8, 16), f(4, 8)]
        yield f"MoE {kind}", case("MoE", experts, 1, (0, 1), k=2, activation_type=kind, normalize_routing_weights=1)
    for bits, k in itertools.product((4, 8), (32, 40)):
        blocks = -(-k // 16)
        packed = (np.arange(6 * blocks * 2 * bits) * 37 % 256).astype(np.uint8).reshape(6, blocks, -1)
        zeros = (np.arange(6 * -(-blocks * bits // 8)) * 29 % 256).astype(np.uint8)
        inputs = [f(3, k), packed, f(6 * blocks), zeros, None, f(6)]
        yield f"MatMulNBits {bits} {k}", case("MatMulNBits", inputs, N=6, K=k, bits=bits, block_size=16)


def _attention() -> Iterator[tuple[str, Any]]:
    b, s, d, n = 2, 4, 12, 3
    raw = i32([1, 1, 0, 1], [1, 1, 1, 0])
    for u, t in ((0, 5), (1, s)):  # where there are more keys than queries, ONNX Runtime lets the last query see all
        own = [f(b, s, d), f(d, 3 * d), f(3 * d)]
        options = {"num_heads": n, "unidirectional": u}
        yield f"Attention {u}", case("Attention", own, **options)
        yield f"Attention {u} lengths", case("Attention", [*own, i32(3, 4)], 1, (0, 3), **options)
        yield f"Attention {u} ends", case("Attention", [*own, i32(3, 4, 1, 0)], **options)
        yield f"Attention {u} mask", case("Attention", [*own, raw], 1, (0, 3), **options)
        yield f"Attention {u} nothing", case("Attention", [*own, raw * i32([0], [1])], 1, (0, 3), **options)
        yield f"Attention {u} square", case("Attention", [*own, np.tril(np.ones((b, s, s), np.int32))], **options)
        yield f"Attention {u} past", case("Attention", [*own, None, f(2, b, n, 3, 4)], 2, (0, 4), **options)
        yield (
            f"Attention {u} bias",
            case("Attention", [*own, None, None, f(1, n, s, s)], 1, (0, 5), scale=0.3, **options),
        )
        three = [f(b, s, d), f(b, t, d), f(b, t, d)]
        at, m = (0, 1, 2), "MultiHeadAttention"
        yield f"{m} {u}", case(m, three, 1, at, **options)
        yield f"{m} {u} bias", case(m, [*three, f(3 * d)], 1, at, **options)
        yield f"{m} {u} mask", case(m, [*three, None, i32([1, 1, 1, 0, 0][:t], [1, 1, 1, 1, 0][:t])], 1, at, **options)
        yield f"{m} {u} lengths", case(m, [*three, None, i32(3, 2), f(1, 1, s, t)], 1, (*at, 5), **options)
        past = [three[0], f(b, s, d), f(b, s, d), None, None, None, f(b, n, 3, 4), f(b, n, 3, 4)]
        yield f"{m} {u} past", case(m, past, 3, at, **options)
        yield f"{m} {u} cross", case(m, [three[0], f(b, n, t, 4), f(b, n, t, 4), f(3 * d)], 1, at, **options)
    yield "Attention sizes", case("Attention", [f(b, s, d), f(d, 30), f(30)], num_heads=n, qkv_hidden_sizes=[12, 12, 6])
    yield f"{m} sizes", case(m, [f(b, s, d), f(b, t, d), f(b, t, 6), f(30)], 1, at, num_heads=n)


def _rotary() -> Iterator[tuple[str, Any]]:
    b, s, n = 2, 4, 3
    caches, at = (f(16, 4), f(16, 4)), np.array([[0, 1, 2, 3], [5, 6, 7, 8]])
    for turn in (0, 1):
        r = "RotaryEmbedding"
        yield f"{r} {turn} heads", case(r, [f(b, n, s, 8), at, *caches], 1, (0, 1), interleaved=turn)
        yield f"{r} {turn}", case(r, [f(b, s, 24), at, *caches], 1, (0, 1), interleaved=turn)
        yield f"{r} {turn} offset", case(r, [f(b, s, 24), np.array([3]), *caches], interleaved=turn)
        yield f"{r} {turn} part", case(r, [f(b, s, 36), at, *caches], 1, (0, 1), interleaved=turn, num_heads=3,
                                       rotary_embedding_dim=8)  # fmt: skip
    ends, total = i32(s - 1, s - 1), i32(s)[0]
    caches = f(16, 8), f(16, 8)
    three = [f(b, s, 64), f(b, s, 32), f(b, s, 32), None, None, ends, total]
    for name, more, given in (
        ("", [], {}),
        ("rotary", caches, {"do_rotary": 1}),
        ("rotary at", [*caches, at[[0, 0]]], {"do_rotary": 1, "rotary_interleaved": 1}),
        ("bias", [None, None, None, f(1, 4, s, s)], {"scale": 0.4}),
        ("window", [], {"local_window_size": 2}),
        ("cap", [], {"softcap": 1.5}),
        ("sink", [None, None, None, None, f(4)], {}),
        ("smooth", [], {"smooth_softmax": 1}),
    ):
        g = "GroupQueryAttention"
        yield f"{g} {name}", case(g, [*three, *more], 3, (0, 1, 2), num_heads=4, kv_num_heads=2, **given)
    yield f"{g} packed", case(g, [f(b, s, 128), None, None, None, None, ends, total], 3, num_heads=4, kv_num_heads=2)


def _quantized() -> Iterator[tuple[str, Any]]:
    def q(*shape: int, kind: str = "u1") -> np.ndarray:
        return (np.arange(np.prod(shape)) * 37 + next(_COUNT) * 11).astype("i8").astype(kind).reshape(shape)

    s, z, small, zero = np.float32(0.02), np.uint8(120), np.float32(0.005), np.uint8(0)
    for op in ("QLinearAdd", "QLinearMul"):
        yield op, case(op, [q(3, 4), s, z, q(4), s * 2, z, s * 3, z], 1, (0, 3))
        signed = [q(3, 4, kind="i1"), s, np.int8(3), q(4, kind="i1"), s * 2, np.int8(-3), s * 3, np.int8(9)]
        yield f"{op} signed", case(op, signed, 1, (0, 3))
    yield "QLinearSigmoid", case("QLinearSigmoid", [q(3, 4), s, z, small, zero])
    yield "QLinearLeakyRelu", case("QLinearLeakyRelu", [q(3, 4), s, z, s, z], alpha=0.1)
    pool = "QLinearGlobalAveragePool"
    yield pool, case(pool, [q(1, 3, 4, 4), s, z, small * 3, z])
    yield f"{pool} last", case(pool, [q(1, 4, 4, 3), s, z, small * 3, z], channels_last=1)
    yield "QLinearConcat", case("QLinearConcat", [s, z, q(2, 3), s, z, q(2, 2), s * 2, z], 1, (2, 5), axis=1)
    bias = np.arange(5, dtype=np.int32) * 100 - 200
    yield "QGemm", case("QGemm", [q(3, 4), s, z, q(4, 5), s, z, bias, s * 5, z])
    yield "QGemm real", case("QGemm", [q(3, 4), s, z, q(4, 5), s, z, bias])
    columns = np.linspace(0.01, 0.03, 5, dtype=np.float32)
    yield "MatMulIntegerToFloat", case("MatMulIntegerToFloat", [q(3, 4), q(4, 5), s, columns, z, q(5), f(5)])
    yield "DynamicQuantizeMatMul", case("DynamicQuantizeMatMul", [f(3, 4), q(4, 5), s, z, f(5)])
    yield "QuantizeLinear", case("QuantizeLinear", [f(3, 4), small, z])
    yield "DequantizeLinear", case("DequantizeLinear", [q(3, 4), s, z])
    given = [q(2, 4, 12), q(12, 36), f(36), s, small, i32([1, 1, 0, 1], [1, 1, 1, 0]), z, z]
    yield "QAttention", case("QAttention", given, num_heads=3)
    gather, ids, scales = "GatherBlockQuantized", np.array([[1, 4], [0, 3]]), f(5, 3)
    for name, table, zeros in (("", q(5, 24), None), (" zeros", q(5, 24), q(5, 2)), (" 8", q(5, 48), q(5, 3))):
        given = {"bits": 8 if name == " 8" else 4, "block_size": 16, "quantize_axis": 1}
        yield gather + name, case(gather, [table, ids, scales, zeros], 1, (1,), gather_axis=0, **given)


def _few_bits() -> Iterator[tuple[str, Any]]:
    """Other bits, blocks, zero points and shapes of weights in few bits than those above."""

    def codes(*shape: int, most: int = 256) -> np.ndarray:
        return ((np.arange(np.prod(shape)) * 53 + next(_COUNT) * 17) % most).astype(np.uint8).reshape(shape)

    for bits, k, size, zeros in (
        (2, 40, 16, "packed"),
        (4, 100, 64, ""),
        (4, 40, 16, "floats"),
        (4, 256, 256, "packed"),
        (8, 130, 128, "packed"),
    ):
        blocks = -(-k // size)
        points = {"": None, "packed": codes(6, -(-blocks * bits // 8)), "floats": f(6, blocks) + 5}[zeros]
        inputs = [f(2, 3, k), codes(6, blocks, size * bits // 8), f(6, blocks), points]
        sizes = {"N": 6, "K": k, "bits": bits, "block_size": size}
        yield f"MatMulNBits {bits} {k} {size} {zeros}", case("MatMulNBits", inputs, **sizes)
    for name, scales in (("", (f(2) / 400, f(2) / 400)), (" by column", (f(2, 12) / 400, f(2, 12) / 400))):
        zeros = [np.full(s.shape, 124 + i, np.uint8) for i, s in enumerate(scales)]
        state, weights = f(2, 2, 3), (codes(2, 5, 12), codes(2, 3, 12))
        given = [f(4, 2, 5), *weights, f(2, 24), i32(4, 3), state, f(2, 2, 3), None]
        given += [scales[0], zeros[0], scales[1], zeros[1]]
        lstm = "DynamicQuantizeLSTM"
        yield lstm + name, case(lstm, given, 3, (0, 4), hidden_size=3, direction="bidirectional")
    op, ids, scales = "GatherBlockQuantized", np.array([[1, 4], [0, 3]]), f(5, 3)
    options = {"bits": 4, "block_size": 16, "quantize_axis": 1}
    for kind in ("int4", "uint4"):
        low = -8 if kind == "int4" else 0
        for points in (False, True):
            table = (codes(5, 48, most=16).astype(np.int8) + low).astype(kind)
            zeros = (codes(5, 3, most=16).astype(np.int8) + low).astype(kind) if points else None
            yield f"{op} {kind}{' zeros' * points}", case(op, [table, ids, scales, zeros], 1, (1,), opset=21, **options)
    table = codes(5, 24, most=16).astype("uint4")
    options["quantize_axis"] = 0
    yield f"{op} other axis", case(op, [table.T, ids % 2, f(2, 5)], 1, (1,), opset=21, **options)


def _bnb4() -> Iterator[tuple[str, Any]]:
    """bitsandbytes' floats of 4 bits: both tables, every code."""
    for kind, n, k, size in ((0, 6, 64, 16), (1, 6, 64, 32), (1, 5, 128, 128)):
        codes = ((np.arange(n * k // 2) * 53 + next(_COUNT) * 17) % 256).astype(np.uint8)
        sizes = {"N": n, "K": k, "block_size": size, "quant_type": kind}
        yield f"MatMulBnb4 {kind} {size}", case("MatMulBnb4", [f(2, 3, k), codes, abs(f(n * k // size))], **sizes)
