"""A query from which its masks hide everything: the file's value on every path.

Where all scores are the same number, softmax weighs all keys alike: the result is the mean of the values.  Numbers
that are added so far below 0 that the score is lost in rounding do the same, those that are added twice weigh nothing.
Expected values are float64 by that definition.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import recompute as rc

N, H, T, E = 3, 2, 5, 4
LOW = -1e38
#: form → nodes that make `m` from scores `s` [N, H, T, T] and `hide` [N, 1, 1, T], the same for float64
CAUSAL = np.triu(np.ones((T, T), bool), 1)
_NEVER = np.zeros((T, T), bool)


def _node(kind: str, ins: str, out: str, **options: Any) -> onnx.NodeProto:
    return helper.make_node(kind, ins.split(), [out], **options)


_ADDED = [_node("Cast", "hide", "number", to=1), _node("Mul", "number low", "bias")]
FORMS: dict[str, tuple[list[onnx.NodeProto], Any]] = {
    "where": ([_node("Where", "hide low s", "m")], lambda s, h: np.where(h, LOW, s)),
    "where, a little": ([_node("Where", "hide small s", "m")], lambda s, h: np.where(h, -2e4, s)),
    "where, then where": (
        [_node("Where", "hide small s", "a"), _node("Where", "causal low a", "m")],
        lambda s, h: np.where(CAUSAL, LOW, np.where(h, -2e4, s)),
    ),
    "added": ([*_ADDED, _node("Add", "s bias", "m")], lambda s, h: s + h * LOW),
    "chosen and added": (
        [_node("Where", "hide low zero", "bias"), _node("Add", "s bias", "m")],
        lambda s, h: s + np.where(h, LOW, 0),
    ),
    "causal or hidden": (
        [_node("Or", "hide causal", "both"), _node("Where", "both low s", "m")],
        lambda s, h: np.where(h | CAUSAL, LOW, s),
    ),
    "causal or hidden, added": (
        [_node("Or", "hide causal", "both"), _node("Where", "both low zero", "bias"), _node("Add", "s bias", "m")],
        lambda s, h: s + np.where(h | CAUSAL, LOW, 0),
    ),
    "causal, then added": (
        [_node("Where", "causal low s", "a"), *_ADDED, _node("Add", "a bias", "m")],
        lambda s, h: np.where(CAUSAL, LOW, s) + h * LOW,
    ),
    "hidden, then a bias": (
        [_node("Where", "hide low s", "a"), _node("Add", "a learned", "m")],
        lambda s, h: np.where(h, LOW, s + LEARNED),
    ),
}
RNG = np.random.default_rng(4)
W, WQ = (RNG.standard_normal((E, E)).astype(np.float32) for _ in range(2))
LEARNED = RNG.standard_normal((H, T, T)).astype(np.float32)
X = RNG.standard_normal((N, H, T, E)).astype(np.float32)
HIDE = np.zeros((N, 1, 1, T), bool)
HIDE[1], HIDE[2, ..., :3] = True, True  # all of one sample; the first three keys, as padding on the left does


def _model(form: str) -> onnx.ModelProto:
    made = onnx.numpy_helper.from_array
    nodes = [
        _node("MatMul", "x wq", "q"),
        _node("MatMul", "x w", "v"),
        _node("Transpose", "x", "kt", perm=[0, 1, 3, 2]),
        _node("MatMul", "q kt", "s"),
        *FORMS[form][0],
        _node("Softmax", "m", "p", axis=-1),
        _node("MatMul", "p v", "y"),
    ]
    scalars = (("low", LOW), ("small", -2e4), ("zero", 0))
    held = [made(np.array(n, np.float32), name) for name, n in scalars]
    held += [made(a, n) for n, a in (("wq", WQ), ("w", W), ("learned", LEARNED), ("causal", CAUSAL))]
    value = helper.make_tensor_value_info
    inputs = [value("x", 1, ["N", H, T, E]), value("hide", 9, ["N", 1, 1, T])]
    graph = helper.make_graph(nodes, "g", inputs, [value("y", 1, ["N", H, T, E])], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@functools.cache
def _expected(form: str) -> tuple[np.ndarray, np.ndarray]:
    """y, and the gradient of W of the mean of y², by the definition."""
    x, w = X.astype(np.float64), W.astype(np.float64)
    with np.errstate(over="ignore"):
        m = FORMS[form][1](x @ WQ.astype(np.float64) @ x.swapaxes(-1, -2), HIDE)
    p = np.exp(m - m.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    y = p @ (x @ w)
    return y, np.einsum("nhte,nhtf->ef", p @ x, 2 * y / y.size)


@pytest.mark.parametrize("how", ["numpy", "native", "device"])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_is_the_file(form: str, how: str) -> None:
    program = rc.load(_model(form), batch=N)
    rc.SGD(1.0).minimize(rc.losses.mse(program))
    assert any(o.op.name == "TiledAttention" for o in program.block.operators)
    place = rc.EmulatedCUDAPlace() if how == "device" else None
    executor = rc.Executor(place, **({"providers": "numpy"} if how == "numpy" else {}))
    label = next(v.name for v in program.inputs if v.name not in ("x", "hide"))
    given = {"x": X, "hide": HIDE}
    before = program.evaluate(given, ["y"])[0]
    (y,) = executor.run(program, {**given, label: np.zeros_like(X)}, ["y"])
    want, gradient = _expected(form)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(before, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(W - np.asarray(program.data["w"]), gradient, rtol=1e-3, atol=1e-5)
