"""The nine light_* models inside the onnx wheel: load, attach a loss, one SGD step, and directional derivatives.

Their weights are ConstantOfShape nodes; `init="he"` draws them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.backend.test
import pytest

import recompute as rc
from recompute.importer.initialize import initialise
from recompute.passes.gradient.autodiff import differentiate
from recompute.testing import in_float64

LIGHT = Path(onnx.backend.test.__file__).parent / "data" / "light"
NAMES = sorted(p.stem for p in LIGHT.glob("light_*.onnx"))
#: random directions of derivatives; by hand (-m hours) where a forward pass in float64 takes long
DIRECTIONS = 20
SMALL = ("light_shufflenet", "light_squeezenet")


def load(name: str) -> tuple[rc.Program, str, dict[str, np.ndarray]]:
    """A model with its loss and a batch of one image."""
    program = rc.load(LIGHT / f"{name}.onnx", init="he", seed=1)
    loss = rc.losses.cross_entropy(program.outputs[0])
    g = np.random.default_rng(0)
    feed = {v.name: g.standard_normal(v.shape).astype(v.value.type.numpy) for v in program.inputs if v.dtype == "f32"}
    feed["label"] = np.ones(program["label"].shape, np.int64)
    return program, loss.name, feed


def test_there_are_nine() -> None:
    assert len(NAMES) == 9


@pytest.mark.parametrize("name", NAMES)
def test_one_sgd_step(name: str) -> None:
    program, loss, feed = load(name)
    assert sum(v.value.size for v in program.parameters) > 1_000_000
    before = {v.name: program.data[v.name].copy() for v in program.parameters}
    rc.SGD(learning_rate=0.01).minimize(program[loss])
    (value,) = rc.Executor().run(program, feed, [loss])
    assert np.isfinite(value).all()
    changed = 0
    for n, old in before.items():
        assert np.isfinite(program.data[n]).all(), n
        changed += not np.array_equal(program.data[n], old)
    assert changed > len(before) // 2


@pytest.mark.parametrize("name", [n if n in SMALL else pytest.param(n, marks=pytest.mark.hours) for n in NAMES])
def test_directional_derivatives(name: str) -> None:
    """Random directions, each through the weights of one layer or of all, against central differences."""
    program, loss, feed = load(name)
    program = in_float64(program)
    feed = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in feed.items()}
    block, pairs = differentiate(program.block, loss)
    grads = dict(zip([v.name for v, _ in pairs], run(program, block, feed, [g.name for _, g in pairs]), strict=True))
    forward = program.block.with_operators([op for op in program.operators if not op.op.updates], outputs=(loss,))
    made = [v.name for op in forward.operators for v in op.writes()]
    known = {**feed, **dict(zip(made, run(program, forward, feed, made), strict=True))}
    executor, g = rc.Executor(), np.random.default_rng(2)
    names = sorted(grads)
    for i in range(DIRECTIONS):
        chosen = names if i == 0 else [names[int(g.integers(len(names)))]]
        along = {n: g.standard_normal(grads[n].shape, np.float32) * scale(program.data[n]) for n in chosen}
        exact = sum(float(np.vdot(grads[n], d)) for n, d in along.items())
        rest = rc.Program(behind(forward, chosen), program.data)
        given, values = {v.name: known[v.name] for v in rest.block.inputs}, []
        for step in (STEP, -2 * STEP):
            for n, d in along.items():
                program.data[n] += step * d
            values.append(float(executor.run(rest, given, [loss])[0].reshape(())))
        for n, d in along.items():
            program.data[n] += STEP * d
        numeric = (values[0] - values[1]) / (2 * STEP)
        # the loss has about 15 digits, which over a step of 1e-9 leaves 1e-5 (sums of many terms: a few times that)
        assert abs(exact - numeric) <= 5e-5 * max(1.0, abs(numeric)), (chosen[:1], exact, numeric)


def behind(block: rc.Block, names: list[str]) -> rc.Block:
    """The operators that these parameters reach; what they read of the others, whose bits stay, is fed."""
    moved, operators = set(names), []
    for op in block.operators:
        if any(v.name in moved for v in op.reads()):
            operators.append(op)
            moved.update(v.name for v in op.writes())
    read = {v.name: v for op in operators for v in op.reads()}
    there = moved.union(v.name for v in block.persistent())
    return block.with_operators(operators, inputs=tuple(v for n, v in read.items() if n not in there))


#: so small that hardly any ReLU or max pooling of the millions in a network changes sides within it
STEP = 1e-9


def scale(w: np.ndarray) -> float:
    """The size of a weight's elements, so that each direction moves it by the same share."""
    return float(np.sqrt(np.vdot(w, w) / w.size)) or 0.01


def run(program: rc.Program, block: rc.Block, feed: dict[str, np.ndarray], fetch: list[str]) -> list[np.ndarray]:
    return rc.Executor().run(rc.Program(block, program.data), feed, fetch)


@pytest.mark.parametrize("scheme", ["he", "glorot"])
def test_factors_are_drawn_as_ones_and_summands_as_zeros(scheme: str) -> None:
    """Also factors that are reshaped first; matrices are drawn with the scheme's variance."""
    block = rc.parse("""program p {
      input %x: f32[2,300]
      param %m: f32[300,100]
      param %scale: f32[100]
      param %other: f32[100]
      param %shift: f32[100]
      %a: f32[2,100] = MatMul(%x, %m)
      %b: f32[2,100] = Mul(%a, %scale)
      %row: f32[1,100] = Reshape(%other) {shape=[1,100]}
      %c: f32[2,100] = Mul(%row, %b)
      %y: f32[2,100] = Add(%c, %shift)
      output %y
    }""")
    program = rc.Program(block)
    initialise(program, scheme, seed=3)
    found = {n: (float(np.min(program.data[n])), float(np.max(program.data[n]))) for n in ("scale", "other", "shift")}
    assert found == {"scale": (1, 1), "other": (1, 1), "shift": (0, 0)}
    variance = 2 / 100 if scheme == "he" else 2 / (300 + 100)  # kernels are [out, in]
    np.testing.assert_allclose(np.var(program.data["m"]), variance, rtol=0.05)
