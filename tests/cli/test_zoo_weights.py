"""Weights of a network of the zoo are drawn only where something is run or written."""

from __future__ import annotations

import numpy as np
import pytest

import recompute as rc
from recompute import models
from recompute.cli import main
from recompute.models.common import Init, parameters


def test_figures_need_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def draw(self: Init, shape: tuple[int, ...], *, seed: int, name: str) -> np.ndarray:
        drawn.append(name)
        return np.zeros(shape, np.float32)

    monkeypatch.setattr(Init, "draw", draw)
    assert main(["lenet", "--memory-budget", "1GB", "--quiet"]) == 0 and not drawn
    assert main(["lenet", "--run", "1", "--quiet"]) == 0 and drawn


@pytest.mark.parametrize("network", ["lenet", "bert-tiny", "gpt2-tiny", "resnet18"])
def test_programs_without_weights_are_the_same(network: str) -> None:
    """Also parameters that are added, which nothing tells from constants without their values."""
    model = models.build(network, batch=2, weights=False)
    without = rc.load(model, trainable=list(parameters(model)))
    assert without.block == rc.load(models.build(network, batch=2)).block
