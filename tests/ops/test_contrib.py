"""com.microsoft's operators: against what ONNX Runtime computes (tests/data/contrib.npz), and plain formulas."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from contrib_cases import case, cases, f
from onnx import helper

import recompute as rc
from recompute import models
from recompute.exporter.trained import export_trained

CASES = cases()


def run(source: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return rc.Executor().run(rc.load(source), feed, [o.name for o in source.graph.output])


@pytest.fixture(scope="module")
def theirs() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "data/contrib.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", CASES)
def test_as_onnx_runtime_computes_it(name: str, theirs: dict[str, np.ndarray]) -> None:
    for i, mine in enumerate(run(*CASES[name])):
        want = theirs.get(f"{name}/{i}")
        if want is not None:
            assert mine.shape == want.shape and mine.dtype == want.dtype
            near = 2e-5 if name.startswith(("MatMulNBits", "MatMulBnb4")) else 2e-6  # of the largest: sums cancel
            if name.startswith("DynamicQuantizeLSTM"):
                near = 1e-2  # it rounds input and states to 8 bits
            near *= max(1.0, float(np.abs(want).max(initial=0))) if np.asarray(want).dtype.kind == "f" else 1.0
            np.testing.assert_allclose(mine, want, rtol=2e-5, atol=near)


@pytest.mark.parametrize("name", [n for n in CASES if "ttention" in n and n != "QAttention"])
def test_attention_is_found_in_them(name: str, theirs: dict[str, np.ndarray]) -> None:
    """As one operator it computes the same; a score whose weight goes nowhere (a sink) it has not."""
    source, feed = CASES[name]
    program = rc.load(source)
    (note,) = rc.fuse_attention(program)
    assert ("a Slice reads its weights" if name.endswith(("sink", "smooth")) else "' is attention") in note
    (mine, *_) = rc.Executor(providers=("numpy",)).run(program, feed, [source.graph.output[0].name])
    np.testing.assert_allclose(mine, theirs[f"{name}/0"], rtol=2e-5, atol=2e-6 * max(1.0, float(np.abs(mine).max())))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def group_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, groups: int) -> np.ndarray:
    n, h, w, c = x.shape
    parts = x.reshape(n, h * w, groups, c // groups).astype(np.float64)
    mean, var = (s(parts, axis=(1, 3), keepdims=True) for s in (np.mean, np.var))
    return ((parts - mean) / np.sqrt(var + 1e-5)).reshape(x.shape) * gamma + beta


def test_what_has_no_kernel_on_the_cpu() -> None:
    x, bias, skip = f(2, 3, 8), f(8), f(2, 3, 8)
    (y,) = run(*case("BiasSplitGelu", [x, bias]))
    np.testing.assert_allclose(y, (x + bias)[..., :4] * gelu((x + bias)[..., 4:]), rtol=1e-5, atol=1e-6)
    (y,) = run(*case("BiasAdd", [x, bias, skip], 1, (0, 2)))
    np.testing.assert_allclose(y, x + bias + skip, rtol=1e-6)
    (y,) = run(*case("BiasSoftmax", [f(2, 3, 4, 5), f(2, 1, 1, 5)], 1, (0, 1), axis=3))
    np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-6)
    image, gamma, beta = f(2, 3, 4, 6), f(6), f(6)
    (y,) = run(*case("GroupNorm", [image, gamma, beta], groups=3, activation=1))
    want = group_norm(image, gamma, beta, 3)
    np.testing.assert_allclose(y, want / (1 + np.exp(-want)), rtol=1e-5, atol=1e-6)
    y, total = run(*case("SkipGroupNorm", [image, gamma, beta, rows := f(2, 6), beta], 2, (0, 3), groups=2))
    np.testing.assert_allclose(total, image + rows[:, None, None] + beta, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y, group_norm(total, gamma, beta, 2), rtol=1e-5, atol=1e-5)
    kernel, b = f(3, 2, 3, 3), f(3)
    (y,) = run(*case("NhwcConv", [f(1, 5, 5, 2), kernel, b], pads=[1, 1, 1, 1]))
    assert y.shape == (1, 5, 5, 3)
    y, mask = run(*case("BiasDropout", [x, bias, skip, np.float32(0.5), np.array(False)], 2, (0, 2)))
    kept = (x + bias) * mask * 2 + skip
    np.testing.assert_allclose(y, kept, rtol=1e-5, atol=1e-6)
    assert 0 < mask.mean() < 1


def test_packed_queries_keys_and_values() -> None:
    m, x, bias = "MultiHeadAttention", f(2, 4, 3, 3, 5), f(45)
    apart = [np.ascontiguousarray(x[..., i, :]).reshape(2, 4, 15) for i in range(3)]
    (want,) = run(*case(m, [*apart, bias], 1, (0, 1, 2), num_heads=3))
    (y,) = run(*case(m, [x, None, None, bias], num_heads=3))
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-7)
    (y,) = run(*case(m, [apart[0], np.ascontiguousarray(x[..., 1:, :]), None, bias], 1, (0, 1), num_heads=3))
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("both", [0, 1])
def test_relative_positions(both: int) -> None:
    table = f(32, 4)
    (y,) = run(*case("RelativePositionBias", [table, np.array([40]), np.array([300])], 1, (), is_bidirectional=both,
                     max_distance=128))  # fmt: skip
    assert y.shape == (1, 4, 40, 300)
    for s, t in [(0, 0), (3, 0), (0, 3), (39, 2), (0, 299), (17, 30), (39, 0)]:
        apart, buckets = t - s, 32 >> both
        first = buckets if both and apart > 0 else 0
        distance = abs(apart) if both else max(-apart, 0)
        exact = buckets // 2
        if distance >= exact:
            far = exact + int(math.log(distance / exact) / math.log(128 / exact) * (buckets - exact))
            distance = min(far, buckets - 1)
        np.testing.assert_array_equal(y[0, :, s, t], table[first + distance])


def test_caches_of_angles_do_not_train() -> None:
    source, _ = CASES["GroupQueryAttention rotary"]
    program = rc.load(source)
    assert not program.parameters and {v.name for v in program.block.buffers} >= {"i7", "i8"}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (case("GroupQueryAttention", [f(1, 2, 8), f(1, 2, 8), f(1, 2, 8), f(1, 2, 3, 4), f(1, 2, 3, 4), f(1), f(1)[0]],
              num_heads=2, kv_num_heads=2), "continues a past"),
        (case("Attention", [f(1, 2, 8), f(8, 24), f(24), f(3, 3)], num_heads=2), "its mask f32.3,3. does not fit"),
        (case("Conv", [f(1, 8, 4, 4), f(8, 8, 3, 3)], domain="com.microsoft.nchwc"), "blocked layout"),
        (case("QMoE", [f(3, 32), f(3, 2), np.ones((2, 16, 16), np.uint8), f(2, 16), None,
                       np.ones((2, 32, 8), np.uint8), f(2, 32)], k=1), "take the model from before it was quantised"),
        (case("FusedConv", [f(1, 2, 4, 4), f(2, 2, 3, 3)], activation="Odd"), "activation 'Odd' is not known"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(made: tuple, why: str) -> None:
    with pytest.raises(rc.ModelError, match=r"node 'o0' \(com.microsoft.*" + why):
        rc.load(made[0])


def feed_of(program: rc.Program) -> dict[str, np.ndarray]:
    g = np.random.default_rng(0)
    return {
        v.name: g.uniform(-1, 1, v.shape).astype(v.value.type.numpy)
        if v.value.type.is_float
        else g.integers(0, 2, v.shape).astype(v.value.type.numpy)
        for v in program.inputs
    }


@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny", "lenet"])
def test_optimized_files_train_as_the_original(name: str, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    source = models.build(name, batch=2, seed=0)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(source.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert any(n.domain == "com.microsoft" for n in optimized.graph.node)
    losses = []
    for model in (source, optimized):
        program = rc.load(model, mode="eval")
        loss = rc.losses.mse(program[source.graph.output[0].name])
        rc.SGD(0.01).minimize(loss)
        feed, executor = feed_of(program), rc.Executor()
        losses.append([float(executor.run(program, feed, [loss])[0]) for _ in range(3)])
        if model is optimized:
            after = export_trained(program)
            assert {n.domain for n in after.graph.node} >= {"com.microsoft"}
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_a_bert_layer_in_fused_operators_has_the_gradients_of_the_plain_one() -> None:
    """Attention, BiasGelu, SkipLayerNormalization against MatMul, Softmax, Gelu, LayerNormalization."""
    n, d = 2, 8
    weights = {"w": f(d, 3 * d), "b": f(3 * d), "g1": f(d), "b1": f(d), "u": f(d, 16), "ub": f(16), "v": f(16, d)}
    fused = [
        helper.make_node("Attention", ["x", "w", "b"], ["a"], num_heads=n, domain="com.microsoft"),
        helper.make_node("SkipLayerNormalization", ["a", "x", "g1", "b1"], ["s"], domain="com.microsoft", epsilon=1e-5),
        helper.make_node("MatMul", ["s", "u"], ["m"]),
        helper.make_node("BiasGelu", ["m", "ub"], ["h"], domain="com.microsoft"),
        helper.make_node("MatMul", ["h", "v"], ["y"]),
    ]
    plain = [
        helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["pb"]),
        helper.make_node("Split", ["pb"], ["q", "k", "t"], axis=-1, num_outputs=3),
        *(helper.make_node("Reshape", [i, "shape"], [i + "4"]) for i in "qkt"),
        *(helper.make_node("Transpose", [i + "4"], [i + "h"], perm=p)
          for i, p in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("t", [0, 2, 1, 3]))),
        helper.make_node("MatMul", ["qh", "kh"], ["z"]), helper.make_node("Mul", ["z", "half"], ["zs"]),
        helper.make_node("Softmax", ["zs"], ["sm"]), helper.make_node("MatMul", ["sm", "th"], ["o"]),
        helper.make_node("Transpose", ["o"], ["ot"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["ot", "flat"], ["a"]), helper.make_node("Add", ["a", "x"], ["ax"]),
        helper.make_node("LayerNormalization", ["ax", "g1", "b1"], ["s"], epsilon=1e-5),
        helper.make_node("MatMul", ["s", "u"], ["m"]), helper.make_node("Add", ["m", "ub"], ["mb"]),
        helper.make_node("Gelu", ["mb"], ["h"]), helper.make_node("MatMul", ["h", "v"], ["y"]),
    ]  # fmt: skip
    held = [onnx.numpy_helper.from_array(a, name) for name, a in weights.items()]
    more = {"shape": np.array([0, 0, n, -1]), "flat": np.array([0, 0, -1]), "half": np.float32(0.5)}
    held_plain = [*held, *(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in more.items())]
    results = []
    for nodes, tensors in ((fused, held), (plain, held_plain)):
        graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, [2, 3, d])],
                                  [onnx.ValueInfoProto(name="y")], tensors)  # fmt: skip
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        program = rc.load(helper.make_model(graph, opset_imports=opsets, ir_version=9))
        loss = rc.losses.mse(program["y"])
        rc.SGD(0.1).minimize(loss)
        executor, feed = rc.Executor(), feed_of(program)
        losses = [float(executor.run(program, feed, [loss])[0]) for _ in range(3)]
        results.append((losses, {name: program.data[name] for name in weights}))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    for name in weights:
        np.testing.assert_allclose(results[0][1][name], results[1][1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("op", ["BiasSoftmax", "TorchEmbedding"])
def test_an_absent_input_is_named(op: str) -> None:
    with pytest.raises(rc.ModelError, match="its input 1 is absent"):
        run(*case(op, [f(5, 2), None]))
