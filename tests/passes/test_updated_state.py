"""Gradients that read state which the forward pass updates: each reads what its own forward operator has read."""

from __future__ import annotations

import numpy as np
import pytest
from checking import run_checked

import recompute as rc
from recompute import parse
from recompute.compiling.compiler import compile_step
from recompute.passes.gradient.autodiff import differentiate
from recompute.testing import evaluate

#: %seen is read, updated, read, updated, and read once more
TEXT = """\
program seen {
  input %x: f64[4,3]
  input %batch: f64[3]
  param %w: f64[4,3]
  buffer %seen: f64[3]
  %a: f64[4,3] = Mul(%w, %seen)
  %seen: f64[3] = RunningUpdate(%seen, %batch) {momentum=0.5}
  %t: f64[4,3] = Tanh(%a)
  %p: f64[4,3] = Mul(%t, %seen)
  %seen: f64[3] = RunningUpdate(%seen, %batch) {momentum=0.25}
  %q: f64[4,3] = Mul(%p, %seen)
  %r: f64[4,3] = Mul(%q, %x)
  %loss: f64[] = ReduceSum(%r) {keepdims=0}
  output %loss
}
"""


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    g = np.random.default_rng(seed)
    return {"x": g.standard_normal((4, 3)), "batch": 3 + g.random(3), "w": g.random((4, 3)), "seen": 1 + g.random(3)}


def numeric(block: rc.Block, given: dict[str, np.ndarray], name: str) -> np.ndarray:
    found = np.zeros_like(given[name])
    for i in np.ndindex(found.shape):
        sides = []
        for step in (1e-5, -1e-5):
            moved = given[name].copy()
            moved[i] += step
            sides.append(float(evaluate(block, {**given, name: moved}, ["loss"])[0]))
        found[i] = (sides[0] - sides[1]) / 2e-5
    return found


@pytest.mark.parametrize("name", ["w", "x"])
def test_gradients_read_the_state_as_it_was(name: str) -> None:
    block, given = parse(TEXT), arrays()
    after, ((_, grad),) = differentiate(block, "loss", [name])
    rc.verify(after)
    (found,) = evaluate(after, given, [grad.name])
    np.testing.assert_allclose(found, numeric(block, given, name), rtol=1e-7, atol=1e-8)


def test_a_copy_is_made_only_where_old_contents_are_read() -> None:
    after, _ = differentiate(parse(TEXT), "loss", ["w"])
    text = [str(line).strip() for line in str(after).splitlines()]
    copies = [i for i, line in enumerate(text) if "= Identity(%seen)" in line]
    # the last contents stay where they are
    assert [text[i].split(":")[0] for i in copies] == ["%seen.before", "%seen.before_1"]
    assert all("RunningUpdate" in text[i + 1] for i in copies)
    alone = TEXT.replace("%p: f64[4,3] = Mul(%t, %seen)", "%p: f64[4,3] = Mul(%t, %x)")
    alone = alone.replace("Mul(%w, %seen)", "Add(%w, %seen)")
    assert "Identity" not in str(differentiate(parse(alone), "loss", ["w"])[0])


def test_a_gradient_by_the_state_is_by_its_first_contents() -> None:
    """RunningUpdate passes no gradient on: what is read after it does not count."""
    block, given = parse(TEXT), arrays()
    after, ((_, grad),) = differentiate(block, "loss", ["seen"])
    (found,) = evaluate(after, given, [grad.name])
    one = 0.5 * given["seen"] + 0.5 * given["batch"]
    two = 0.25 * one + 0.75 * given["batch"]
    expected = given["x"] * one * two * given["w"] / np.cosh(given["w"] * given["seen"]) ** 2
    np.testing.assert_allclose(found, expected.sum(0), rtol=1e-12)


@pytest.mark.parametrize("checkpoints", [None, ["a"], ["t"], ["t", "q"], ["r"]])
@pytest.mark.parametrize("schedule", [False, True])
def test_whole_steps(checkpoints: list[str] | None, schedule: bool) -> None:
    given = arrays()
    program = rc.Program(parse(TEXT), {n: given[n].copy() for n in ("w", "seen")})
    feed = {n: given[n] for n in ("x", "batch")}
    step = compile_step(program, "loss", rc.SGD(learning_rate=0.5), checkpoints=checkpoints, schedule=schedule)
    slope = numeric(program.block, given, "w")
    checked = step.program.clone()
    rc.Executor().run(step.program, feed, ["loss"])
    np.testing.assert_allclose(step.program.data["w"], given["w"] - 0.5 * slope, rtol=1e-7, atol=1e-8)
    two = 0.25 * (0.5 * given["seen"] + 0.5 * given["batch"]) + 0.75 * given["batch"]
    np.testing.assert_allclose(step.program.data["seen"], two, rtol=1e-12)
    session = rc.Executor().session(checked, ["loss"])
    for n, a in feed.items():
        session.arrays[n][...] = a
    run_checked(session)
    assert checked.data["w"].tobytes() == step.program.data["w"].tobytes()
