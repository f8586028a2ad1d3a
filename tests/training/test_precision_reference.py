"""Mixed precision beside PyTorch's autocast: no further from float32 than PyTorch itself.

tests/data/make_autocast.py says how the references were made; nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import recompute as rc
from recompute.compiling.compiler import compile_step
from recompute.language.builder import Builder, Names
from recompute.language.ir import Block, Value
from recompute.language.types import TensorType

DATA = np.load(Path(__file__).parents[1] / "data" / "autocast.npz")
STEPS, RATE = 6, 0.05
#: unit roundoff
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


def cnn(b: Builder, p: dict[str, Value], x: Value) -> Value:
    x = b.Conv(x, p["conv.w"], p["conv.b"], pads=(1, 1, 1, 1))
    x = b.Relu(b.BatchNormTrain(x, p["bn.w"], p["bn.b"], want=1))
    x = b.MaxPool(x, kernel_shape=(2, 2), strides=(2, 2), want=1)
    x = b.Reshape(x, shape=(x.shape[0], 128))
    return linear(b, p, "out", b.Gelu(linear(b, p, "fc", x)))


def linear(b: Builder, p: dict[str, Value], name: str, x: Value) -> Value:
    if x.ndim == 2:
        return b.Gemm(x, p[f"{name}.w"], p[f"{name}.b"], transB=1)
    return b.Add(b.MatMul(x, p[f"{name}.w"], transB=1), p[f"{name}.b"])


def transformer(b: Builder, p: dict[str, Value], x: Value) -> Value:
    n, t, d = x.shape
    q, k, v = (
        b.Transpose(b.Reshape(linear(b, p, c, x), shape=(n, t, 2, d // 2)), perm=(0, 2, 1, 3)) for c in ("q", "k", "v")
    )
    scores = b.MatMul(q, k, transB=1)
    a = b.MatMul(b.Softmax(b.Mul(scores, b.constant((d // 2) ** -0.5, scores))), v)
    a = linear(b, p, "o", b.Reshape(b.Transpose(a, perm=(0, 2, 1, 3)), shape=x.shape))
    x = b.LayerNormalization(b.Add(x, a), p["ln1.w"], p["ln1.b"])
    h = linear(b, p, "down", b.Gelu(linear(b, p, "up", x)))
    x = b.LayerNormalization(b.Add(x, h), p["ln2.w"], p["ln2.b"])
    return linear(b, p, "out", b.ReduceMean(x, axes=(1,), keepdims=0))


NETWORKS: dict[str, Callable[[Builder, dict[str, Value], Value], Value]] = {"cnn": cnn, "transformer": transformer}


def program_of(name: str) -> tuple[rc.Program, dict[str, np.ndarray]]:
    start = {k.split("/")[1]: DATA[k] for k in DATA.files if k.count("/") == 1 and k.startswith(f"{name}/")}
    feed = {"x": start.pop("x"), "label": start.pop("label")}
    values = {n: Value(n, TensorType.of(a)) for n, a in (*start.items(), ("x", feed["x"]))}
    b = Builder(Names(values))
    out = NETWORKS[name](b, values, values["x"])
    block = Block(
        name, inputs=(values["x"],), parameters=tuple(values[n] for n in start), constants=tuple(b.constants),
        operators=tuple(b.operators), outputs=(out.name,),
    )  # fmt: skip
    program = rc.Program(rc.verify(block), {n: a.copy() for n, a in start.items()})
    rc.losses.cross_entropy(program)
    return program, feed


def first_gradients(name: str, precision: str) -> dict[str, np.ndarray]:
    program, feed = program_of(name)
    optimizer = rc.MixedPrecision(rc.SGD(0.0), precision)
    pairs = optimizer.backward(program["loss"])
    found = rc.Executor().run(program, feed, [g for _, g in pairs])
    assert all(g.dtype == np.float32 for g in found)
    scale = optimizer.get_loss_scaling()
    return {p.name: g / scale for (p, _), g in zip(pairs, found, strict=True)}


def error(found: np.ndarray, wanted: np.ndarray, whole: float) -> float:
    """Relative to the gradient's norm, or to a thousandth of the largest one (a bias before a normalisation has 0)."""
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), whole / 1000))


@pytest.mark.parametrize("precision", UNIT)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_as_close_to_float32_as_autocast(name: str, precision: str) -> None:
    found = first_gradients(name, precision)
    wanted = {n: DATA[f"{name}/fp32/{n}"] for n in found}
    assert len(wanted) == len(program_of(name)[0].parameters)
    whole = max(float(np.linalg.norm(g)) for g in wanted.values())
    for n, g in found.items():
        theirs = error(DATA[f"{name}/{precision}/{n}"], wanted[n], whole)
        # a rounding more or less at the same places: twice PyTorch's distance, and some roundings where that is 0; in
        # float32, where PyTorch is the reference itself, 1e-7 of the largest gradient is 1e-4 of the least that counts
        slack = 1e-4 if precision == "fp32" else 8 * UNIT[precision]
        assert error(g, wanted[n], whole) <= 2 * theirs + slack, n


@pytest.mark.parametrize("precision", UNIT)
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_of_six_steps(name: str, precision: str) -> None:
    program, feed = program_of(name)
    step = compile_step(program, "loss", rc.SGD(RATE), precision=precision).program
    executor = rc.Executor()
    losses = np.array([float(executor.run(step, feed, ["loss"])[0]) for _ in range(STEPS)])
    wanted, theirs = DATA[f"{name}/fp32/losses"], DATA[f"{name}/{precision}/losses"]
    # they go their own ways by rounding; in float32 that of PyTorch is not known, and 1e-5 is what is allowed elsewhere
    slack = 1e-5 if precision == "fp32" else UNIT[precision]
    assert np.abs(losses - wanted).max() <= 2 * np.abs(theirs - wanted).max() + slack * wanted.max()
