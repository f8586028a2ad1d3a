"""Arithmetic, activations, reductions, products, indexing, and movement of data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from spec import Bools, Const, Ints, Table, Uniform, const, exact, floats, number, scalar
from torch import Tensor

SPECS = Table()
add = SPECS.add
S = (2, 3, 4)

# --------------------------------------------------------------------------------------
# One input

for op, function in [
    ("Abs", torch.abs), ("Neg", torch.neg), ("Exp", torch.exp), ("Sin", torch.sin), ("Cos", torch.cos),
    ("Sinh", torch.sinh), ("Cosh", torch.cosh), ("Tanh", torch.tanh), ("Atan", torch.atan), ("Asinh", torch.asinh),
    ("Erf", torch.erf), ("Sigmoid", torch.sigmoid), ("Relu", F.relu), ("Softplus", F.softplus),
    ("Softsign", F.softsign), ("HardSwish", F.hardswish), ("Mish", F.mish), ("Ceil", torch.ceil),
    ("Floor", torch.floor), ("Round", torch.round), ("Sign", torch.sign), ("Identity", lambda x: x * 1),
]:  # fmt: skip
    add(op, "", [S], function)
for op, function, low, high in [
    ("Log", torch.log, 0.2, 3), ("Sqrt", torch.sqrt, 0.1, 3), ("Reciprocal", torch.reciprocal, 0.3, 3),
    ("Tan", torch.tan, -1.2, 1.2), ("Asin", torch.asin, -0.9, 0.9), ("Acos", torch.acos, -0.9, 0.9),
    ("Acosh", torch.acosh, 1.2, 4), ("Atanh", torch.atanh, -0.9, 0.9),
]:  # fmt: skip
    add(op, "", [Uniform(S, low, high)], function)
#: ONNX's attributes are float32, which PyTorch's own constants are not
ALPHA, SCALE = (float(np.float32(v)) for v in (1.67326319217681884765625, 1.05070102214813232421875))
add("Softplus", "far from zero", [exact([-60.0, -30.0, -15.0, 15.0, 19.0])], F.softplus)
add("Sigmoid", "far from zero", [exact([-80.0, -30.0, 4.0, 8.0])], torch.sigmoid)
add("Tanh", "far from zero", [exact([-30.0, -3.0, 2.0])], torch.tanh)
add("LeakyRelu", "default", [S], F.leaky_relu)
add("LeakyRelu", "alpha", [S], lambda x: F.leaky_relu(x, 0.25), alpha=0.25)
add("Elu", "default", [S], F.elu)
add("Elu", "alpha", [S], lambda x: F.elu(x, 1.5), alpha=1.5)
add("Celu", "default", [S], F.celu)
add("Celu", "alpha", [S], lambda x: F.celu(x, 2.5), alpha=2.5)
add("Selu", "", [S], lambda x: SCALE * F.elu(x, ALPHA), alpha=ALPHA, gamma=SCALE)
add("HardSigmoid", "default", [Uniform(S, -5, 5)], lambda x: F.hardtanh(x / 5 + 0.5, 0.0, 1.0))
add("HardSigmoid", "slope 1/4", [Uniform(S, -5, 5)], lambda x: F.hardtanh(x / 4 + 0.5, 0.0, 1.0), alpha=0.25, beta=0.5)
add("Gelu", "erf", [S], F.gelu)
add("Gelu", "tanh", [S], lambda x: F.gelu(x, approximate="tanh"), approximate="tanh")
add("ThresholdedRelu", "alpha", [S], lambda x: F.threshold(x, 0.5, 0.0), alpha=0.5)
add("Shrink", "soft", [S], lambda x: F.softshrink(x, 0.5), lambd=0.5, bias=0.5)
add("Shrink", "hard", [S], lambda x: F.hardshrink(x, 0.25), lambd=0.25)
add("Swish", "silu", [S], F.silu, opset=24)
add("PRelu", "per channel", [(2, 3, 4, 2), (3, 1, 1)], lambda x, s: F.prelu(x, s.flatten()))
add("PRelu", "one slope", [S, (1,)], F.prelu)
KINKS = exact([[-1.0, 0.0, 1.0, 0.0], [2.0, -0.0, -2.0, 0.5]])
add("Relu", "at zero", [KINKS], F.relu)
add("Abs", "at zero", [KINKS], torch.abs)
add("LeakyRelu", "at zero", [KINKS], lambda x: F.leaky_relu(x, 0.5), alpha=0.5)
add("Elu", "at zero", [KINKS], F.elu)
add("HardSwish", "at its kinks", [exact([-3.0, 3.0, 0.0, -4.0, 4.0])], F.hardswish)
add("HardSigmoid", "at its kinks", [exact([-3.0, 3.0, 0.0, -4.0])], F.hardsigmoid, alpha=1 / 6, beta=0.5)

# --------------------------------------------------------------------------------------
# Several inputs, broadcasting

for op, function in [("Add", torch.add), ("Sub", torch.sub), ("Mul", torch.mul)]:
    add(op, "same shape", [S, S], function)
    add(op, "second broadcast", [S, (3, 1)], function)
    add(op, "both broadcast", [(4,), (2, 1, 4)], function)
add("Add", "with a scalar", [S, ()], torch.add)
add("Mul", "empty", [(0, 3), (1, 3)], torch.mul)
add("Div", "same shape", [S, Uniform(S, 0.5, 2)], torch.div)
add("Div", "both broadcast", [(3, 1), Uniform((2, 1, 4), -2, -0.5)], torch.div)
add("Pow", "tensors", [Uniform(S, 0.3, 2), Uniform(S, -2, 2)], torch.pow)
add("Pow", "both broadcast", [Uniform((3, 1), 0.3, 2), Uniform((2, 1, 4), -2, 2)], torch.pow)
add("Pow", "constant 2", [S, floats(2.0)], lambda x: x.pow(2.0))
add("Pow", "constant 3", [S, floats(3.0)], lambda x: x.pow(3.0))
add("Pow", "constant -0.5", [Uniform(S, 0.3, 2), floats(-0.5)], lambda x: x.pow(-0.5))
add("Pow", "base zero", [exact([0.0, 2.0, 0.0]), exact([2.0, 0.0, 1.0])], torch.pow)
add("Mod", "fmod", [Uniform(S, -5, 5), Uniform((4,), 0.6, 2)], torch.fmod, fmod=1)
add("Max", "two", [S, (3, 1)], torch.maximum)
add("Min", "two", [S, (3, 1)], torch.minimum)
add("Max", "tie", [exact([1.0, 2.0, 3.0]), exact([1.0, 3.0, 2.0])], torch.maximum)
add("Min", "tie", [exact([1.0, 2.0, 3.0]), exact([1.0, 3.0, 2.0])], torch.minimum)
add("Max", "three", [S, (4,), ()], lambda a, b, c: torch.maximum(torch.maximum(a, b), c))
add("Max", "one", [S], lambda x: x * 1)
add("Sum", "three, broadcast", [S, (4,), (3, 1)], lambda a, b, c: a + b + c)
add("Mean", "three", [S, S, S], lambda a, b, c: torch.stack([a, b, c]).mean(0))
add("Where", "broadcast", [Bools((3, 1)), S, (4,)], torch.where)
add("Clip", "constants", [S, number(-0.5), number(0.75)],
    lambda x: torch.clamp(x, -0.5, 0.75))  # fmt: skip
add("Clip", "minimum only", [S, number(-0.25)], lambda x: torch.clamp(x, min=-0.25))
add("Clip", "at the limits", [exact([-1.0, 0.0, 1.0, 2.0, -3.0]), number(-1),
    number(1)], lambda x: torch.clamp(x, -1.0, 1.0))  # fmt: skip
add("Clip", "limits are values", [S, exact(-0.5), exact(0.75)], torch.clamp)
add("CumSum", "", [S, scalar(1)], lambda x: x.cumsum(1))
add("CumSum", "reverse", [S, scalar(-1)], lambda x: x.flip(-1).cumsum(-1).flip(-1), reverse=1)
add("CumSum", "exclusive", [S, scalar(0)], lambda x: F.pad(x.cumsum(0)[:-1], (0, 0, 0, 0, 1, 0)), exclusive=1)
add("CumProd", "", [S, scalar(2)], lambda x: x.cumprod(2), opset=26)
add("CumProd", "reverse", [S, scalar(1)], lambda x: x.flip(1).cumprod(1).flip(1), opset=26, reverse=1)
add("CumProd", "with a zero", [exact([2.0, 0.0, 3.0, 1.5]), scalar(0)], lambda x: x.cumprod(0), opset=26)
add("CumProd", "with two zeros", [exact([2.0, 0.0, 3.0, 0.0, 5.0]), scalar(0)], lambda x: x.cumprod(0), opset=26)

# --------------------------------------------------------------------------------------
# Reductions

ALL = (0, 1, 2)
REDUCTIONS = [
    ("ReduceSum", lambda x, d, k: x.sum(d, k)), ("ReduceMean", lambda x, d, k: x.mean(d, k)),
    ("ReduceMax", lambda x, d, k: x.amax(d, k)), ("ReduceMin", lambda x, d, k: x.amin(d, k)),
    ("ReduceL1", lambda x, d, k: torch.linalg.vector_norm(x, 1, d, k)),
    ("ReduceL2", lambda x, d, k: torch.linalg.vector_norm(x, 2, d, k)),
    ("ReduceLogSumExp", lambda x, d, k: torch.logsumexp(x, d, k)),
    ("ReduceSumSquare", lambda x, d, k: x.square().sum(d, k)),
]  # fmt: skip
for op, function in REDUCTIONS:
    add(op, "axis 1", [S, const(1)], lambda x, f=function: f(x, (1,), True))
    add(op, "axes 0 and -1 dropped", [S, const(0, -1)], lambda x, f=function: f(x, (0, 2), False), keepdims=0)
    add(op, "all", [S], lambda x, f=function: f(x, ALL, False), keepdims=0)
add("ReduceLogSum", "axis 1", [Uniform(S, 0.2, 2), const(1)], lambda x: x.sum(1, True).log())
add("ReduceLogSum", "all", [Uniform(S, 0.2, 2)], lambda x: x.sum().log(), keepdims=0)
add("ReduceProd", "axis 1", [S, const(1)], lambda x: x.prod(1, True))
add("ReduceProd", "axes 1 and 2", [S, const(1, 2)], lambda x: x.flatten(1).prod(1), keepdims=0)
add("ReduceProd", "all", [S], lambda x: x.prod(), keepdims=0)
ZEROS = exact([[2.0, 0.0, 3.0], [0.0, 4.0, 0.0], [1.0, 2.0, 3.0]])
add("ReduceProd", "zeros", [ZEROS, const(1)], lambda x: x.prod(1, True))
TIES = exact([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, 1.0, 0.0]])
add("ReduceMax", "ties", [TIES, const(1)], lambda x: x.amax(1, True))
add("ReduceMin", "ties", [TIES, const(1)], lambda x: x.amin(1, True))
add("ReduceL1", "at zero", [ZEROS, const(1)], lambda x: torch.linalg.vector_norm(x, 1, 1, True))
add("ReduceL2", "at zero", [exact([[0.0, 0.0], [3.0, 4.0]]), const(1)],
    lambda x: torch.linalg.vector_norm(x, 2, 1, True))  # fmt: skip
add("ReduceLogSumExp", "large", [exact([[90.0, 91.0, 60.0], [-95.0, -96.0, -99.0]]), const(1)],
    lambda x: torch.logsumexp(x, 1, True))  # fmt: skip
add("ReduceSum", "no axes: nothing", [S, const()], lambda x: x * 1, noop_with_empty_axes=1)
add("LpNormalization", "p 2", [S], lambda x: F.normalize(x, 2, -1, eps=0.0))
add("LpNormalization", "p 1, axis 1", [S], lambda x: F.normalize(x, 1, 1, eps=0.0), p=1, axis=1)

# --------------------------------------------------------------------------------------
# Products

for note, a, b in [
    ("matrices", (3, 4), (4, 5)), ("batch by matrix", (2, 3, 4), (4, 5)), ("matrix by batch", (3, 4), (2, 4, 5)),
    ("batches broadcast", (3, 1, 2, 4), (2, 4, 3)), ("vector by matrix", (4,), (4, 3)),
    ("matrix by vector", (2, 3, 4), (4,)), ("vectors", (4,), (4,)), ("vector by batch", (4,), (2, 4, 3)),
]:  # fmt: skip
    add("MatMul", note, [a, b], torch.matmul)
add("Gemm", "plain", [(3, 4), (4, 5), (5,)], lambda a, b, c: torch.addmm(c, a, b))
add("Gemm", "transposed, scaled", [(4, 3), (5, 4), (3, 1)], lambda a, b, c: torch.addmm(c, a.T, b.T, beta=0.5, alpha=2),
    transA=1, transB=1, alpha=2.0, beta=0.5)  # fmt: skip
add("Gemm", "as a layer", [(3, 4), (5, 4), (5,)], F.linear, transB=1)
add("Gemm", "transA, scalar C", [(4, 3), (4, 5), ()], lambda a, b, c: torch.addmm(c, a.T, b), transA=1)
add("Gemm", "no C", [(3, 4), (4, 5)], lambda a, b: 0.5 * (a @ b), alpha=0.5)
for equation, shapes in [
    ("ij,jk->ik", [(2, 3), (3, 4)]), ("bij,bkj->bik", [(2, 3, 4), (2, 5, 4)]), ("bhid,bhjd->bhij", [(2, 2, 3, 4)] * 2),
    ("i,j->ij", [(3,), (4,)]), ("ijk->ki", [(2, 3, 4)]), ("ii->i", [(3, 3)]), ("ii->", [(3, 3)]),
    ("...ij,jk->...ik", [(2, 2, 3), (3, 4)]), ("bik,kjl,bl->bij", [(2, 3, 4), (4, 2, 3), (2, 3)]),
    ("ij,ij->", [(2, 3)] * 2), ("b...,b->b...", [(2, 3, 4), (2,)]),
]:  # fmt: skip
    add("Einsum", equation, shapes, lambda *x, e=equation: torch.einsum(e, *x), equation=equation)
add("Det", "matrix", [(3, 3)], torch.linalg.det)
add("Det", "batch", [(2, 2, 4, 4)], torch.linalg.det)

# --------------------------------------------------------------------------------------
# Indexing


def onto(shape: Sequence[int], dim: int, index: Tensor) -> Tensor:
    """An index for take_along_dim-like functions, negative positions counted from the end."""
    return torch.where(index < 0, index + shape[dim], index)


def flat_rows(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """ScatterND's target as rows, and the row of every update, as positions like those of the rows."""
    depth = index.shape[-1]
    place = torch.zeros(index.shape[:-1], dtype=torch.int64)
    for i in range(depth):
        place = place * x.shape[i] + index[..., i]
    rows = x.reshape(math.prod(x.shape[:depth]), -1)
    return rows, place.reshape(-1, 1).expand(-1, rows.shape[1])


add("Gather", "embedding, repeated", [(5, 4), Ints((2, 6), 0, 5)], lambda x, i: F.embedding(i, x))
add("Gather", "axis 1", [S, Ints((2, 2), 0, 3)], lambda x, i: x[:, i], axis=1)
add("Gather", "negative", [S, exact([-1, 0, -4, -1])], lambda x, i: x[..., i], axis=-1)
add("Gather", "scalar index", [S, exact(1)], lambda x, i: x[:, i], axis=1)
add("Gather", "one row a thousand times", [(3, 2), exact([1] * 1000)], lambda x, i: F.embedding(i, x))
add("GatherElements", "axis 1", [S, Ints((2, 5, 4), 0, 3)], lambda x, i: x.gather(1, i), axis=1)
add("GatherElements", "negative", [(3, 4), exact([[-1, 0], [-4, 2], [3, -1]])],
    lambda x, i: x.gather(1, onto(x.shape, 1, i)), axis=-1)  # fmt: skip
add("GatherElements", "smaller than the data", [(3, 4), Ints((2, 3), 0, 3)], lambda x, i: x.gather(0, i))
add("GatherND", "elements", [(3, 4), exact([[0, 1], [2, 3], [0, 1], [-1, -1]])], lambda x, i: x[i[:, 0], i[:, 1]])
add("GatherND", "rows", [S, exact([[0, 1], [1, 2], [0, 1]])], lambda x, i: x[i[:, 0], i[:, 1]])
add(
    "GatherND",
    "batch_dims",
    [S, exact([[[2]], [[0]]])],
    lambda x, i: torch.stack([a[k[:, 0]] for a, k in zip(x, i, strict=True)]),
    batch_dims=1,
)
for note, reduce in [("add", "sum"), ("mul", "prod"), ("max", "amax"), ("min", "amin")]:
    add("ScatterElements", note, [(4, 3), Ints((6, 3), 0, 4), (6, 3)],
        lambda x, i, u, r=reduce: x.scatter_reduce(0, i, u, r), reduction=note)  # fmt: skip
    add("ScatterND", f"{note}, rows", [(4, 3), Ints((2, 3, 1), 0, 4), (2, 3, 3)],
        lambda x, i, u, r=reduce: (lambda rows, at: rows.scatter_reduce(0, at, u.reshape(-1, 3), r).view(4, 3))(
            *flat_rows(x, i)), reduction=note)  # fmt: skip
UNIQUE = exact([[0, 2, 1], [3, 0, 2]])
add("ScatterElements", "replace", [(4, 3), UNIQUE, (2, 3)], lambda x, i, u: x.scatter(0, i, u))
add("ScatterElements", "replace, axis -1, negative", [(2, 4), exact([[-1, 0], [1, -3 + 2]]), (2, 2)],
    lambda x, i, u: x.scatter(1, onto(x.shape, 1, i), u), axis=-1)  # fmt: skip
add("ScatterElements", "mul with zeros", [ZEROS, exact([[0, 0, 0], [1, 0, 2], [0, 2, 1]]), exact(TIES - 1)],
    lambda x, i, u: x.scatter_reduce(0, i, u, "prod"), reduction="mul")  # fmt: skip
add("ScatterElements", "max with ties", [TIES, exact([[0, 0, 0], [1, 0, 2], [0, 2, 1]]), TIES],
    lambda x, i, u: x.scatter_reduce(0, i, u, "amax"), reduction="max")  # fmt: skip
add("ScatterND", "replace elements", [(3, 4), exact([[0, 1], [2, 3], [1, 0]]), (3,)],
    lambda x, i, u: x.index_put((i[:, 0], i[:, 1]), u))  # fmt: skip
add(
    "ScatterND", "replace slices", [(4, 2, 3), exact([[2], [0]]), (2, 2, 3)], lambda x, i, u: x.index_put((i[:, 0],), u)
)
add("ScatterND", "add elements", [(3, 4), exact([[0, 1], [2, 3], [0, 1], [0, 1]]), (4,)],
    lambda x, i, u: x.index_put((i[:, 0], i[:, 1]), u, accumulate=True), reduction="add")  # fmt: skip
add("TopK", "largest", [(3, 6), const(3)], lambda x: x.topk(3))
add("TopK", "smallest, axis 0", [(5, 2), const(2)], lambda x: x.topk(2, 0, largest=False), axis=0, largest=0)
add(
    "ScatterND",
    "mul with zeros",
    [exact([2.0, 0.0, 3.0, 5.0]), exact([[0], [0], [1], [2], [2], [3]]), exact([0.0, 4.0, 0.0, 0.0, 0.0, 6.0])],
    lambda x, i, u: x.scatter_reduce(0, i[:, 0], u, "prod"),
    reduction="mul",
)
add("Compress", "axis 1", [S, Const(np.array([True, False, True]))],
    lambda x: x[:, [True, False, True]], axis=1)  # fmt: skip

# --------------------------------------------------------------------------------------
# Movement of data

add("Slice", "steps", [(5, 6), const(1, 0), const(5, 6), const(0, 1), const(2, 3)], lambda x: x[1:5:2, ::3])
add("Slice", "backwards", [(5, 6), const(-1), const(-100), const(1), const(-2)], lambda x: x.flip(1)[:, ::2])
add("Slice", "negative ends", [S, const(-3, 0), const(-1, 2), const(-1, 1)], lambda x: x[:, :2, -3:-1])
add("Pad", "constant", [S, const(0, 1, 2, 1, 0, 1)], lambda x: F.pad(x, (2, 1, 1, 0, 0, 1)))
add("Pad", "negative", [S, const(0, -1, 2, 1, 0, -1)], lambda x: F.pad(x, (2, -1, -1, 0, 0, 1)))
add("Pad", "axes, value", [S, const(1, 2), number(0.5), const(-1)], lambda x: F.pad(x, (1, 2), value=0.5))
for mode, theirs in [("reflect", "reflect"), ("edge", "replicate"), ("wrap", "circular")]:
    add("Pad", mode, [(2, 2, 4, 5), const(0, 0, 2, 3, 0, 0, 1, 2)], lambda x, m=theirs: F.pad(x, (3, 2, 2, 1), mode=m),
        mode=mode)  # fmt: skip
    add("Pad", f"{mode}, one dimension", [(1, 2, 4), const(0, 0, 3, 0, 0, 1)], lambda x, m=theirs: F.pad(x, (3, 1), m),
        mode=mode)  # fmt: skip
add("Concat", "axis 1", [(2, 1, 3), (2, 2, 3), (2, 3, 3)], lambda *x: torch.cat(x, 1), axis=1)
add("Concat", "axis -1, one empty", [(2, 2), (2, 0), (2, 1)], lambda *x: torch.cat(x, -1), axis=-1)
add("Split", "lengths", [(2, 6), const(1, 3, 2)], lambda x: x.split([1, 3, 2], 1), axis=1)
add("Split", "uneven chunks", [(7, 2)], lambda x: x.split(3), num_outputs=3)
add("Trilu", "upper", [(2, 4, 4)], torch.triu)
add("Trilu", "lower, k -1", [(3, 5), scalar(-1)], lambda x: x.tril(-1), upper=0)
add("Trilu", "upper, k 2", [(4, 3), scalar(2)], lambda x: x.triu(2))
add("Expand", "", [(3, 1), const(2, 1, 4)], lambda x: x.expand(2, 3, 4))
add("Tile", "", [(2, 3), const(2, 3)], lambda x: x.tile(2, 3))
add("Tile", "three dimensions", [(2, 1, 3), const(1, 4, 2)], lambda x: x.tile(1, 4, 2))
add("DepthToSpace", "CRD", [(2, 8, 2, 3)], lambda x: F.pixel_shuffle(x, 2), blocksize=2, mode="CRD")
add(
    "DepthToSpace",
    "DCR",
    [(2, 8, 2, 3)],
    lambda x: F.pixel_shuffle(x.unflatten(1, (4, 2)).transpose(1, 2).flatten(1, 2), 2),
    blocksize=2,
)
add(
    "SpaceToDepth",
    "",
    [(2, 2, 4, 6)],
    lambda x: F.pixel_unshuffle(x, 2).unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2),
    blocksize=2,
)
add("Transpose", "", [S], lambda x: x.permute(2, 0, 1), perm=[2, 0, 1])
add("Transpose", "default", [S], lambda x: x.permute(2, 1, 0))
add("Reshape", "0 and -1", [S, const(0, -1)], lambda x: x.flatten(1))
add("Squeeze", "", [(2, 1, 3, 1), const(1, -1)], lambda x: x.squeeze((1, 3)))
add("Unsqueeze", "", [(2, 3), const(0, -1)], lambda x: x[None, ..., None])
add("Flatten", "axis 2", [(2, 3, 4, 2)], lambda x: x.view(6, 8), axis=2)
add("ReverseSequence", "one length for all", [(4, 3), exact([4, 4, 4])], lambda x, n: x.flip(0))
