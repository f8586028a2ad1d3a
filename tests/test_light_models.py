"""The nine light_* models inside the onnx wheel: load, attach a loss, one SGD step, and directional derivatives.

Their weights are ConstantOfShape nodes; `init="he"` draws them.  Derivatives are taken in float64 on small images
(the same graphs; the fixed reshapes of some ask for the original size).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.backend.test
import pytest

import recompute as rc

LIGHT = Path(onnx.backend.test.__file__).parent / "data" / "light"
NAMES = sorted(p.stem for p in LIGHT.glob("light_*.onnx"))


def test_there_are_nine() -> None:
    assert len(NAMES) == 9


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_sgd_step(name: str) -> None:
    program = rc.load(LIGHT / f"{name}.onnx", init="he", seed=1)
    loss = rc.losses.cross_entropy(program.outputs[0])
    assert sum(v.value.size for v in program.parameters) > 1_000_000
    before = {n: program.data[n] for n in (v.name for v in program.parameters)}
    rc.SGD(learning_rate=0.01).minimize(loss)
    g = np.random.default_rng(0)
    feed = {v.name: g.standard_normal(v.shape).astype(v.value.type.numpy) for v in program.inputs if v.dtype == "f32"}
    feed["label"] = np.zeros(program["label"].shape, np.int64)
    (value,) = rc.Executor().run(program, feed, [loss])
    assert np.isfinite(value)
    changed = 0
    for n, old in before.items():
        assert np.isfinite(program.data[n]).all(), n
        changed += not np.array_equal(program.data[n], old)
    assert changed > len(before) // 2
