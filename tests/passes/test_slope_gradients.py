"""Activations whose gradients read codes of a few bits: exact levels, exact gradients, and what is no longer kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.language.ir import Block, Role
from recompute.passes.approximation.base import parse_approximation
from recompute.passes.approximation.edits import Edits
from recompute.passes.approximation.slopes import ActivationGradient, activation_gradients
from recompute.passes.approximation.step import Leaf, Step
from recompute.passes.cleanup.dead_code import DeadCode
from recompute.testing import evaluate

#: h = x·w + c, y = f(h), z = y·v: the gradient flows through f to w
NETWORK = """program p {{
  input %x: {t}[12,5]
  param %w: {t}[5,7]
  param %c: {t}[7]
  param %v: {t}[7,3]
{constants}  %h0: {t}[12,7] = MatMul(%x, %w)
  %h: {t}[12,7] = Add(%h0, %c)
{activation}
  %z: {t}[12,3] = MatMul(%y, %v)
  %loss: {t}[] = ReduceSum(%z) {{axes=[0, 1], keepdims=0}}
  output %loss
}}"""


def step_of(activation: str, constants: str = "", t: str = "f32") -> Block:
    """The network with its backward pass."""
    lines = "\n".join(f"  {line}" for line in activation.replace(": T =", f": {t}[12,7] =").split("\n"))
    text = NETWORK.format(t=t, activation=lines, constants=constants)
    return rc.run_passes(rc.parse(text), rc.pipeline("find-gates,autodiff{loss=loss}"))


def feed_of(block: Block) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {v.name: rng.normal(size=v.shape).astype(v.type.numpy) for v in (*block.inputs, *block.parameters)}


def slope_values(block: Block, bits: int) -> dict[str, ActivationGradient]:
    return {g.y.name: g for g in activation_gradients(Step(block), bits)}


def replace_slopes(block: Block, name: str, bits: int) -> Block | None:
    """The block in which the gradient of the activation that makes a value reads codes; None where there is none."""
    step = Step(block)
    found = next((g for g in activation_gradients(step, bits) if g.y.name == name), None)
    if found is None:
        return None
    kind, edits = parse_approximation(f"bits:{bits}"), Edits(step)
    leaf = Leaf(found.positions[0], found.x, found.x)
    assert kind.keeps(step, leaf) == found.codes.infer(found.x.type)[0]
    kind.replace(step, leaf, edits)
    return DeadCode().run(edits.result())


def after(block: Block, bits: int) -> Block:
    found = replace_slopes(block, "y", bits)
    assert found is not None
    rc.verify(found)
    return found


SMOOTH = [
    ("%y: T = Gelu(%h)", "h"),
    ('%y: T = Gelu(%h) {approximate="tanh"}', "h"),
    ("%s: T = Sigmoid(%h)\n%y: T = Mul(%h, %s)", "h"),  # Swish, by find-gates
    ("%y: T = Mish(%h)", "h"),
    ("%y: T = HardSwish(%h)", "h"),
    ("%y: T = Sigmoid(%h)", "y"),
    ("%y: T = Tanh(%h)", "y"),
    ("%y: T = Softplus(%h)", "y"),
    ("%y: T = Elu(%h) {alpha=0.5}", "y"),
    ("%y: T = Elu(%h) {alpha=-0.5}", "hy"),
]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize(("activation", "reads"), SMOOTH)
def test_gradients_are_dy_times_the_level(activation: str, reads: str, bits: int) -> None:
    block = step_of(activation)
    found = slope_values(block, bits)["y"]
    read = {v.name for i in found.positions for v in block.operators[i].reads()}
    assert read.intersection("hy") == set(reads)
    other, feed = after(block, bits), feed_of(block)
    fetch = ["h", "y_grad", "h_grad", "w_grad", "v_grad", "loss"]
    plain, new = (dict(zip(fetch, evaluate(b, feed, fetch), strict=True)) for b in (block, other))
    steps = found.steps
    h = np.abs(plain["h"]) if steps.even else plain["h"]
    level = np.array(steps.levels, "f4")[(h[..., None] > np.array(steps.bounds, "f4")).sum(-1)]
    assert new["h_grad"].tobytes() == (plain["y_grad"] * level).tobytes()
    for name in ("h", "y_grad", "v_grad", "loss"):
        assert new[name].tobytes() == plain[name].tobytes()
    assert new["w_grad"].tobytes() != plain["w_grad"].tobytes()
    assert not any(v.name == "h" for o in other.operators if o.role == Role.BACKWARD for v in o.reads())


def test_four_bits_are_nearer_than_one() -> None:
    block = step_of("%y: T = Gelu(%h)")
    feed = feed_of(block)
    exact = evaluate(block, feed, ["w_grad"])[0]
    wrong = [np.linalg.norm(evaluate(after(block, bits), feed, ["w_grad"])[0] - exact) for bits in (1, 2, 3, 4)]
    assert wrong[3] < wrong[1] / 2 < wrong[0] / 2 and wrong[3] < 0.05 * np.linalg.norm(exact)


EXACT = [
    ("%y: T = Relu(%h)", ""),
    ("%y: T = LeakyRelu(%h) {alpha=0.1}", ""),
    ("%y: T = LeakyRelu(%h) {alpha=-0.3}", ""),
    ("%y: T = Relu6(%h)", ""),
    ("%y: T = ThresholdedRelu(%h) {alpha=0.2}", ""),
    ("%y: T = HardSigmoid(%h)", ""),
    ("%y: T = Clip(%h, %low, %high)", "  const %low: {t}[] = -1.0\n  const %high: {t}[] = 1.5\n"),
]


@pytest.mark.parametrize("t", ["f32", "f64"])
@pytest.mark.parametrize(("activation", "constants"), EXACT)
def test_steps_keep_the_exact_gradient(activation: str, constants: str, t: str) -> None:
    block = step_of(activation, constants.replace("{t}", t), t)
    other, feed = after(block, 1), feed_of(block)
    assert {o.op.name for o in other.operators} >= {"SlopeCodes", "SlopeGrad"}
    for a, b in zip(evaluate(block, feed), evaluate(other, feed), strict=True):
        assert a.tobytes() == b.tobytes()


def test_codes_are_made_before_the_last_forward_reader() -> None:
    """So that the activation may be written over its input."""
    block = step_of("%k: T = Exp(%h)\n%y0: T = Gelu(%h)\n%y: T = Add(%k, %y0)")
    found = replace_slopes(block, "y0", 2)
    assert found is not None
    names = [o.op.name for o in found.operators]
    assert names[names.index("SlopeCodes") + 1] == "Gelu"
    later = step_of("%y0: T = Gelu(%h)\n%k: T = Exp(%h)\n%y: T = Add(%k, %y0)")
    found = replace_slopes(later, "y0", 2)
    assert found is not None
    names = [o.op.name for o in found.operators]
    assert names[names.index("SlopeCodes") + 1] == "Exp" and names.index("Gelu") < names.index("Exp")


def arena(block: Block) -> int:
    planned = rc.run_passes(block, rc.pipeline("liveness,memory-plan"))
    return max(at + planned.values()[name].nbytes for name, at in planned.addresses.items())


def test_less_is_kept() -> None:
    """Three inputs of activations become codes of an eighth of a byte to half a byte an element."""
    block = step_of("%a: T = Gelu(%h)\n%b: T = Gelu(%a)\n%y: T = Gelu(%b)")
    sizes = [arena(block)]
    for name in ("a", "b", "y"):
        found = replace_slopes(block, name, 2)
        assert found is not None
        block = found
        sizes.append(arena(block))
    assert sizes == sorted(sizes, reverse=True) and sizes[3] < 0.8 * sizes[0]


def test_what_is_left_alone() -> None:
    block = step_of("%y: T = Gelu(%h)")
    for name in ("h", "z", "x", "h_grad", "loss"):
        assert replace_slopes(block, name, 2) is None
    only_forward = block.with_operators([o for o in block.operators if o.role == Role.FORWARD], outputs=("loss",))
    assert replace_slopes(only_forward, "y", 2) is None
    for bits in (0, 9):
        with pytest.raises(rc.UsageError, match=f"'bits:{bits}': the slope of an activation takes 1 to 4 bits"):
            parse_approximation(f"bits:{bits}")
    varying = step_of("%y: T = Clip(%h, %low, %high)", "  param %low: f32[]\n  param %high: f32[]\n")
    assert replace_slopes(varying, "y", 2) is None


def test_all_of_a_network() -> None:
    """One after the other; each keeps its own codes, and the step still runs."""
    block = step_of("%a: T = Gelu(%h)\n%b: T = Relu(%a)\n%y: T = Tanh(%b)")
    values: dict[str, Any] = slope_values(block, 3)
    assert list(values) == ["a", "b", "y"]
    for name in values:
        found = replace_slopes(block, name, 3)
        assert found is not None
        block = found
    assert sum(o.op.name == "SlopeGrad" for o in block.operators) == 3 and not slope_values(block, 3)
    rc.verify(block)
    assert all(np.isfinite(a).all() for a in evaluate(block, feed_of(block)))
