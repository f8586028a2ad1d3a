"""Schedules, worked out by their own operators: against PyTorch and closed forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recompute import UsageError
from recompute.training import lr

DATA = np.load(Path(__file__).parents[1] / "data" / "optimizers.npz")

PYTORCH = {
    "step": lr.StepDecay(0.5, 3, 0.5),
    "multistep": lr.MultiStepDecay(0.5, [2, 5, 6], 0.3),
    "exponential": lr.ExponentialDecay(0.5, 0.9),
    "cosine": lr.CosineAnnealingDecay(0.5, 10, 0.01),
    "polynomial": lr.PolynomialDecay(0.5, 7, end_lr=0.0, power=2.0),
    "onecycle": lr.OneCycleLR(0.5, 16, end_learning_rate=0.5 / 25 / 1e4),
    "onecycle_linear": lr.OneCycleLR(
        0.5, 16, end_learning_rate=0.5 / 25 / 1e4, phase_pct=0.4, anneal_strategy="linear", three_phase=True
    ),
}


@pytest.mark.parametrize("key", PYTORCH)
def test_same_as_pytorch(key: str) -> None:
    expected = DATA[f"schedule.{key}"]
    got = [PYTORCH[key].value(i) for i in range(len(expected))]
    # worked out in f64, then rounded to f32 once; PyTorch's recursive forms add a few f64 roundings
    np.testing.assert_allclose(got, expected, rtol=2.0**-24, atol=1e-13)


def rates(schedule: lr.LRScheduler, n: int) -> list[float]:
    return [schedule.value(i) for i in range(n)]


def near(got: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(got, expected, rtol=2.0**-24, atol=1e-15)


def test_closed_forms() -> None:
    near(rates(lr.NaturalExpDecay(0.5, 0.1), 4), [0.5 * np.exp(-0.1 * i) for i in range(4)])
    near(rates(lr.InverseTimeDecay(0.5, 0.1), 4), [0.5 / (1 + 0.1 * i) for i in range(4)])
    near(rates(lr.PiecewiseDecay([1, 3], [1.0, 0.5, 0.25]), 5), [1.0, 0.5, 0.5, 0.25, 0.25])
    near(rates(lr.PiecewiseDecay([], [0.1]), 2), [0.1, 0.1])


def test_noam_rises_until_the_warmup_ends() -> None:
    got = rates(lr.NoamDecay(16, 4, 2.0), 8)
    near(got, [2.0 * 16**-0.5 * min(max(i, 1) ** -0.5, i * 4**-1.5) for i in range(8)])
    assert got[0] == 0 and max(got) == got[4]


def test_polynomial_decay_cycles() -> None:
    got = rates(lr.PolynomialDecay(1.0, 4, end_lr=0.0, cycle=True), 10)
    near(got, [1, 0.75, 0.5, 0.25, 0, 3 / 8, 2 / 8, 1 / 8, 0, 3 / 12])


def test_warmup_of_a_number_and_of_a_schedule() -> None:
    near(rates(lr.LinearWarmup(0.5, 4, 0.1, 0.3), 6), [0.1, 0.15, 0.2, 0.25, 0.5, 0.5])
    inner = lr.StepDecay(0.5, 2, 0.1)
    near(rates(lr.LinearWarmup(inner, 2, 0.0, 0.5), 7), [0, 0.25, 0.5, 0.5, 0.05, 0.05, 0.005])


def test_one_cycle_stays_at_its_end() -> None:
    schedule = lr.OneCycleLR(1.0, 10)
    assert schedule.value(9) == schedule.value(100) == np.float32(0.0001)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lr.StepDecay(0.1, 0),
        lambda: lr.PiecewiseDecay([3, 1], [1.0, 2.0, 3.0]),
        lambda: lr.PiecewiseDecay([3], [1.0]),
        lambda: lr.MultiStepDecay(0.1, [2, 2]),
        lambda: lr.CosineAnnealingDecay(0.1, 0),
        lambda: lr.PolynomialDecay(0.1, 0),
        lambda: lr.LinearWarmup(0.1, 0, 0.0, 0.1),
        lambda: lr.NoamDecay(0, 1),
        lambda: lr.OneCycleLR(0.1, 10, anneal_strategy="exp"),
        lambda: lr.OneCycleLR(0.1, 1),
    ],
)
def test_errors(make: object) -> None:
    with pytest.raises(UsageError):
        make()  # type: ignore[operator]
