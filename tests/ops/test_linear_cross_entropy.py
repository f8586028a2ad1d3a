"""The head of a language model as one operator: beside PyTorch, in tiles of all sizes, by kernels and by NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.language.builder import Builder
from recompute.language.ir import Block, Value
from recompute.language.program import Program
from recompute.language.types import TensorType
from recompute.ops.loss import linear_tiles
from recompute.ops.loss.linear_cross_entropy import LinearCrossEntropy
from recompute.passes.gradient.autodiff import differentiate
from recompute.runtime.cpu.device import jit

DATA = np.load(Path(__file__).parents[1] / "data" / "linear_cross_entropy.npz")
CASES = json.loads(str(DATA["cases"]))
PROVIDERS = [("numpy",)] if jit.unavailable() else [("numpy",), None]


def head(case: dict, arrays: dict[str, np.ndarray], *, transposed: bool = True) -> tuple[Program, list[str]]:
    """Σ up · loss of a head with parameters, and the names of the loss and of all gradients."""
    options = {k: v for k, v in case.items() if k != "bias"}
    values = {n: Value(n, TensorType.of(a)) for n, a in arrays.items()}
    b = Builder()
    for n in values:
        b.names.take(n)
    operands = (values["x"], values["w"], values.get("bias"), values["y"])
    loss = b.LinearCrossEntropy(*operands, transB=int(transposed), **options)
    total = b.ReduceSum(b.Mul(loss, values["up"]), keepdims=0) if "up" in values else loss
    weights = [n for n in ("x", "w", "bias") if n in values]
    inputs = tuple(values[n] for n in ("y", "up") if n in values)
    block = Block("head", inputs=inputs, parameters=tuple(values[n] for n in weights), operators=tuple(b.operators))
    block = block.with_operators(b.operators, outputs=(loss.name,))
    block, pairs = differentiate(block, total.name)
    names = [loss.name, *(g.name for _, g in pairs)]
    block = rc.verify(block.with_operators(block.operators, outputs=tuple(names)))
    return Program(block, {n: arrays[n] for n in weights}), names


def run(case: dict, arrays: dict[str, np.ndarray], providers: Any = ("numpy",), **options: Any) -> list[np.ndarray]:
    program, names = head(case, arrays, **options)
    feed = {n: arrays[n] for n in ("y", "up") if n in arrays}
    return rc.Executor(providers=providers).run(program, feed, names)


def arrays_of(i: int) -> dict[str, np.ndarray]:
    return {n: DATA[f"{i}.{n}"] for n in ("x", "w", "bias", "y", "up") if f"{i}.{n}" in DATA}


@pytest.mark.parametrize("tiles", ["whole", "held", "slices"])
@pytest.mark.parametrize("providers", PROVIDERS, ids=str)
@pytest.mark.parametrize("i", range(len(CASES)))
def test_as_pytorch(i: int, providers: Any, tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients in float64: in one tile, in tiles whose logits are held, and with logits made again."""
    if tiles != "whole":
        monkeypatch.setattr(linear_tiles, "ROWS", 4)
        monkeypatch.setattr(linear_tiles, "WORDS", 3)
        monkeypatch.setattr(linear_tiles, "USUAL", 4)
        monkeypatch.setattr(linear_tiles, "SMALL", 1)
        monkeypatch.setattr(linear_tiles, "LEAST", 1 if tiles == "held" else 128)
        monkeypatch.setattr(linear_tiles, "HELD", 1 << 24 if tiles == "held" else 1)
    arrays = arrays_of(i)
    wanted = [DATA[f"{i}.{n}"] for n in ("loss", "dx", "dw", "dbias") if f"{i}.{n}" in DATA]
    for transposed in (True, False):
        given = arrays if transposed else arrays | {"w": np.ascontiguousarray(arrays["w"].T)}
        found = run(CASES[i], given, providers, transposed=transposed)
        if not transposed:
            found[2] = found[2].T
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def test_gradients_are_made_with_the_loss_where_that_is_faster() -> None:
    """And four products are made where too few rows' logits would fit."""
    op = LinearCrossEntropy()
    for words, dtype, reduction, wanted in (
        (50257, "f32", "mean", True),
        (131072, "f32", "sum", True),
        (131073, "f32", "mean", False),
        (50257, "bf16", "mean", False),
        (50257, "f32", "none", False),
    ):
        op = LinearCrossEntropy(reduction)
        types = TensorType(dtype, (1024, 8)), TensorType(dtype, (words, 8)), TensorType("i64", (1024,))
        assert op.with_gradients(*types) is wanted


def test_scratch_does_not_grow_with_rows_or_words() -> None:
    """Without gradients, and with those from the log-sum-exp."""
    for op, count in (("LinearCrossEntropy", 1), ("LinearCrossEntropyGrad", 2)):
        sizes = []
        for rows, words in ((2048, 4096), (8192, 256_000)):
            ins: list[Any] = [TensorType("f32", (rows, 64)), TensorType("f32", (words, 64)), None]
            ins += [TensorType("i64", (rows,)), TensorType("f32", (rows,)), TensorType("f32", ())]
            rule = rc.language.op.op_class(op)()
            ins = ins if count == 2 else ins[:4]
            outs = rule.infer(*ins)[:count]
            sizes.append(sum(t.nbytes for t in rule.scratch(ins, outs)) - 17 * rows)  # three numbers a row
        assert sizes[0] == sizes[1] < 10 << 20


@pytest.mark.parametrize("providers", PROVIDERS, ids=str)
def test_a_label_that_is_no_word(providers: Any) -> None:
    arrays = {"x": np.zeros((3, 2)), "w": np.zeros((4, 2)), "y": np.array([0, 4, 1])}
    with pytest.raises((ValueError, rc.JobError), match="label 4 is outside the 4 classes"):
        run({}, arrays, providers)
    found = run({"ignore_index": 4}, arrays, providers)
    np.testing.assert_allclose(found[0], np.log(4))


@pytest.mark.parametrize("providers", PROVIDERS, ids=str)
def test_no_label_counts(providers: Any) -> None:
    """The mean of none is NaN and its gradient 0, as in PyTorch; the sum is 0."""
    arrays = {"x": np.ones((3, 2)), "w": np.ones((4, 2)), "y": np.full(3, -100)}
    with np.errstate(all="ignore"):
        loss, *gradients = run({"ignore_index": -100}, arrays, providers)
    assert np.isnan(loss) and len(gradients) == 2 and not any(a.any() for a in gradients)
    found = run({"ignore_index": -100, "reduction": "sum"}, arrays, providers)
    assert all(not a.any() for a in found)


@pytest.mark.parametrize("providers", PROVIDERS, ids=str)
def test_large_logits(providers: Any) -> None:
    """Exponentials that would overflow, seen from left to right."""
    arrays = {"x": np.array([[1.0]]), "w": np.array([[0.0], [900.0], [-900.0], [899.0]]), "y": np.array([1])}
    found = run({}, arrays, providers)
    np.testing.assert_allclose(found[0], np.log1p(np.exp(-1)), rtol=1e-13)
    assert all(np.isfinite(a).all() for a in found)


def test_the_predicted_peak_is_measured() -> None:
    """And is below one of the unfused head."""
    draw = np.random.default_rng(0)
    arrays = {"x": draw.normal(size=(1024, 16)).astype("f"), "w": draw.normal(size=(1100, 16)).astype("f")}
    program, names = head({}, arrays | {"y": draw.integers(0, 1100, 1024)})
    executor = rc.Executor()
    executor.run(program, {"y": draw.integers(0, 1100, 1024)}, names)
    session = executor.session(program, names)
    assert session.measured_peak_bytes == rc.passes.memory_report(session.block).peak < 4 * 1024 * 1100
