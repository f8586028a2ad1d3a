"""Small transformers whose length is open, and texts of several lengths, for the tests of buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import recompute as rc


class _Net:
    """Collects the nodes and initializers of a graph."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self._draw = np.random.default_rng(0)

    def weight(self, name: str, *shape: int) -> str:
        array = self._draw.standard_normal(shape) / shape[0] ** 0.5 if len(shape) > 1 else np.ones(shape)
        return self.constant(name, array.astype(np.float32))

    def constant(self, name: str, array: Any) -> str:
        self.tensors.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(self, kind: str, inputs: list[str], out: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [out], **attributes))
        return out


def text_model(
    kind: str = "gpt2", *, layers: int = 1, hidden: int = 8, heads: int = 2, vocab: int = 32, positions: int = 512,
    dropout: float = 0.0,
) -> onnx.ModelProto:  # fmt: skip
    """input_ids i64[N, sequence] → logits f32[N, sequence, vocab]; "bert" has an attention_mask, "gpt2" is causal."""
    net = _Net()
    words = net.add("Gather", [net.weight("wte", vocab, hidden), "input_ids"], "words")
    shape = net.add("Shape", ["input_ids"], "shape")
    length = net.add("Gather", [shape, net.constant("one", np.int64(1))], "length")
    numbers = net.add("Range", [net.constant("zero", np.int64(0)), length, "one"], "numbers")
    places = net.add("Gather", [net.weight("wpe", positions, hidden), numbers], "places")
    x = net.add("Add", [words, places], "x")
    if kind == "gpt2":
        size = net.add("Unsqueeze", [length, net.constant("first", np.array([0], np.int64))], "size")
        square = net.add("Concat", [size, size], "square", axis=0)
        low = helper.make_tensor("v", TensorProto.FLOAT, [1], [-1e9])
        ones = net.add("ConstantOfShape", [square], "ones", value=low)
        mask = net.add("Trilu", [ones, "one"], "mask", upper=1)
    else:
        wide = net.add("Unsqueeze", ["attention_mask", net.constant("axes", np.array([1, 2], np.int64))], "wide")
        kept = net.add("Cast", [wide], "kept", to=TensorProto.FLOAT)
        off = net.add("Sub", [net.constant("unit", np.float32(1)), kept], "off")
        mask = net.add("Mul", [off, net.constant("low", np.float32(-1e9))], "mask")
    split = net.constant("split", np.array([0, 0, heads, hidden // heads], np.int64))
    joined = net.constant("joined", np.array([0, 0, hidden], np.int64))
    for i in range(layers):
        parts = []
        for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            y = net.add("MatMul", [x, net.weight(f"{i}.{name}", hidden, hidden)], f"{i}.{name}.all")
            y = net.add("Reshape", [y, split], f"{i}.{name}.heads")
            parts.append(net.add("Transpose", [y], f"{i}.{name}.out", perm=perm))
        scores = net.add("MatMul", parts[:2], f"{i}.scores")
        scores = net.add("Add", [scores, mask], f"{i}.masked")
        seen = net.add("MatMul", [net.add("Softmax", [scores], f"{i}.soft", axis=-1), parts[2]], f"{i}.seen")
        seen = net.add("Reshape", [net.add("Transpose", [seen], f"{i}.back", perm=[0, 2, 1, 3]), joined], f"{i}.join")
        if dropout:
            ratio = net.constant(f"{i}.ratio", np.float32(dropout))
            seen = net.add("Dropout", [seen, ratio], f"{i}.dropped")
        y = net.add("MatMul", [seen, net.weight(f"{i}.o", hidden, hidden)], f"{i}.proj")
        x = net.add("Add", [x, y], f"{i}.sum")
        y = net.add("LayerNormalization", [x, net.weight(f"{i}.norm", hidden)], f"{i}.normed", axis=-1)
        y = net.add("MatMul", [y, net.weight(f"{i}.up", hidden, 4 * hidden)], f"{i}.wide")
        y = net.add("Gelu", [y], f"{i}.gelu")
        y = net.add("MatMul", [y, net.weight(f"{i}.down", 4 * hidden, hidden)], f"{i}.mlp")
        x = net.add("Add", [x, y], f"{i}.out")
    net.add("MatMul", [x, net.weight("head", hidden, vocab)], "logits")
    inputs = ["input_ids", *(["attention_mask"] if kind == "bert" else [])]
    graph = helper.make_graph(
        net.nodes, kind,
        [helper.make_tensor_value_info(n, TensorProto.INT64, ["N", "sequence"]) for n in inputs],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", "sequence", vocab])], net.tensors,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def texts(count: int = 40, *, shortest: int = 2, longest: int = 16, vocab: int = 32, seed: int = 0) -> dict[str, list]:
    """Words and labels of several lengths."""
    g = np.random.default_rng(seed)
    lengths = g.integers(shortest, longest + 1, count)
    return {n: [g.integers(0, vocab, size).tolist() for size in lengths] for n in ("input_ids", "label")}


def trainer(
    kind: str = "gpt2", *, batch: int = 4, length: int = 16, buckets: Any = (4, 8, 16), optimizer: Any = None,
    model: dict[str, Any] | None = None, **options: Any,
) -> rc.Trainer:  # fmt: skip
    """A trainer of such a model, by Adam."""
    program = rc.load(text_model(kind, **(model or {})), batch=batch, dims={"sequence": length})
    loss = rc.losses.cross_entropy(program["logits"])
    options = {"seed": 3, "quiet": True, **options}
    return rc.Trainer(program, optimizer or rc.Adam(1e-2), loss=loss, buckets={"sequence": buckets}, **options)
