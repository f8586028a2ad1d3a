"""Frozen weights in 8 bits: codes, error, gradients, and memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from tests.tuning.test_lora import LINEAR, llama, onnx_scores
from tests.tuning.test_peft import KNOWN, base

import recompute as rc
from recompute.compiling.compiler import CompiledStep, compile_step
from recompute.data.batches import synthetic_batch
from recompute.language.ir import Role
from recompute.tuning.int8 import quantized


@pytest.mark.parametrize("axis", [0, 1])
def test_codes_are_off_by_half_a_scale_at_most(axis: int) -> None:
    array = np.random.default_rng(0).normal(size=(30, 40)).astype(np.float32)
    array[:, 3] = array[3] = 0
    codes, scale = quantized(array, axis)
    assert codes.dtype == np.int8 and scale.shape == (array.shape[axis],) and abs(codes.astype(int)).max() == 127
    error = abs(codes * np.expand_dims(scale, 1 - axis) - array)
    assert (error <= np.expand_dims(scale, 1 - axis) * 0.5001).all()
    array[0, 0] = np.nan
    with pytest.raises(rc.UsageError, match="NaN or infinity"):
        quantized(array, axis)


@pytest.mark.parametrize("form", ["torch", "turned", "gemm"])
def test_scores_and_gradients_are_those_of_the_rounded_weights(form: str) -> None:
    """Beside the model whose float weights were rounded beforehand: the same products, forward and backward."""
    model = rc.quantize_frozen(base(form))
    rounded = base(form)
    for t in rounded.graph.initializer:
        if t.name in ("q.weight", "score.weight"):
            array = onnx.numpy_helper.to_array(t)
            axis = 1 if form == "turned" else 0
            codes, scale = quantized(array, axis)
            t.CopyFrom(onnx.numpy_helper.from_array(codes * np.expand_dims(scale, 1 - axis), t.name))
    assert {v.name for v in rc.load(model).parameters} == {"embed.weight", "q.bias"}
    found = []
    for m, trainable in ((model, None), (rounded, ["embed.weight", "q.bias"])):
        program = rc.load(m, trainable=trainable)
        scores = program.evaluate({"ids": KNOWN["ids"]})[0]
        loss = rc.losses.cross_entropy(program["scores"])
        rc.SGD(0.5).minimize(loss)
        rc.Executor().run(program, {"ids": KNOWN["ids"], "label": KNOWN["labels"]}, [loss])
        found.append((scores, program.data["embed.weight"], program.data["q.bias"]))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    (plain,) = rc.load(base(form)).evaluate({"ids": KNOWN["ids"]})
    assert 1e-5 < abs(found[0][0] - plain).max() < 0.01 * abs(plain).max()
    np.testing.assert_allclose(onnx_scores(model, {"ids": KNOWN["ids"]}), found[0][0], rtol=0, atol=1e-6)


def step(program: rc.Program, **options: Any) -> CompiledStep:
    loss = rc.losses.cross_entropy(program.outputs[0])
    return compile_step(program, loss.name, rc.Adam(1e-2), **options)


def alive(found: CompiledStep, name: str) -> list[list[int]]:
    """For each copy of a weight the positions of the operators that make and read it, in the compiled step."""
    block = found.program.block
    copies = [v for v in block.values() if v.partition(".again")[0].partition("@")[0] == name]
    return [
        [i for i, op in enumerate(block.operators) if n in {v.name for v in (*op.reads(), *op.writes())}]
        for n in copies
    ]


BUDGET = {"budget": "90%", "effort": 0.1}


@pytest.mark.parametrize("options", [{}, {"checkpoints": ["layers.*.out"]}, BUDGET])
def test_dequantised_weights_are_temporaries(options: dict[str, Any]) -> None:
    """Nothing in floating point is alive between the forward and the backward product; peaks are those measured."""
    size = {"hidden": 128, "inner": 352, "heads": 4, "groups": 2, "seq": 16, "layers": 2}
    plain = rc.lora(rc.load(llama(1, **size)), LINEAR, r=2)
    small = rc.lora(rc.quantize_frozen(rc.load(llama(1, **size))), LINEAR, r=2)
    before, after = step(plain), step(small, **options)
    weights = sum(v.size for v in plain.block.buffers if "_proj.weight" in v.name or v.name == "lm_head.weight")
    assert before.figures.persistent_bytes - after.figures.persistent_bytes > 0.95 * 3 * weights
    largest = 4 * 128 * 352
    if not options:  # what is saved, but for one weight at a time
        assert before.figures.peak_bytes - after.figures.peak_bytes > 3 * weights * 0.95 - 2 * largest
    for places in alive(after, "layers.0.mlp.gate_proj.weight"):
        assert places[-1] - places[0] <= 8
    roles = [op.role for op in after.program.logical.operators if "layers.0.mlp.gate_proj.weight.int8" in
             {v.name for v in op.reads()}]  # fmt: skip
    assert roles[0] is Role.FORWARD and roles[-1] in (Role.BACKWARD, Role.RECOMPUTE)
    feed = synthetic_batch(small)
    executor = rc.Executor()
    name = small.block.outputs[-1]
    losses = [float(executor.run(after.program, feed, [name])[0]) for _ in range(3)]
    assert executor.session(after.program, [name]).measured_peak_bytes == after.figures.peak_bytes
    again = step(rc.lora(rc.quantize_frozen(rc.load(llama(1, **size))), LINEAR, r=2), rebuild=False)
    assert losses[0] == float(rc.Executor().run(again.program, feed, [name])[0])  # the same bits
    if not options:
        assert again.figures.peak_bytes > after.figures.peak_bytes


def test_what_is_not_stored_in_8_bits() -> None:
    with pytest.raises(rc.UsageError, match="is a table that Gather reads"):
        rc.quantize_frozen(llama(), ["embed_tokens.weight"])
    with pytest.raises(rc.UsageError, match="no linear layers"):
        rc.quantize_frozen(rc.quantize_frozen(llama()))
    with pytest.raises(rc.UsageError, match="neither float32 nor float16"):
        rc.quantize_frozen(base(numbers=np.float64))
    with pytest.raises(rc.UsageError, match="has adapters already"):
        rc.quantize_frozen(rc.lora(llama(), LINEAR), LINEAR)
