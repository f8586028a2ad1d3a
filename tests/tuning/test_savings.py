"""What training less saves, as figures."""

from __future__ import annotations

import pytest
from tests.tuning.test_lora import LINEAR, llama

import recompute as rc
from recompute.tuning import savings, training


def test_lora_saves_gradients_and_state() -> None:
    start = rc.load(llama(layers=2))
    for program in (rc.lora(start, LINEAR, r=2), rc.lora(rc.quantize_frozen(start), LINEAR, r=2)):
        found = savings(program)
        assert found.before == training(start)  # the base is found again
        assert found.after.trained == sum(v.value.size for v in program.parameters)
        assert found.after.gradient_bytes == 4 * found.after.trained
        assert 8 * found.after.trained <= found.after.state_bytes < found.before.state_bytes / 5
        assert found.after.peak_bytes < found.before.peak_bytes
        text = str(found)
        assert f"{found.before.trained:,}" in text and f"{found.after.trained:,}" in text and "peak memory" in text


def test_freezing_saves_activations() -> None:
    program = rc.load(rc.models.build("lenet", batch=8)).freeze(["conv*"], eval=True)
    found = savings(program, lambda: rc.Momentum(0.1))
    assert found.before == training(rc.load(rc.models.build("lenet", batch=8)), rc.Momentum(0.1))
    assert found.after.kept_bytes < 0.5 * found.before.kept_bytes and found.after.tensors == found.before.tensors - 4
    assert found.after.weight_bytes == found.before.weight_bytes


def test_a_training_step_is_not_compared() -> None:
    program = rc.load(rc.models.build("lenet", batch=8))
    rc.SGD(0.1).minimize(rc.losses.cross_entropy(program["logits"]))
    with pytest.raises(rc.UsageError, match="already a training step"):
        training(program)
