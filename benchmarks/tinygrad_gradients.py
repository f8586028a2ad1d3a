"""Gradients of ONNX operators beside tinygrad's, whose functions and derivatives others wrote.

    python benchmarks/tinygrad_gradients.py FOLDER --tinygrad PYTHON [--only NAME ...]

PYTHON: an interpreter with tinygrad 0.14, which runs this file with `--oracle`.  A row is a model of one node, whose
float32 inputs are parameters, and the function of tinygrad's tensors that means the same.  The loss is the outputs'
sum with random weights.  Tolerances are those of ort_training.py: both sides compute in
float32, and add in other orders.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from ort_operators import judged, write
from ort_training import arguments


class Row(NamedTuple):
    """An operator's inputs, and the same by tinygrad.

    Inputs are shapes of floats (`+2,3`: above 0.5, `^`: above 1.2, `~`: within 0.9 of 0, else normal), integers,
    or [] for none.
    """

    inputs: str | list[Any]
    function: Callable[..., Any]
    attributes: dict[str, Any] = {}  # noqa: RUF012
    opset: int = 17


def _int(x: Any, values: Any) -> Any:
    """A tensor of integers."""
    return type(x)(values, dtype="int32")


def _eye(x: Any) -> Any:
    """Where the model of Where has ones."""
    return type(x)((np.eye(3, 4) > 0).tolist())


def _groups(x: Any) -> Any:
    """Normalised in three groups of channels."""
    return x.reshape(2, 3, 10).layernorm(-1, 1e-5).reshape(2, 6, 5)


ROWS: dict[str, Row] = {
    # elements
    "Abs": Row("3,4", lambda x: x.abs()),
    "Acos": Row("~3,4", lambda x: x.acos()),
    "Acosh": Row("^3,4", lambda x: x.acosh()),
    "Asin": Row("~3,4", lambda x: x.asin()),
    "Asinh": Row("3,4", lambda x: x.asinh()),
    "Atan": Row("3,4", lambda x: x.atan()),
    "Atanh": Row("~3,4", lambda x: x.atanh()),
    "Celu": Row("3,4", lambda x: x.celu(1.5), {"alpha": 1.5}),
    "Cos": Row("3,4", lambda x: x.cos()),
    "Cosh": Row("3,4", lambda x: x.cosh()),
    "Elu": Row("3,4", lambda x: x.elu(0.7), {"alpha": 0.7}),
    "Erf": Row("3,4", lambda x: x.erf()),
    "Exp": Row("3,4", lambda x: x.exp()),
    "Gelu": Row("3,4", lambda x: x * 0.5 * (1 + (x / math.sqrt(2)).erf()), opset=20),
    "Gelu tanh": Row("3,4", lambda x: x.gelu(), {"approximate": "tanh"}, 20),
    "HardSigmoid": Row("3,4", lambda x: x.hardsigmoid(0.2, 0.5)),
    "HardSwish": Row("3,4", lambda x: x.hardswish()),
    "LeakyRelu": Row("3,4", lambda x: x.leaky_relu(0.1), {"alpha": 0.1}),
    "Log": Row("+3,4", lambda x: x.log()),
    "Mish": Row("3,4", lambda x: x.mish(), opset=18),
    "Neg": Row("3,4", lambda x: -x),
    "Reciprocal": Row("+3,4", lambda x: x.reciprocal()),
    "Relu": Row("3,4", lambda x: x.relu()),
    "Selu": Row("3,4", lambda x: x.selu()),
    "Sigmoid": Row("3,4", lambda x: x.sigmoid()),
    "Sin": Row("3,4", lambda x: x.sin()),
    "Sinh": Row("3,4", lambda x: x.sinh()),
    "Softplus": Row("3,4", lambda x: x.softplus()),
    "Softsign": Row("3,4", lambda x: x.softsign()),
    "Sqrt": Row("+3,4", lambda x: x.sqrt()),
    "Tan": Row("~3,4", lambda x: x.tan()),
    "Tanh": Row("3,4", lambda x: x.tanh()),
    "Clip": Row("3,4", lambda x: x.clip(-0.5, 0.8), {"min": -0.5, "max": 0.8}, 6),
    # two inputs, with shapes that differ
    "Add": Row("3,4 4", lambda x, y: x + y),
    "Sub": Row("3,4 3,1", lambda x, y: x - y),
    "Mul": Row("3,4 2,1,4", lambda x, y: x * y),
    "Div": Row("3,4 +4", lambda x, y: x / y),
    "Pow": Row("+3,4 4", lambda x, y: x.pow(y)),
    "Max": Row("3,4 4", lambda x, y: x.maximum(y)),
    "Min": Row("3,4 4", lambda x, y: x.minimum(y)),
    "Mod": Row("3,4 +3,4", lambda x, y: x - y * (x / y).trunc(), {"fmod": 1}),
    "PRelu": Row("3,4 4", lambda x, y: (x > 0).where(x, x * y)),
    "Where": Row([np.eye(3, 4) > 0, "3,4", "4"], lambda x, y: _eye(x).where(x, y)),
    "MatMul": Row("2,3,4 4,5", lambda x, y: x @ y),
    "Gemm": Row("4,3 5,4 5",
        lambda x, y, z: 0.5 * (x.T @ y.T) + 2 * z, {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    "Einsum": Row("2,3,4 2,4,5", lambda x, y: type(x).einsum("bij,bjk->bik", x, y), {"equation": "bij,bjk->bik"}),
    # sums along axes
    "ReduceSum": Row(["2,3,4", [1]], lambda x: x.sum(1, keepdim=True)),
    "ReduceMean": Row("2,3,4", lambda x: x.mean((0, 2)), {"axes": [0, 2], "keepdims": 0}),
    "ReduceMax": Row("2,3,4", lambda x: x.max(2, keepdim=True), {"axes": [2]}),
    "ReduceMin": Row("2,3,4", lambda x: x.min(2, keepdim=True), {"axes": [2]}),
    "ReduceProd": Row("2,3,4", lambda x: x.prod(2, keepdim=True), {"axes": [2]}),
    "ReduceLogSumExp": Row("2,3,4", lambda x: x.logsumexp(2, keepdim=True), {"axes": [2]}),
    "ReduceL1": Row("2,3,4", lambda x: x.abs().sum(2, keepdim=True), {"axes": [2]}),
    "ReduceL2": Row("2,3,4", lambda x: x.square().sum(2, keepdim=True).sqrt(), {"axes": [2]}),
    "ReduceSumSquare": Row("2,3,4", lambda x: x.square().sum(2, keepdim=True), {"axes": [2]}),
    "CumSum": Row(["3,4", np.int64(1)], lambda x: x.cumsum(1)),
    "Softmax": Row("3,4", lambda x: x.softmax(0), {"axis": 0}),
    "LogSoftmax": Row("3,4", lambda x: x.log_softmax(1), {"axis": 1}),
    # normalisations
    "LayerNormalization": Row("2,5,4 4 4", lambda x, s, b: x.layernorm(-1, 1e-5) * s + b),
    "GroupNormalization": Row("2,6,5 6 6",
        lambda x, s, b: _groups(x) * s.reshape(6, 1) + b.reshape(6, 1), {"num_groups": 3}, 21),
    "InstanceNormalization": Row("2,3,5 3 3",
        lambda x, s, b: x.layernorm(-1, 1e-5) * s.reshape(3, 1) + b.reshape(3, 1)),
    "RMSNormalization": Row("2,5,4 4",
        lambda x, s: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * s, opset=23),
    "LpNormalization": Row("3,4", lambda x: x / x.square().sum(1, keepdim=True).sqrt(), {"axis": 1}),
    "MeanVarianceNormalization": Row("2,3,4,5", lambda x: x.layernorm((0, 2, 3), 1e-9)),
    # windows
    "Conv": Row("2,4,7,7 6,2,3,3 6", lambda x, w, b: x.conv2d(w, b, groups=2, stride=2, padding=1),
                {"group": 2, "strides": [2, 2], "pads": [1] * 4}),
    "Conv dilated": Row("2,2,9 3,2,3", lambda x, w: x.conv2d(w, dilation=2), {"dilations": [2]}),
    "ConvTranspose": Row("2,3,4,4 3,2,3,3", lambda x, w: x.conv_transpose2d(w, stride=2, padding=1, output_padding=1),
                         {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1]}),
    "MaxPool": Row("2,3,6,6",
        lambda x: x.max_pool2d((3, 3), 2, padding=1), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
    "AveragePool": Row("2,3,6,6", lambda x: x.avg_pool2d((3, 3), 2, padding=1, count_include_pad=False),
                       {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
    "AveragePool padded": Row("2,3,6", lambda x: x.avg_pool2d((3,), 1, padding=1),
                              {"kernel_shape": [3], "pads": [1, 1], "count_include_pad": 1}),
    "GlobalAveragePool": Row("2,3,4,4", lambda x: x.mean((2, 3), keepdim=True)),
    "GlobalMaxPool": Row("2,3,4,4", lambda x: x.max((2, 3), keepdim=True)),
    "Resize nearest": Row(["1,2,3,4", [], [], [1, 2, 6, 8]], lambda x: x.interpolate((6, 8), "nearest"),
                          {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    "Resize linear": Row(["1,2,3,4", [], [], [1, 2, 6, 8]],
        lambda x: x.interpolate((6, 8), "linear"), {"mode": "linear"}),
    "Resize corners": Row(["1,2,3,4", [], [], [1, 2, 5, 7]],
        lambda x: x.interpolate((5, 7), "linear", align_corners=True),
                          {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    # places
    "Transpose": Row("2,3,4", lambda x: x.permute(2, 0, 1), {"perm": [2, 0, 1]}),
    "Reshape": Row(["3,4", [2, 6]], lambda x: x.reshape(2, 6)),
    "Flatten": Row("2,3,4", lambda x: x.reshape(2, 12)),
    "Squeeze": Row(["3,1,4", [1]], lambda x: x.squeeze(1)),
    "Unsqueeze": Row(["3,4", [1]], lambda x: x.unsqueeze(1)),
    "Expand": Row(["3,1", [2, 3, 4]], lambda x: x.expand(2, 3, 4)),
    "Tile": Row(["2,3", [2, 3]], lambda x: x.repeat(2, 3)),
    "Concat": Row("2,3 2,4", lambda x, y: x.cat(y, dim=1), {"axis": 1}),
    "Slice": Row(["4,6", [0, 5], [3, 0], [0, 1], [2, -2]], lambda x: x[0:3:2, 5:0:-2]),
    "Pad": Row(["3,4", [1, 0, 0, 2]], lambda x: x.pad(((1, 0), (0, 2)))),
    "Pad reflect": Row(["1,1,4,5", [0, 0, 1, 2, 0, 0, 2, 1]],
        lambda x: x.pad((2, 1, 1, 2), mode="reflect"), {"mode": "reflect"}),
    "Pad edge": Row(["1,1,4,5", [0, 0, 1, 2, 0, 0, 2, 1]],
        lambda x: x.pad((2, 1, 1, 2), mode="replicate"), {"mode": "edge"}),
    "Trilu": Row(["4,5", np.int64(1)], lambda x: x.triu(1)),
    "Gather": Row(["4,3", [2, 0, 2]], lambda x: x[[2, 0, 2]]),
    "GatherElements": Row(["3,3", [[2, 0, 1], [1, 1, 2]]], lambda x: x.gather(0, _int(x, [[2, 0, 1], [1, 1, 2]]))),
    "ScatterElements": Row(["3,3", [[2, 0, 1]], "1,3"], lambda x, y: x.scatter(0, _int(x, [[2, 0, 1]]), y)),
    "ScatterElements add": Row(["3,3", [[2, 2, 2], [2, 0, 2]], "2,3"],
        lambda x, y: x.scatter_reduce(0, _int(x, [[2, 2, 2], [2, 0, 2]]), y, "sum"), {"reduction": "add"}, 18),
    "DepthToSpace": Row("1,8,2,3",
        lambda x: x.reshape(1, 2, 2, 2, 2, 3).permute(0, 3, 4, 1, 5, 2).reshape(1, 2, 4, 6), {"blocksize": 2}),
    "TopK": Row(["3,6", [2]], lambda x: x.topk(2)[0], {"axis": 1}),
    # losses
    "SoftmaxCrossEntropyLoss": Row(["4,5", [1, 0, 4, 2]], lambda x: x.cross_entropy(_int(x, [1, 0, 4, 2]))),
    "SoftmaxCrossEntropyLoss ignored": Row(["4,5", [1, 0, 4, 2]],
        lambda x: x.sparse_categorical_crossentropy(_int(x, [1, 0, 4, 2]), 4),
                                           {"ignore_index": 4}),
    "NegativeLogLikelihoodLoss": Row(["4,5", [1, 0, 4, 2]], lambda x: x.nll_loss(_int(x, [1, 0, 4, 2]))),
    "Attention": Row("1,2,3,4 1,2,5,4 1,2,5,4", lambda q, k, v: q.scaled_dot_product_attention(k, v), opset=23),
}  # fmt: skip


def write_model(path: Path, name: str, row: Row) -> None:
    """A row's model that trains."""
    draw, arrays = np.random.default_rng(len(name)), {}
    for i, text in enumerate(row.inputs.split() if isinstance(row.inputs, str) else row.inputs):
        if not isinstance(text, str):
            arrays[f"x{i}"] = np.asarray(text, None if isinstance(text, np.ndarray) else np.int64)
            continue
        shape = [int(n) for n in text.lstrip("+~^").split(",")]
        low_high = {"^": (1.2, 2.0), "+": (0.5, 2.0), "~": (-0.9, 0.9)}.get(text[0])
        values = draw.uniform(*low_high, shape) if low_high else draw.standard_normal(shape)
        arrays[f"x{i}"] = values.astype(np.float32)
    names = [n if a.size else "" for n, a in arrays.items()]
    node = helper.make_node(name.split()[0], names, ["y", "places"][: 1 + (name == "TopK")], **row.attributes)
    arrays = {n: a for n, a in arrays.items() if a.size}
    ports = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in arrays.items()
    ]
    graph = helper.make_graph([node], "row", ports, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", row.opset)])
    write(path, model, list(arrays.values()), ReferenceEvaluator(model).run(None, arrays))


def oracle(folder: Path) -> None:
    """Loss and gradients of every model by tinygrad."""
    import tinygrad

    for path in sorted(folder.glob("*.onnx")):
        tensors = {t.name: numpy_helper.to_array(t) for t in onnx.load(str(path)).graph.initializer}
        inputs = {n: tinygrad.Tensor(a) for n, a in tensors.items() if n.startswith("p_")}
        said = path.with_suffix(".txt")
        try:
            result = ROWS[path.stem].function(*inputs.values())
            loss = (result * tinygrad.Tensor(tensors["y.weights"])).sum()
            gradients = {
                f"gradient/{n}": g.numpy() for n, g in zip(inputs, loss.gradient(*inputs.values()), strict=True)
            }
            np.savez(path.with_suffix(".there.npz"), loss=np.array([loss.item()]), **gradients)
            said.write_text("")
        except Exception as e:
            said.write_text(f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")


def main() -> None:
    """Writes models, runs the oracle, and compares."""
    args = arguments(__doc__, "tinygrad", ROWS).parse_args()
    if args.oracle:
        oracle(args.folder)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        write_model(args.folder / f"{name}.onnx", name, ROWS[name])
    subprocess.run([args.tinygrad, __file__, str(args.folder), "--oracle"], check=True)
    for name in args.only:
        row = judged(args.folder / f"{name}.onnx")
        print(f"{name:34} {row['verdict']:14} {row['why'][:160]}", flush=True)


if __name__ == "__main__":
    main()
