"""A small encoder-decoder as T5 has it, and an LSTM, as files: what `onnxruntime.quantization` makes of them."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from recompute.importer.origin import detached

WIDTH, HEADS, INNER, WORDS, SOURCE, TARGET, BUCKETS = 16, 2, 24, 19, 6, 5, 8


class T5:
    """Writes the network: RMS norms, relative positions in the first layers, a gated GELU, one shared table."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: dict[str, np.ndarray] = {}
        self._draw = np.random.default_rng(seed)

    def node(self, kind: str, ins: str, y: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, ins.split(), [y], name=f"{y}_node", **attributes))
        return y

    def number(self, name: str, value: Any, kind: Any = np.float32) -> str:
        self.tensors[name] = np.asarray(value, kind)
        return name

    def weight(self, name: str, *shape: int) -> str:
        self.tensors[name] = (self._draw.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        return name

    def norm(self, x: str, y: str) -> str:
        """x / √(mean x² + ε) · scale."""
        self.node("Pow", f"{x} {self.number('two', 2)}", f"{y}.square")
        self.node("ReduceMean", f"{y}.square", f"{y}.mean", axes=[-1], keepdims=1)
        self.node("Add", f"{y}.mean {self.number('epsilon', 1e-6)}", f"{y}.variance")
        self.node("Div", f"{x} {self.node('Sqrt', f'{y}.variance', f'{y}.root')}", f"{y}.normal")
        self.tensors[f"{y}.weight"] = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)
        return self.node("Mul", f"{y}.normal {y}.weight", y)

    def linear(self, x: str, name: str, *shape: int) -> str:
        return self.node("MatMul", f"{x} {self.weight(f'{name}.weight', *shape)}", name)

    def heads(self, x: str, size: int) -> str:
        shape = self.number(f"shape{size}", [0, size, HEADS, WIDTH // HEADS], np.int64)
        return self.node(
            "Transpose", self.node("Reshape", f"{x} {shape}", f"{x}.split"), f"{x}.heads", perm=[0, 2, 1, 3]
        )

    def attention(self, name: str, x: str, memory: str, sizes: tuple[int, int], bias: str) -> str:
        """Without a scale, as T5's; `bias` [1, heads, rows, columns] or nothing."""
        rows, columns = sizes
        q = self.heads(self.linear(x, f"{name}.q", WIDTH, WIDTH), rows)
        k = self.heads(self.linear(memory, f"{name}.k", WIDTH, WIDTH), columns)
        v = self.heads(self.linear(memory, f"{name}.v", WIDTH, WIDTH), columns)
        s = self.node("MatMul", f"{q} {self.node('Transpose', k, f'{k}.t', perm=[0, 1, 3, 2])}", f"{name}.scores")
        s = self.node("Add", f"{s} {bias}", f"{name}.biased") if bias else s
        o = self.node("MatMul", f"{self.node('Softmax', s, f'{name}.p', axis=-1)} {v}", f"{name}.mixed")
        o = self.node("Transpose", o, f"{name}.turned", perm=[0, 2, 1, 3])
        o = self.node("Reshape", f"{o} {self.number(f'joined{rows}', [0, rows, WIDTH], np.int64)}", f"{name}.joined")
        return self.linear(o, f"{name}.o", WIDTH, WIDTH)

    def positions(self, name: str, size: int, *, causal: bool) -> str:
        """Biases of relative positions, by buckets; future ones are masked in the decoder."""
        apart = np.arange(size)[None] - np.arange(size)[:, None]
        self.tensors[f"{name}.buckets"] = np.clip(apart + BUCKETS // 2, 0, BUCKETS - 1)
        self.node("Gather", f"{self.weight(f'{name}.weight', BUCKETS, HEADS)} {name}.buckets", f"{name}.values", axis=0)
        y = self.node("Unsqueeze", f"{self.node('Transpose', f'{name}.values', f'{name}.t', perm=[2, 0, 1])} "
                      f"{self.number('first', [0], np.int64)}", f"{name}.bias")  # fmt: skip
        if not causal:
            return y
        return self.node("Add", f"{y} {self.number(f'{name}.mask', np.where(apart > 0, -1e9, 0))}", f"{name}.masked")

    def feed_forward(self, x: str, name: str) -> str:
        gate = self.linear(x, f"{name}.wi_0", WIDTH, INNER)
        half = self.node("Mul", f"{gate} {self.number('root', 0.70710678)}", f"{name}.half")
        erf = self.node("Add", f"{self.node('Erf', half, f'{name}.erf')} {self.number('one', 1)}", f"{name}.more")
        gelu = self.node(
            "Mul", f"{self.node('Mul', f'{gate} {erf}', f'{name}.both')} {self.number('h', 0.5)}", f"{name}.act"
        )
        both = self.node("Mul", f"{gelu} {self.linear(x, f'{name}.wi_1', WIDTH, INNER)}", f"{name}.gated")
        return self.linear(both, f"{name}.wo", INNER, WIDTH)

    def layers(self, x: str, name: str, size: int, memory: str) -> str:
        """One block of the encoder, or of the decoder (`memory`: what it reads of the encoder)."""
        bias = self.positions(f"{name}.relative", size, causal=bool(memory))
        normal = self.norm(x, f"{name}.ln0")
        x = self.node("Add", f"{x} {self.attention(f'{name}.self', normal, normal, (size, size), bias)}", f"{name}.r0")
        if memory:
            y = self.attention(f"{name}.cross", self.norm(x, f"{name}.ln1"), memory, (size, SOURCE), "")
            x = self.node("Add", f"{x} {y}", f"{name}.r1")
        y = self.feed_forward(self.norm(x, f"{name}.ln2"), f"{name}.ff")
        return self.norm(self.node("Add", f"{x} {y}", f"{name}.r2"), f"{name}.final")

    def model(self) -> onnx.ModelProto:
        """ids [N, 6], decoder_ids [N, 5] → logits [N, 5, 19]."""
        self.weight("shared.weight", WORDS, WIDTH)
        memory = self.layers(self.node("Gather", "shared.weight ids", "embedded"), "encoder", SOURCE, "")
        y = self.layers(self.node("Gather", "shared.weight decoder_ids", "decoder_embedded"), "decoder", TARGET, memory)
        y = self.node("Mul", f"{y} {self.number('factor', WIDTH**-0.5)}", "scaled")
        turned = self.node("Transpose", "shared.weight", "head", perm=[1, 0])
        self.node("MatMul", f"{y} {turned}", "logits")
        inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["N", s])
                  for n, s in (("ids", SOURCE), ("decoder_ids", TARGET))]  # fmt: skip
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", TARGET, WORDS])]
        return _file(self.nodes, inputs, outputs, self.tensors)


def _file(nodes: Any, inputs: Any, outputs: Any, tensors: dict[str, np.ndarray]) -> onnx.ModelProto:
    held = [numpy_helper.from_array(a, n) for n, a in tensors.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def lstm() -> onnx.ModelProto:
    """x [N, 5, 6] → two directions of 8, a product: [N, 4]."""
    g = np.random.default_rng(0)
    shapes = {"W": (2, 32, 6), "R": (2, 32, 8), "B": (2, 64), "norm": (6,), "head": (16, 4)}
    tensors = {n: (g.standard_normal(s) * 0.4).astype(np.float32) for n, s in shapes.items()}
    tensors["shape"] = np.array([-1, 16])
    make = helper.make_node
    nodes = [
        make("Mul", ["x", "norm"], ["m"], name="m_node"),
        make("Transpose", ["m"], ["n"], name="n_node", perm=[1, 0, 2]),
        make("LSTM", ["n", "W", "R", "B"], ["", "Yh"], name="lstm", hidden_size=8, direction="bidirectional"),
        make("Transpose", ["Yh"], ["t"], name="t_node", perm=[1, 0, 2]),
        make("Reshape", ["t", "shape"], ["r"], name="r_node"),
        make("MatMul", ["r", "head"], ["y"], name="y_node"),
    ]  # fmt: skip
    value = helper.make_tensor_value_info
    return _file(nodes, [value("x", 1, ["N", 5, 6])], [value("y", 1, ["N", 4])], tensors)


def quantised(model: onnx.ModelProto, form: str, feeds: list[dict[str, np.ndarray]], **options: Any) -> onnx.ModelProto:
    """What onnxruntime's tool makes of a model: `form` "dynamic" or "static" (QDQ, with ranges of the feeds)."""
    from onnxruntime import quantization as q

    class Feeds(q.CalibrationDataReader):
        def __init__(self) -> None:
            self._left: Iterator[dict[str, np.ndarray]] = iter(feeds)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self._left, None)

    logging.disable(logging.WARNING)
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = str(Path(folder) / "made.onnx")
            if form == "dynamic":
                q.quantize_dynamic(onnx.ModelProto.FromString(model.SerializeToString()), made, **options)
            else:
                own = onnx.ModelProto.FromString(model.SerializeToString())  # the tool changes it
                q.quantize_static(own, made, Feeds(), quant_format=q.QuantFormat.QDQ, **options)
            return onnx.load(made)
    finally:
        logging.disable(logging.NOTSET)


def _passed_by(x: str, rounded: str, y: str) -> list[onnx.NodeProto]:
    """y = x + detached(rounded - x): the rounded value, with the gradient of x."""
    make = helper.make_node
    apart = make("Identity", [f"{y}/less"], [f"{y}/apart"])
    detached(apart)
    return [make("Sub", [rounded, x], [f"{y}/less"]), apart, make("Add", [x, f"{y}/apart"], [y])]


def straight_through(model: onnx.ModelProto, integers: onnx.ModelProto) -> onnx.ModelProto:
    """The twin, where products of quantised weights read x rounded by DynamicQuantizeLinear, with x's gradient."""
    held = {t.name for t in integers.graph.initializer}
    made, make, done = twin(model, integers), helper.make_node, set[str]()
    nodes = list(made.graph.node)
    del made.graph.node[:]
    for node in nodes:
        x = node.input[0]
        if node.op_type == "MatMul" and f"{node.input[1]}_quantized" in held:
            if x not in done:
                done.add(x)
                made.graph.node.append(make("DynamicQuantizeLinear", [x], [f"{x}/q", f"{x}/s", f"{x}/z"]))
                made.graph.node.append(make("DequantizeLinear", [f"{x}/q", f"{x}/s", f"{x}/z"], [f"{x}/r"]))
                made.graph.node.extend(_passed_by(x, f"{x}/r", f"{x}/rounded"))
            node.input[0] = f"{x}/rounded"
        made.graph.node.append(node)
    return made


def pairs_passed_by(integers: onnx.ModelProto) -> onnx.ModelProto:
    """A file of QuantizeLinear and DequantizeLinear, in which each pair has the gradient of what it rounds, 0 where it
    cuts off: there it moves x by more than half a scale."""
    made = onnx.ModelProto.FromString(integers.SerializeToString())
    source = {n.output[0]: n.input[0] for n in made.graph.node if n.op_type == "QuantizeLinear"}
    nodes = list(made.graph.node)
    del made.graph.node[:]
    for node in nodes:
        made.graph.node.append(node)
        if node.op_type == "DequantizeLinear" and node.input[0] in source:
            y, x, scale = node.output[0], source[node.input[0]], node.input[1]
            made.graph.node[-1].output[0] = f"{y}/r"
            for kind, ins, out, more in (
                ("Sub", [f"{y}/r", x], "moved", {}), ("Abs", [f"{y}/moved"], "far", {}),
                ("Add", [f"{y}/far", f"{y}/far"], "twice", {}), ("Mul", [scale, "almost_one"], "limit", {}),
                ("Less", [f"{y}/twice", f"{y}/limit"], "inside", {}), ("Cast", [f"{y}/inside"], "kept", {"to": 1}),
                ("Mul", [x, f"{y}/kept"], "passed", {}),
            ):  # fmt: skip
                made.graph.node.append(helper.make_node(kind, ins, [f"{y}/{out}"], **more))
            made.graph.node.extend(_passed_by(f"{y}/passed", f"{y}/r", y))
    made.graph.initializer.append(numpy_helper.from_array(np.float32(1.0001), "almost_one"))
    return made


def twin(model: onnx.ModelProto, integers: onnx.ModelProto) -> onnx.ModelProto:
    """The float model, with the weights that the integers of the other stand for."""
    held = {t.name: numpy_helper.to_array(t) for t in integers.graph.initializer}
    made = onnx.ModelProto.FromString(model.SerializeToString())
    for t in made.graph.initializer:
        codes = held.get(f"{t.name}_quantized")
        if codes is None:
            continue
        scale, zero = held[f"{t.name}_scale"], held[f"{t.name}_zero_point"].astype(np.float32)
        array = codes.astype(np.float32)
        if codes.ndim == 3 and scale.ndim:  # an LSTM's, [directions, in, 4·size]: turned, one scale or one for a column
            scale, zero = (a.reshape(codes.shape[0], 1, -1) for a in (scale, zero))
            array = ((array - zero) * scale).transpose(0, 2, 1)
        else:
            axis = [i for i, n in enumerate(codes.shape) if scale.ndim == 1 and scale.size == n][-1:]
            each = [-1 if i in axis else 1 for i in range(codes.ndim)]
            scale, zero = (a.reshape(each) if a.size > 1 else a.reshape(()) for a in (scale, zero))
            array = (array - zero) * scale
        t.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array, np.float32), t.name))
    return made
