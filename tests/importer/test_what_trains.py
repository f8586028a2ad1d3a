"""Which tensors of a file train, by what the graph does with them; each is listed with its reason."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array

import recompute as rc


def load(body: str, tensors: dict[str, np.ndarray], *, nodes: bool = False, **options: object) -> rc.Program:
    """A program of x f32[2,6] → y, with tensors as initializers, or as Constant nodes."""
    text = f'<ir_version: 8, opset_import: ["": 17]> g (float[2,6] x) => (float[2,d] y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for name, array in tensors.items():
        if nodes:
            constant = onnx.helper.make_node("Constant", [], [name], value=from_array(array))
            model.graph.node.insert(0, constant)
        else:
            model.graph.initializer.append(from_array(array, name))
    return rc.load(model, **options)


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def listed(program: rc.Program) -> dict[str, bool]:
    return {t.name: t.trains for t in program.tensors}


ONE = np.ones(1, np.float32)
LAYER = "z = MatMul (x, w)  a = Add (z, b)  n = Mul (a, g)  y = Add (n, h)"


def test_weights_in_constant_nodes_train_as_initializers_do() -> None:
    """Paddle's files: the bias and the scale of a written-out normalisation are Constant nodes as the matrix is."""
    tensors = {"w": weight(6, 4), "b": weight(4), "g": np.ones(4, np.float32), "h": np.zeros(4, np.float32)}
    program, same = load(LAYER, tensors, nodes=True), load(LAYER, tensors)
    assert listed(program) == dict.fromkeys("wbgh", True) == listed(same)
    assert {v.name for v in program.parameters} == set("wbgh")
    exported = rc.export_trained(program)
    assert {t.name for t in exported.graph.initializer} == set("wbgh")


def test_single_numbers_with_paddle_s_names_of_parameters_train() -> None:
    """A learnt scale and shift of a whole layer; constants of an activation have made-up names."""
    body = "z = MatMul (x, w)  a = Mul (z, lab.w_0)  c = Add (a, lab.w_1)  d = Add (c, p.3)  y = Div (d, p.6)"
    for name in ("lab.w_0", "lab.w_1", "p.3", "p.6"):
        body = body.replace(name, f'"{name}"')
    held = {"lab.w_0": ONE, "lab.w_1": ONE, "p.3": 3 * ONE, "p.6": 6 * ONE}
    assert listed(load(body, {"w": weight(6, 4), **held}, nodes=True)) == {
        "w": True, "lab.w_0": True, "lab.w_1": True, "p.3": False, "p.6": False,
    }  # fmt: skip


def test_a_bias_in_a_constant_node_stays_where_weights_are_initializers() -> None:
    text = f"b = Constant <value = float[4] {{1, 2, 3, 4}}> () {LAYER}"
    program = load(text, {"w": weight(6, 4), "g": weight(4), "h": weight(4)})
    assert listed(program) == {"w": True, "b": False, "g": True, "h": True}


@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize(
    ("body", "tensors"),
    [
        ("z = MatMul (x, w)  q = Div (z, k)  e = Erf (q)  p = Add (e, k1)  m = Mul (z, p)  y = Mul (m, k2)",
         {"k": ONE, "k1": ONE, "k2": ONE}),  # GELU
        ("z = MatMul (x, w)  y = Max (z, k)", {"k": np.zeros(4, np.float32)}),
        ("z = MatMul (x, w)  n = Min (z, k)  y = Max (n, k1)", {"k": 6 * ONE, "k1": 0 * ONE}),
        ("z = MatMul (x, w)  s = Mul (z, k)  y = Softmax (s)", {"k": ONE[None]}),  # the scale of attention
        ("z = MatMul (x, w)  y = Pow (z, k)", {"k": 2 * ONE}),
        ("z = MatMul (x, w)  s = Mul (z, z)  e = Add (s, k)  y = Sqrt (e)", {"k": 1e-5 * ONE}),
    ],
)  # fmt: skip
def test_constants_of_activations_bounds_and_scales_do_not_train(body: str, tensors: dict, nodes: bool) -> None:
    program = load(body, {"w": weight(6, 4), **tensors}, nodes=nodes)
    assert listed(program) == {"w": True, **dict.fromkeys(tensors, False)}
    named = load(body, {"w": weight(6, 4), **tensors}, nodes=nodes, trainable=["w", "k"])
    assert listed(named)["k"]


@pytest.mark.parametrize("nodes", [False, True])
def test_the_bias_of_one_output_trains(nodes: bool) -> None:
    program = load("z = MatMul (x, w)  y = Add (z, b)", {"w": weight(6, 1), "b": ONE}, nodes=nodes)
    assert listed(program) == {"w": True, "b": True}


@pytest.mark.parametrize("nodes", [False, True])
def test_the_scale_of_frozen_integers_does_not_train(nodes: bool) -> None:
    tensors = {"wq": np.ones((6, 4), np.int8), "s": weight(4), "b": weight(4), "w": weight(4, 4)}
    body = "v = DequantizeLinear <axis = 1> (wq, s)  z = MatMul (x, v)  a = Add (z, b)  y = MatMul (a, w)"
    program = load(body, tensors, nodes=nodes)
    assert listed(program) == {"wq": False, "s": False, "b": True, "w": True}
    assert {t.name: t.why for t in program.tensors}["s"] == "a scale of integers, which do not train"


def test_every_tensor_is_listed_also_what_is_read_at_load_or_not_at_all() -> None:
    body = "r = Reshape (x, shape)  i = Resize (r, , sizes)  f = Reshape (i, flat)  y = MatMul (f, w)"
    tensors = {"shape": np.array([1, 1, 2, 6]), "sizes": np.array([1, 1, 1, 2], np.float32),
               "flat": np.array([2, -1]), "w": weight(12, 4), "spare": weight(3)}  # fmt: skip
    program = load(body, tensors)
    assert listed(program) == {"w": True, "sizes": False, "spare": False}
    assert [t.why for t in program.tensors[1:]] == ["read when the model is loaded", "nothing reads it"]
