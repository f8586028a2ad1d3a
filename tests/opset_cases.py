"""Small networks as files of opset 9 to 21, each operator in the form that it has there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSETS = range(9, 22)
#: the newest version of the file format at an opset, of onnx's table of releases
_IR = {9: 4, 10: 5, 11: 6, 12: 7, 13: 7, 14: 7, 15: 8, 16: 8, 17: 8, 18: 8, 19: 9, 20: 9, 21: 10}


class File:
    """Nodes and tensors of a file under construction, at an opset."""

    def __init__(self, opset: int, *, fixed: int | None = None) -> None:
        self.opset, self.batch = opset, fixed or "N"
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self._draw = np.random.default_rng(0)

    def node(self, kind: str, ins: str, y: str, **attributes: Any) -> str:
        """A node of the default domain; `ins` and `y`: names between blanks."""
        self.nodes.append(helper.make_node(kind, ins.split(), y.split(), **attributes))
        return y.split()[0]

    def weight(self, name: str, *shape: int, scale: float = 0.5) -> str:
        """A random float32 initializer."""
        return self.tensor(name, self._draw.standard_normal(shape) * scale, np.float32)

    def tensor(self, name: str, array: Any, kind: type = np.int64) -> str:
        """An initializer."""
        self.tensors.append(numpy_helper.from_array(np.asarray(array, kind), name))
        return name

    def axes(self, kind: str, x: str, y: str, axes: Sequence[int], since: int = 13, **attributes: Any) -> str:
        """A node with axes: an attribute before an opset, an input from then on."""
        if self.opset < since:
            return self.node(kind, x, y, axes=list(axes), **attributes)
        return self.node(kind, f"{x} {self.tensor(f'{y}.axes', axes)}", y, **attributes)

    def clip(self, x: str, y: str, low: float, high: float) -> str:
        """Clip; its bounds are attributes before opset 11."""
        if self.opset < 11:
            return self.node("Clip", x, y, min=float(low), max=float(high))
        bounds = [self.tensor(f"{y}.{i}", v, np.float32) for i, v in enumerate((low, high))]
        return self.node("Clip", f"{x} {' '.join(bounds)}", y)

    def dropout(self, x: str, y: str) -> str:
        """Dropout; its ratio is an attribute before opset 12."""
        if self.opset < 12:
            return self.node("Dropout", x, y, ratio=0.25)
        return self.node("Dropout", f"{x} {self.tensor(f'{y}.ratio', 0.25, np.float32)}", y)

    def pad(self, x: str, y: str, pads: list[int]) -> str:
        """Pad; its widths are attributes before opset 11."""
        if self.opset < 11:
            return self.node("Pad", x, y, pads=pads, mode="constant", value=0.0)
        return self.node("Pad", f"{x} {self.tensor(f'{y}.pads', pads)}", y)

    def twice_as_large(self, x: str, y: str) -> str:
        """Upsample, or Resize from the corner."""
        scales = self.tensor(f"{y}.scales", [1, 1, 2, 2], np.float32)
        if self.opset < 11:
            return self.node("Upsample" if self.opset < 10 else "Resize", f"{x} {scales}", y, mode="nearest")
        how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        empty = self.tensor(f"{y}.roi", np.zeros(0), np.float32) if self.opset < 13 else ""
        self.nodes.append(helper.make_node("Resize", [x, empty, scales], [y], **how))
        return y

    def slice(self, x: str, y: str, start: int, end: int, axis: int) -> str:
        """Slice; its places are attributes before opset 10."""
        if self.opset < 10:
            return self.node("Slice", x, y, starts=[start], ends=[end], axes=[axis])
        given = (("starts", start), ("ends", end), ("axes", axis))
        return self.node("Slice", " ".join([x, *(self.tensor(f"{y}.{n}", [v]) for n, v in given)]), y)

    def model(self, inputs: dict[str, tuple[int, ...]], outputs: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
        """The file; shapes are those of one sample."""
        kinds = {n: TensorProto.INT64 if n == "ids" else TensorProto.FLOAT for n in inputs}
        first = [helper.make_tensor_value_info(n, kinds[n], [self.batch, *s]) for n, s in inputs.items()]
        last = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [self.batch, *s]) for n, s in outputs.items()]
        graph = helper.make_graph(self.nodes, "g", first, last, self.tensors)
        opsets = [helper.make_opsetid("", self.opset)]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=_IR[self.opset])
        training = self.opset < 14 and any(len(n.output) == 5 for n in self.nodes)  # whose shapes onnx infers not
        onnx.checker.check_model(made, full_check=not training)
        return made


def mlp(opset: int, **kind: Any) -> onnx.ModelProto:
    """Gemm, Clip, Dropout, Gemm, Softmax by its default axis, which is 1 of 2 in every opset."""
    f = File(opset, **kind)
    f.node("Gemm", f"x {f.weight('a.weight', 8, 6)} {f.weight('a.bias', 8)}", "h", transB=1)
    f.dropout(f.clip("h", "c", 0, 6), "d")
    f.node("Gemm", f"d {f.weight('head.weight', 4, 8)} {f.weight('head.bias', 4)}", "logits", transB=1)
    f.node("Softmax", "logits", "y")
    return f.model({"x": (6,)}, {"y": (4,)})


def convolutions(opset: int, **kind: Any) -> onnx.ModelProto:
    """Pad, Conv, BatchNormalization as a training file has it, Clip, Upsample or Resize, MaxPool, Squeeze, product."""
    f = File(opset, **kind)
    f.node("Conv", f"{f.pad('x', 'p', [0, 0, 1, 1, 0, 0, 1, 1])} {f.weight('conv.weight', 5, 3, 3, 3)}", "c")
    norm = [f.tensor(f"n.{n}", np.full(5, v), np.float32) for n, v in (("s", 1), ("b", 0.1), ("m", 0.2), ("v", 2))]
    f.node("BatchNormalization", f"c {' '.join(norm)}", "n")
    f.twice_as_large(f.clip("n", "r", 0, 6), "u")
    f.node("MaxPool", "u", "m", kernel_shape=[2, 2], strides=[2, 2])
    f.node("GlobalAveragePool", "m", "g")
    f.axes("Squeeze", "g", "f", [2, 3])
    f.node("MatMul", f"f {f.weight('head.weight', 5, 4)}", "z")
    f.node("Add", f"z {f.weight('head.bias', 4)}", "y")
    return f.model({"x": (3, 6, 6)}, {"y": (4,)})


def attention(opset: int, **kind: Any) -> onnx.ModelProto:
    """A table, a written-out normalisation, one block of attention with a mask, the mean of its places, a product."""
    f = File(opset, **kind)
    f.node("Gather", f"{f.weight('table', 11, 8)} ids", "e", axis=0)
    f.axes("ReduceMean", "e", "mean", [2], 18, keepdims=1)
    f.node("Mul", f"{f.node('Sub', 'e mean', 'l')} l", "sq")
    f.axes("ReduceMean", "sq", "var", [2], 18, keepdims=1)
    f.node("Sqrt", f.node("Add", f"var {f.tensor('eps', 1e-5, np.float32)}", "ve"), "sd")
    f.node("Mul", f"{f.node('Div', 'l sd', 'ln')} {f.weight('scale', 8)}", "n")
    shape = f.tensor("heads", [0, 5, 2, 4])
    for name in ("q", "k", "v"):
        f.node("MatMul", f"n {f.weight(f'{name}.weight', 8, 8)}", name)
        f.node("Transpose", f.node("Reshape", f"{name} {shape}", f"{name}4"), f"{name}t", perm=[0, 2, 1, 3])
    f.node("MatMul", f"qt {f.node('Transpose', 'kt', 'kk', perm=[0, 1, 3, 2])}", "s")
    f.axes("Unsqueeze", "mask", "m4", [1, 2])
    f.node("Mul", f"m4 {f.tensor('far', -1e4, np.float32)}", "ms")
    f.node("Softmax", f.node("Add", "s ms", "sm"), "a", axis=3)
    f.node("Transpose", f.node("MatMul", "a vt", "o"), "ot", perm=[0, 2, 1, 3])
    f.node("Reshape", f"ot {f.tensor('joined', [0, 5, 8])}", "oj")
    f.node("MatMul", f"oj {f.weight('o.weight', 8, 8)}", "op")
    f.node("Add", "op e", "b")
    f.axes("ReduceSum", "b", "t", [1], keepdims=0)
    f.node("Gemm", f"t {f.weight('head.weight', 8, 4)} {f.weight('head.bias', 4)}", "y")
    return f.model({"ids": (5,), "mask": (5,)}, {"y": (4,)})


def recurrent(opset: int, **kind: Any) -> onnx.ModelProto:
    """An LSTM over the steps of x, its last state, a product; Softmax over the last of two axes."""
    f = File(opset, **kind)
    weights = [f.weight("lstm.W", 1, 20, 3), f.weight("lstm.R", 1, 20, 5), f.weight("lstm.B", 1, 40)]
    f.node("Transpose", "x", "steps", perm=[1, 0, 2])
    f.node("LSTM", f"steps {' '.join(weights)}", "Y Yh", hidden_size=5)
    f.axes("Squeeze", f.slice("Y", "last", 3, 4, 0), "h", [0, 1])
    f.node("MatMul", f"h {f.weight('head.weight', 5, 4)}", "z")
    f.node("Softmax", f.node("Add", f"z {f.weight('head.bias', 4)}", "logits"), "y", axis=1)
    return f.model({"x": (4, 3)}, {"y": (4,)})


def _split(f: File) -> None:
    """Into parts of 2 and 4; sizes are an attribute before opset 13."""
    if f.opset < 13:
        f.node("Split", "h", "p q", axis=2, split=[2, 4])
    else:
        f.node("Split", f"h {f.tensor('sizes', [2, 4])}", "p q", axis=2)
    f.node("Concat", "q p", "y", axis=2)


def _halves(f: File) -> None:
    """Into as many equal parts as there are outputs, whose number is said from opset 18 on."""
    f.node("Split", "h", "p q", axis=2, **({"num_outputs": 2} if f.opset > 17 else {}))
    f.node("Mul", "p q", "y")


def _top(f: File) -> None:
    """TopK, whose number is an attribute before opset 10."""
    if f.opset < 10:
        f.node("TopK", "h", "y i", k=3)
    else:
        f.node("TopK", f"h {f.tensor('k', [3])}", "y i")


def _linear(f: File) -> None:
    """Upsample or Resize by linear interpolation, from the corner up to opset 10, by half pixels later."""
    scales = f.tensor("scales", [1, 1, 2], np.float32)
    if f.opset < 11:
        f.node("Upsample" if f.opset < 10 else "Resize", f"h {scales}", "y", mode="linear")
        return
    empty = f.tensor("roi", np.zeros(0), np.float32) if f.opset < 13 else ""
    f.nodes.append(helper.make_node("Resize", ["h", empty, scales], ["y"], mode="linear"))


def _reflected(f: File) -> None:
    pads = [0, 0, 1, 0, 0, 2]
    if f.opset < 11:
        f.node("Pad", "h", "y", pads=pads, mode="reflect")
    else:
        f.node("Pad", f"h {f.tensor('pads', pads)}", "y", mode="reflect")


def _of_training(f: File) -> None:
    """BatchNormalization as a file in training mode has it: five outputs before opset 14, three later."""
    norm = [f.tensor(f"n.{n}", np.full(4, v), np.float32) for n, v in (("s", 1), ("b", 0.1), ("m", 0.2), ("v", 2))]
    if f.opset < 14:
        f.node("BatchNormalization", f"h {' '.join(norm)}", "y m v sm sv")
    else:
        f.node("BatchNormalization", f"h {' '.join(norm)}", "y m v", training_mode=1)


def _by_groups(f: File) -> None:
    """GroupNormalization: a scale for each group up to opset 20, for each channel later."""
    size = 2 if f.opset < 21 else 4
    given = [f.tensor("s", np.ones(size), np.float32), f.tensor("b", np.zeros(size), np.float32)]
    f.node("GroupNormalization", f"h {' '.join(given)}", "y", num_groups=2)


#: operators whose signature changed: how h [N, 4, 6] becomes y, from which opset they compute the same, the first
ROWS: dict[str, tuple[Any, int, int]] = {
    "Softmax by default": (lambda f: f.node("Mul", f"h {f.node('Softmax', 'h', 'm')}", "y"), 13, 9),
    "Softmax over 1": (lambda f: f.node("Softmax", "h", "y", axis=1), 13, 9),
    "LogSoftmax by default": (lambda f: f.node("LogSoftmax", "h", "y"), 13, 9),
    "Hardmax": (lambda f: f.node("Add", f"h {f.node('Hardmax', 'h', 'm')}", "y"), 13, 9),
    "Split": (_split, 9, 9),
    "Split in halves": (_halves, 9, 9),
    "Slice": (lambda f: f.slice("h", "y", 1, 4, 2), 9, 9),
    "TopK": (_top, 9, 9),
    "Squeeze": (lambda f: f.axes("Squeeze", f.axes("Unsqueeze", "h", "u", [0, 3]), "y", [0, 3]), 9, 9),
    "Resize": (_linear, 11, 9),
    "Pad": (_reflected, 9, 9),
    "BatchNormalization": (_of_training, 9, 9),
    "GroupNormalization": (_by_groups, 21, 21),
    "Clip": (lambda f: f.clip("h", "y", -0.5, 0.5), 9, 9),
    "Clip from below": (lambda f: f.node("Clip", "h", "y", min=-0.5) if f.opset < 11 else
                        f.node("Clip", f"h {f.tensor('low', -0.5, np.float32)}", "y"), 9, 9),
    "AveragePool": (lambda f: f.node("AveragePool", "h", "y", kernel_shape=[3], pads=[1, 1]), 9, 9),
    **{
        kind: (lambda f, kind=kind: f.axes(kind, "h", "y", [2], 18 if kind != "ReduceSum" else 13, keepdims=1), 9, 9)
        for kind in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceLogSumExp", "ReduceProd")
    },
}  # fmt: skip


def row(name: str, opset: int, **kind: Any) -> onnx.ModelProto:
    """x · w, then the operator, then the mean of all but the batch: scores [N, 4]."""
    f = File(opset, **kind)
    f.node("MatMul", f"x {f.weight('w', 6, 6)}", "h")
    ROWS[name][0](f)
    f.axes("ReduceMean", "y", "z", [2], 18, keepdims=0)
    return f.model({"x": (4, 6)}, {"z": (4,)})


#: network → its file, a weight for adapters, a value before the head, and its inputs for a batch
NETWORKS: dict[str, tuple[Any, str, str]] = {
    "mlp": (mlp, "a.weight", "c"),
    "convolutions": (convolutions, "head.weight", "f"),
    "attention": (attention, "v.weight", "t"),
    "recurrent": (recurrent, "head.weight", "h"),
}


def feed_of(model: onnx.ModelProto, batch: int) -> dict[str, np.ndarray]:
    """Random inputs; every third place is masked."""
    draw = np.random.default_rng(1)
    found = {}
    for i in model.graph.input:
        shape = (batch, *(d.dim_value for d in i.type.tensor_type.shape.dim[1:]))
        found[i.name] = (
            draw.integers(0, 11, shape) if i.name == "ids"
            else (np.arange(np.prod(shape)).reshape(shape) % 3 == 2).astype(np.float32) if i.name == "mask"
            else draw.standard_normal(shape).astype(np.float32)
        )  # fmt: skip
    return found
