"""The random stream: the same bits from NumPy's generator, from plain integers, and in ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import recompute as rc
from recompute.language.op import Op, op_class
from recompute.language.types import TensorType
from recompute.ops.random.philox import stream
from recompute.runtime import EmulatedCUDAPlace
from recompute.runtime.cuda.device import emulator
from recompute.testing import Case, case_block, evaluate

WORD = (1 << 64) - 1


def cipher(seed: int, step: int, counter: int) -> list[int]:
    """Philox4x64-10 on Python's integers, from the paper."""
    c, k = [counter, 0, 0, 0], [seed, step]
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [p1 >> 64 ^ c[1] ^ k[0], p1 & WORD, p0 >> 64 ^ c[3] ^ k[1], p0 & WORD]
        k = [k[0] + 0x9E3779B97F4A7C15 & WORD, k[1] + 0xBB67AE8584CAA73B & WORD]
    return c


def numbers(seed: int, step: int, count: int) -> np.ndarray:
    halves = [h for b in range(-(-count // 8)) for w in cipher(seed, step, b + 1) for h in (w & 0xFFFFFFFF, w >> 32)]
    return np.array([(h >> 8) / 2**24 for h in halves[:count]], np.float32)


KEYS = [(0, 0), (1, 2), (2**62 + 5, 2**40 + 3), (5, -3)]


@pytest.mark.parametrize(("seed", "step"), KEYS)
def test_stream_is_philox(seed: int, step: int) -> None:
    want = numbers(seed, step & WORD, 37)
    got = np.empty(37, np.float32)
    fill = stream(seed, np.array(step))
    fill(got[:16])
    fill(got[16:])
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("place", [None, "emulated"])
def test_a_ratio_between_two_numbers_of_the_stream_drops_the_lower_one(place: str | None) -> None:
    """Native code compares integers: a ratio of 24 bits and a half must be rounded up to one."""
    if place and not emulator.compiler():
        pytest.skip("the emulated device needs a C++ compiler (or $CXX)")
    drawn = (numbers(9, 3, 1 << 15).astype(np.float64) * 2**24).astype(np.int64)
    at = int(np.flatnonzero(drawn < 1 << 23)[7])
    x = np.ones(drawn.size, np.float32)
    for ratio, kept in ((drawn[at] + 0.5, False), (float(drawn[at]), True)):
        block, feed = case_block(Case(op_class("Dropout")(ratio=ratio / 2**24, seed=9), (x, np.array(3)), want=1))
        executor = rc.Executor(EmulatedCUDAPlace() if place else None)
        (y,) = executor.run(rc.Program(block, {}), feed, ["y0"])
        assert bool(y[at]) is kept
        np.testing.assert_array_equal(y != 0, drawn >= ratio)


def test_dropout_repeats_and_its_gradient_has_the_same_mask() -> None:
    op = op_class("Dropout")(ratio=0.25, seed=9)
    x = np.random.default_rng(0).normal(size=(40, 1000)).astype(np.float32)
    block, feed = case_block(Case(op, (x, np.array(3))))
    (y, mask), (again, _) = evaluate(block, feed), evaluate(block, feed)
    assert y.tobytes() == again.tobytes()
    np.testing.assert_array_equal(y, np.where(mask, x * np.float32(1 / 0.75), 0))
    assert abs(mask.mean() - 0.75) < 4 * np.sqrt(0.25 * 0.75 / mask.size)
    other = evaluate(block, {**feed, "x1": np.array(4)})[1]
    assert 0.5 < (other == mask).mean() < 0.75


def test_normal_has_the_moments() -> None:
    block, feed = case_block(
        Case(op_class("RandomNormal")(shape=(100_000,), mean=1.0, scale=2.0, seed=1), (np.array(0),))
    )
    (z,) = evaluate(block, feed)
    assert abs(z.mean() - 1) < 0.03 and abs(z.std() - 2) < 0.03


def in_onnxruntime(op: Op, inputs: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """The operator's ONNX function, run by ONNX Runtime."""
    ort = pytest.importorskip("onnxruntime")
    from recompute.exporter.step import DOMAIN, OPSET, function_of

    types = [TensorType.of(a) for a in inputs]
    results = op.infer(*types)

    def infos(letter: str, found: Any) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(f"{letter}{i}", helper.np_dtype_to_tensor_dtype(t.numpy), t.shape)
            for i, t in enumerate(found)
        ]

    names = [f"x{i}" for i in range(len(types))], [f"y{i}" for i in range(len(results))]
    model = helper.make_model(
        helper.make_graph([helper.make_node("F", *names, domain=DOMAIN)], "g", infos("x", types), infos("y", results)),
        functions=[function_of(op, types, [True] * len(results), "F")],
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names[0], inputs, strict=True)))


X = np.random.default_rng(0).normal(size=(7, 33)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "options", "inputs", "exact"),
    [
        ("Dropout", {"ratio": 0.3, "seed": 2**62 + 5}, (X,), True),
        ("Dropout", {"ratio": 0.5}, (X.astype(np.float64),), True),
        ("Dropout", {"ratio": 0.5}, (X[:0],), True),
        ("Bernoulli", {"dtype": "f32", "seed": 4}, (abs(X),), True),
        ("RandomUniform", {"shape": (5, 7), "seed": 4, "low": -1.0}, (), True),
        ("RandomNormal", {"shape": (5, 7), "seed": 4}, (), False),
        ("RandomNormal", {"shape": (3, 5), "seed": 4, "mean": 2.0, "scale": 0.5, "dtype": "f64"}, (), False),
        ("RandomUniform", {"shape": (3, 2), "seed": 4, "low": 2.0, "high": 2.5, "dtype": "f16"}, (), True),
        ("RandomUniform", {"shape": (0, 2), "seed": 4}, (), True),
        ("RandomNormal", {"shape": (8,), "seed": 4}, (), False),
        ("Dropout", {"seed": 5, "first": 13}, (X,), True),
        ("RandomNormal", {"shape": (5, 7), "seed": 4, "first": 3}, (), False),
        ("Bernoulli", {"dtype": "i32", "seed": 4}, (abs(X[:0]),), True),
        ("Bernoulli", {"dtype": "f64", "seed": 4}, (abs(X.astype(np.float64)),), True),
    ],
)
def test_same_bits_in_onnxruntime(name: str, options: dict[str, Any], inputs: tuple, exact: bool) -> None:
    op = op_class(name)(**options)
    inputs = (*inputs, np.array(2**40 + 3))
    block, feed = case_block(Case(op, inputs))
    for got, want in zip(in_onnxruntime(op, inputs), evaluate(block, feed), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        if exact:
            assert got.tobytes() == want.tobytes()
        else:
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def dropout_model(opset: int, outputs: int = 1, ratio: float = 0.5) -> onnx.ModelProto:
    """y = Dropout(x), with the ratio in the form of the opset."""
    if opset >= 12:
        inits = [onnx.numpy_helper.from_array(np.float32(ratio).reshape(()), "r")]
        node = helper.make_node("Dropout", ["x", "r"], ["y", "m"][:outputs], name="d")
    else:
        inits, node = [], helper.make_node("Dropout", ["x"], ["y", "m"][:outputs], name="d", ratio=ratio)
    infos = [
        helper.make_tensor_value_info("y", 1, [4, 50]),
        helper.make_tensor_value_info("m", onnx.TensorProto.BOOL, [4, 50]),
    ]
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", 1, [4, 50])], infos[:outputs], inits)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("opset", [10, 13, 21])
def test_dropout_from_onnx(opset: int) -> None:
    x = np.ones((4, 50), np.float32)
    model = dropout_model(opset)
    (y,) = rc.Executor().run(rc.load(model, mode="train"), {"x": x}, ["y"])
    assert set(np.unique(y)) == {0.0, 2.0}
    (again,) = rc.Executor().run(rc.load(model, mode="train"), {"x": x}, ["y"])
    assert y.tobytes() == again.tobytes()
    (other,) = rc.Executor().run(rc.load(model, mode="train", seed=1), {"x": x}, ["y"])
    assert y.tobytes() != other.tobytes()
    (same,) = rc.Executor().run(rc.load(model, mode="eval"), {"x": x}, ["y"])
    np.testing.assert_array_equal(same, x)


def test_what_is_drawn_has_no_gradient_by_its_inputs() -> None:
    for name, count in (("Bernoulli", 2), ("RandomUniform", 1)):
        options = {"dtype": "f32"} if count == 2 else {"shape": (3,)}
        assert op_class(name)(**options).gradient(None, [None] * count, [None], [None]) == [None] * count


def test_dropout_mask_from_onnx() -> None:
    for outputs in (1, 2):  # a mask that nobody wants is not made
        (op,) = [o for o in rc.load(dropout_model(21, outputs)).operators if o.op.name == "Dropout"]
        assert len(op.outputs) == outputs
    x = np.ones((4, 50), np.float32)
    y, m = rc.Executor().run(rc.load(dropout_model(21, 2)), {"x": x}, ["y", "m"])
    np.testing.assert_array_equal(y > 0, m)
    y, m = rc.Executor().run(rc.load(dropout_model(21, 2), mode="eval"), {"x": x}, ["y", "m"])
    assert m.all() and (y == x).all()


@pytest.mark.parametrize(
    ("kind", "attributes", "expected"),
    [
        ("RandomUniform", {"shape": [2, 3]}, {"shape": (2, 3), "dtype": "f32", "low": 0.0, "high": 1.0}),
        ("RandomUniform", {"shape": [4], "dtype": 11, "low": -2.0, "high": -1.0},
         {"shape": (4,), "dtype": "f64", "low": -2.0, "high": -1.0}),
        ("RandomNormal", {"shape": [2, 3], "mean": 1.5, "scale": 0.25},
         {"shape": (2, 3), "dtype": "f32", "mean": 1.5, "scale": 0.25}),
        ("RandomNormal", {"shape": [7], "dtype": 10}, {"shape": (7,), "dtype": "f16", "mean": 0.0, "scale": 1.0}),
        ("RandomUniformLike", {"high": 3.0}, {"shape": (5, 2), "dtype": "f64", "low": 0.0, "high": 3.0}),
        ("RandomUniformLike", {"dtype": 1}, {"shape": (5, 2), "dtype": "f32", "low": 0.0, "high": 1.0}),
        ("RandomNormalLike", {"mean": -1.0}, {"shape": (5, 2), "dtype": "f64", "mean": -1.0, "scale": 1.0}),
        ("RandomNormalLike", {"dtype": 1}, {"shape": (5, 2), "dtype": "f32", "mean": 0.0, "scale": 1.0}),
        ("Bernoulli", {}, {"dtype": "f64"}),
        ("Bernoulli", {"dtype": 9}, {"dtype": "bool"}),
    ],
)  # fmt: skip
def test_drawing_from_onnx(kind: str, attributes: dict[str, Any], expected: dict[str, Any]) -> None:
    reads = ["x"] if kind.endswith("Like") or kind == "Bernoulli" else []
    nodes = [
        helper.make_node(kind, reads, ["y"], name="draw", **attributes),
        helper.make_node("Cast", ["y"], ["z"], to=1),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 11, [5, 2])], [helper.make_tensor_value_info("z", 1, None)]
    )
    program = rc.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    (op,) = [o for o in program.operators if o.op.random]
    found = vars(op.op)
    assert op.op.name == kind.removesuffix("Like") and {k: found[k] for k in expected} == expected
    (z,) = rc.Executor().run(program, {"x": np.full((5, 2), 0.5)}, ["z"])
    assert z.shape == expected.get("shape", (5, 2)) and np.isfinite(z).all()
    types = [v.type for v in op.reads()]
    assert op.outputs[0] is not None and (op.outputs[0].type,) == op.op.infer(*types)


@pytest.mark.parametrize("shape", [(4099,), (3, 700, 2), (1,)])
def test_drawing_in_tiles_is_drawing_at_once(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers follow one another from tile to tile: uniform, normal (two each), and comparisons with them."""
    size, step = int(np.prod(shape)), np.array(6)
    u = numbers(11, 6, 2 * size)
    monkeypatch.setattr("recompute.language.ir._workspace", lambda op, ins, outs: op.scratch(ins, outs))  # not kept
    for tile in (64, 1 << 20):
        monkeypatch.setattr("recompute.ops.random.draws.TILE", tile)
        block, feed = case_block(Case(op_class("RandomUniform")(shape=shape, low=-1.0, high=2.0, seed=11), (step,)))
        want = (u[:size] * np.float32(3) + np.float32(-1)).reshape(shape)
        np.testing.assert_array_equal(evaluate_own(block, feed), want)
        block, feed = case_block(Case(op_class("RandomNormal")(shape=shape, mean=1.0, scale=2.0, seed=11), (step,)))
        radius, angle = u[0::2].astype(np.float64), u[1::2].astype(np.float64)
        want = 1 + 2 * np.sqrt(-2 * np.log(1 - radius)) * np.cos(2 * np.pi * angle)
        np.testing.assert_allclose(evaluate_own(block, feed).reshape(-1), want, rtol=0, atol=1e-5)
        p = np.linspace(0, 1, size, dtype=np.float32).reshape(shape)
        p.flat[: size // 2] = u[: size // 2]
        block, feed = case_block(Case(op_class("Bernoulli")(dtype="f32", seed=11), (p, step)))
        np.testing.assert_array_equal(evaluate_own(block, feed).reshape(-1), u[:size] < p.reshape(-1))
        block, feed = case_block(Case(op_class("Dropout")(ratio=0.25, seed=11), (p, step)))
        np.testing.assert_array_equal(
            evaluate_own(block, feed).reshape(-1), p.reshape(-1) * np.float32(4 / 3) * (u[:size] >= 0.25)
        )


def evaluate_own(block: rc.Block, feed: dict[str, np.ndarray]) -> np.ndarray:
    """The first output by the operator's own numerics."""
    (op,) = block.operators
    outs = [None if v is None else np.full(v.shape, 77, v.type.numpy) for v in op.outputs]
    ins = [feed[v.name] for v in op.reads()]
    scratch = [np.full(t.shape, 77, t.numpy) for t in op.workspace()]
    op.op.compute(ins, outs, scratch)  # type: ignore[arg-type]
    assert outs[0] is not None
    return outs[0]


@pytest.mark.parametrize(
    ("name", "options", "types", "why"),
    [
        ("Dropout", {"ratio": 1.0}, "f32[4] i64[]", "ratio must be in [0, 1), not 1.0"),
        ("Dropout", {"ratio": -0.1}, "f32[4] i64[]", "ratio must be in [0, 1), not -0.1"),
        ("Dropout", {"ratio": 0.0}, "f32[4] i32[]", "the step counter must be i64[]"),
        ("Dropout", {}, "f32[4] i64[1]", "the step counter must be i64[]"),
        ("Bernoulli", {"dtype": "f32"}, "f32[4] f32[]", "the step counter must be i64[]"),
        ("RandomNormal", {"shape": (2,)}, "i32[]", "the step counter must be i64[]"),
    ],
)
def test_types_that_are_refused(name: str, options: dict[str, Any], types: str, why: str) -> None:
    with pytest.raises(rc.errors.TypeRuleError) as e:
        op_class(name)(**options).infer(*map(TensorType.parse, types.split()))
    assert why in str(e.value)
    assert op_class("Dropout")(ratio=0.0).infer(TensorType.parse("f32[4]"), TensorType.parse("i64[]"))


def test_streams_go_on_where_they_were() -> None:
    want, got = numbers(5, 2, 41), np.empty(41, np.float32)
    fill = stream(5, np.array(2))
    for start, end in ((0, 8), (8, 24), (24, 41)):
        fill(got[start:end])
    assert got.tobytes() == want.tobytes()
    late = np.empty(20, np.float32)
    fill = stream(5, np.array(2), 13)
    fill(late[:8])
    fill(late[8:])
    assert late.tobytes() == want[13:33].tobytes()


@pytest.mark.parametrize("place", [None, "emulated"])
@pytest.mark.parametrize("first", [24, 13])
def test_a_slice_draws_what_the_whole_draws(place: str | None, first: int) -> None:
    """By kernels, wherever in a block of eight the slice begins."""
    if place and not emulator.compiler():
        pytest.skip("the emulated device needs a C++ compiler (or $CXX)")
    size, step = 1 << 15, np.array(3)
    x = np.linspace(0.1, 0.9, size + first, dtype=np.float32)

    def drawn(name: str, begin: int, *inputs: Any, **options: Any) -> np.ndarray:
        op = op_class(name)(seed=9, first=begin, **options)
        block, feed = case_block(Case(op, (*inputs, step), want=1))
        where = EmulatedCUDAPlace() if place else None
        return rc.Executor(where).run(rc.Program(block), feed, list(block.outputs))[0]

    for name, options in (("Dropout", {}), ("Bernoulli", {"dtype": "f32"})):
        whole = drawn(name, 0, x, **options)
        assert drawn(name, first, x[first:].copy(), **options).tobytes() == whole[first:].tobytes(), name
    for name in ("RandomUniform", "RandomNormal"):
        whole = drawn(name, 0, shape=(size + first,))
        assert drawn(name, first, shape=(size,)).tobytes() == whole[first:].tobytes(), name


def test_what_a_text_without_attributes_means() -> None:
    """Attributes that are not written are these, in files of last year too."""
    drawn = {"seed": 0, "first": 0}
    assert vars(op_class("Dropout")()) == {"ratio": 0.5, **drawn}
    assert vars(op_class("RandomUniform")((2,))) == {"shape": (2,), "dtype": "f32", "low": 0.0, "high": 1.0, **drawn}
    assert vars(op_class("RandomNormal")((2,))) == {"shape": (2,), "dtype": "f32", "mean": 0.0, "scale": 1.0, **drawn}
    assert vars(op_class("Bernoulli")("f32")) == {"dtype": "f32", **drawn}
