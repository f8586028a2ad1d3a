"""Gradients that ask for less: the same numbers as before the rewrite, and the large value is not kept."""

from __future__ import annotations

import numpy as np
import pytest

import recompute as rc
from recompute import parse
from recompute.passes import Autodiff, autodiff
from recompute.testing import evaluate

TEXT = """program pooled {{
  input %x: f32[2,2,7,7]
  param %w: f32[3,2,3,3]
  %conv: f32[2,3,7,7] = Conv(%x, %w) {{pads=[1,1,1,1]}}
  %act: f32[2,3,7,7] = {act}
  %pool: f32[2,3,{size}] = MaxPool(%act) {window}
  %square: f32[2,3,{size}] = Mul(%pool, %pool)
  loss %loss: f32[] = ReduceSum({summed}) {{keepdims=0}}
  output %loss
}}
"""
WINDOWS = {
    "4,4": "{kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]}",
    "3,3": "{kernel_shape=[2,2], strides=[2,2]}",
    "7,7": "{kernel_shape=[3,3], strides=[1,1], pads=[1,1,1,1]}",
}


def gradients(text: str, names: tuple[str, ...] = ("w",)) -> tuple[rc.Block, list[np.ndarray]]:
    """The block with its backward pass, and the gradients."""
    block = Autodiff(parameters=names).run(parse(text))
    g = np.random.default_rng(1)
    feed = {v.name: g.standard_normal(v.shape).astype(np.float32) for v in (*block.inputs, *block.parameters)}
    return block, evaluate(block, feed, [n for n in block.outputs if n.endswith("_grad")])


def backward_reads(block: rc.Block, name: str) -> bool:
    return any(v.name == name for o in block.operators if o.role is rc.Role.BACKWARD for v in o.reads())


@pytest.mark.parametrize("act", ["Relu(%conv)", "ThresholdedRelu(%conv) {alpha=0.5}"])
@pytest.mark.parametrize("size", WINDOWS)
def test_same_gradient_without_the_activation(act: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXT.format(act=act, size=size, window=WINDOWS[size], summed="%square")
    lean, found = gradients(text)
    assert not backward_reads(lean, "act")
    monkeypatch.setattr(autodiff, "mask_before_routing", lambda b, forward, backward, wanted: backward)
    plain, expected = gradients(text)
    assert backward_reads(plain, "act")
    np.testing.assert_array_equal(found[0], expected[0])
    assert np.abs(found[0]).max() > 0


def test_a_second_reader_of_the_activation_keeps_it() -> None:
    text = TEXT.format(act="Relu(%conv)", size="4,4", window=WINDOWS["4,4"], summed="%sum")
    text = text.replace(
        "  loss", "  %all: f32[] = ReduceSum(%act) {keepdims=0}\n  %sum: f32[2,3,4,4] = Add(%square, %all)\n  loss"
    )
    block, _ = gradients(text)
    assert backward_reads(block, "act")


def test_resnet_does_not_keep_the_largest_activation() -> None:
    program = rc.load(rc.models.build("resnet18", batch=2, image=64, classes=10, weights=False))
    rc.Momentum(learning_rate=0.1).minimize(rc.losses.cross_entropy(program["logits"]))
    assert not backward_reads(program.block, "stem.relu")
    assert backward_reads(program.block, "stem.pool")


ATTENTION = """program attention {
  input %x: f32[4,6]
  param %w: f32[6,6]
  param %v: f32[6,5]
  state %step: i64[]
  %scores: f32[4,6] = MatMul(%x, %w)
  %probs: f32[4,6] = Softmax(%scores)
  %dropped: f32[4,6] = Dropout(%probs, %step) {ratio=0.25, seed=7}
  %y: f32[4,5] = MatMul(%dropped, %v)
  %square: f32[4,5] = Mul(%y, %y)
  loss %loss: f32[] = ReduceSum(%square) {keepdims=0}
  output %loss
}
"""


def attention_gradients(text: str = ATTENTION) -> tuple[rc.Block, list[np.ndarray]]:
    """As `gradients`, with a step counter."""
    block = Autodiff().run(parse(text))
    g = np.random.default_rng(1)
    feed = {v.name: g.standard_normal(v.shape).astype(np.float32) for v in (*block.inputs, *block.parameters)}
    feed["step"] = np.array(3)
    return block, evaluate(block, feed, ["w_grad", "v_grad"])


def test_dropped_weights_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lean, found = attention_gradients()
    assert not backward_reads(lean, "dropped")
    monkeypatch.setattr(autodiff, "drop_again", lambda b, forward, backward: list(backward))
    plain, expected = attention_gradients()
    assert backward_reads(plain, "dropped")
    for a, b in zip(found, expected, strict=True):
        assert a.tobytes() == b.tobytes()


def test_dropped_values_stay_where_their_source_goes() -> None:
    block, _ = attention_gradients(
        ATTENTION.replace("%probs: f32[4,6] = Softmax(%scores)", "%probs: f32[4,6] = Neg(%scores)")
    )
    assert backward_reads(block, "dropped")
    assert not backward_reads(block, "probs")
