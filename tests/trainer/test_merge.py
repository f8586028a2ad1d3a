"""Training with gradient merge and averages of weights."""

from __future__ import annotations

import numpy as np
import pytest
from trainer_cases import data, model, trainer

import recompute as rc


def run(batch: int, optimizer: object, epochs: int = 2, count: int = 50) -> tuple[rc.Trainer, rc.History]:
    program = rc.load(model(dropout=0.0, normalised=False), batch=batch)
    made = rc.Trainer(program, optimizer, loss=rc.losses.cross_entropy(program["logits"]), quiet=True)
    return made, made.fit(data(count), epochs=epochs, eval_data=data(20, seed=1))


def test_merged_steps_are_those_of_the_large_batch() -> None:
    """A last batch of 2 of 50 samples included."""
    large, plain = run(16, rc.Adam(1e-2))
    merged, found = run(4, rc.optimizers.GradientMerge(rc.Adam(1e-2), 4))
    assert plain.steps == found.steps == 8
    assert [e["train"]["loss"] for e in found.epochs] == pytest.approx([e["train"]["loss"] for e in plain.epochs])
    assert found.epochs[-1]["eval"] == pytest.approx(plain.epochs[-1]["eval"], rel=1e-5)
    for v in large.program.parameters:
        np.testing.assert_allclose(merged.program.data[v.name], large.program.data[v.name], rtol=1e-5, atol=1e-6)
    assert found.peak_bytes["measured"] == found.peak_bytes["predicted"] < plain.peak_bytes["predicted"]


@pytest.mark.parametrize("count", [39, 45])
def test_last_batches_of_any_size(count: int) -> None:
    """7 samples are 7 micro-batches of one, 13 are 13 of one: more than fit a micro-batch, and prime."""
    _, plain = run(16, rc.Adam(1e-2), 1, count)
    merged, found = run(4, rc.optimizers.GradientMerge(rc.Adam(1e-2), 4), 1, count)
    _, even = run(4, rc.optimizers.GradientMerge(rc.Adam(1e-2), 4), 1, 32)
    assert merged.programs.why_not(merged.programs.at(count % 16)) == ""
    assert found.peak_bytes["training"] <= 1.1 * even.peak_bytes["training"]
    assert found.epochs[0]["train"]["loss"] == pytest.approx(plain.epochs[0]["train"]["loss"], rel=1e-6)
    assert found.peak_bytes["measured"] == found.peak_bytes["predicted"]


def test_averages_are_evaluated() -> None:
    t = trainer(optimizer=rc.ExponentialMovingAverage(rc.Adam(1e-2), 0.9))
    held = data(20, seed=1)
    history = t.fit(data(), epochs=2, eval_data=held)
    assert t.evaluate(held) == history.epochs[-1]["eval"]
    (averaged,), (last,) = (t.program.evaluate({"x": held["x"]}, ["logits"], averaged=a) for a in (True, False))
    np.testing.assert_array_equal(t.predict({"x": held["x"]}, ["logits"], batch=20)["logits"], averaged)
    assert not np.allclose(averaged, last, rtol=1e-3)
    log = averaged - np.log(np.exp(averaged).sum(1, keepdims=True))
    wanted = -log[np.arange(20), held["label"]].mean()
    assert history.epochs[-1]["eval"]["loss"] == pytest.approx(wanted, rel=1e-5)


def test_checkpoints_around_gradient_merge_also_hold_in_the_last_batch() -> None:
    """18 samples are 2 micro-batches of 9: drop-out and batch statistics are those of the micro-batches."""

    def weights(optimizer: object) -> str:
        return trainer(optimizer=optimizer).fit(data(50), epochs=1).weights_sha256

    merged = rc.GradientMerge(rc.Adam(1e-2), 2)
    outside = rc.RecomputeOptimizer(rc.GradientMerge(rc.Adam(1e-2), 2)).set_checkpoints(["r"])
    assert weights(merged) == weights(outside)


def test_micro_batches_of_the_last_batch_are_no_larger_than_the_others() -> None:
    """The program is loaded with all samples of a step: they are cut into 4 of 4."""
    merged, found = run(16, rc.GradientMerge(rc.Adam(1e-2), 4, batch=16), 1, 24)
    assert merged.programs.training(merged.programs.at(8)).slices == ("micro:0:2",)
    assert found.peak_bytes["measured"] == found.peak_bytes["predicted"]
