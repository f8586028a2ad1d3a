"""stop_on_nan: steps whose loss is not finite fail, change nothing, and say where NaN came up."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import Block, NotFiniteError, Role, TensorType, UsageError, Value
from recompute.data.batches import synthetic_batch
from recompute.passes.gradient.stop_on_nan import StopOnNan

PLACES = {"cpu": rc.CPUPlace(), "emulated": rc.EmulatedCUDAPlace()}


def mlp(**options: Any) -> rc.Program:
    program = rc.load(rc.models.build("mlp", batch=4))
    loss = rc.stop_on_nan(rc.losses.cross_entropy(program))
    assert loss.name == "loss"
    rc.Adam(**options).minimize(loss)
    return program


def logarithm() -> rc.Program:
    """mean of (log(w · x))², without a step."""
    program = rc.Program(Block("net", inputs=(Value("x", TensorType("f32", (3,))),)))
    program.declare("parameters", "w", np.ones(3, np.float32))
    b = program.builder()
    y = b.Log(b.Mul(program["x"].value, program["w"].value))
    b.role = Role.LOSS
    b.emit(rc.language.op.op_class("ReduceMean")(keepdims=0), b.Mul(y, y), name="loss")
    program.append(b, outputs=["loss"])
    return program


def contents(program: rc.Program) -> dict[str, np.ndarray]:
    return {name: np.array(program.data[name]) for name in program.data}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_failed_step_changes_nothing(place: str, bad: float) -> None:
    program = mlp()
    feed = synthetic_batch(program)
    executor = rc.Executor(PLACES[place])
    executor.run(program, feed, ["loss"])
    before = contents(program)
    wrong = {**feed, "x": np.where(np.arange(4)[:, None] == 1, np.float32(bad), feed["x"])}
    with np.errstate(all="ignore"), pytest.raises(NotFiniteError, match="the loss is nan: nothing was updated"):
        executor.run(program, wrong, ["loss"])
    for name, array in contents(program).items():
        np.testing.assert_array_equal(array, before[name])
    (after,) = executor.run(program, feed, ["loss"])
    assert np.isfinite(after)


NORMALISED = """program net {
  input %x: f32[6,3]
  param %scale: f32[3]
  param %bias: f32[3]
  buffer %mean: f32[3]
  buffer %var: f32[3]
  %n: f32[6,3], %m: f32[3], %v: f32[3] = BatchNormTrain(%x, %scale, %bias)
  %mean: f32[3] = RunningUpdate(%mean, %m)
  %var: f32[3] = RunningUpdate(%var, %v)
  %y: f32[6,3] = Log(%n)
  loss %loss: f32[] = ReduceMean(%y) {keepdims=0}
  output %loss
}
"""


def normalised(*, bias: float, checked: bool) -> rc.Program:
    """Running statistics, and a logarithm of what is normalised, which is positive where the bias is large."""
    ones = np.ones(3, np.float32)
    data = {"scale": ones, "bias": bias * ones, "mean": 0 * ones, "var": ones.copy()}
    program = rc.Program(rc.parse(NORMALISED), data)
    rc.Adam().minimize(rc.stop_on_nan(program["loss"]) if checked else program["loss"])
    return program


def test_the_bits_and_the_peak_are_those_without_the_check() -> None:
    found = []
    feed = {"x": np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)}
    for checked in (True, False):
        program, executor = normalised(bias=9.0, checked=checked), rc.Executor()
        losses = [executor.run(program, feed, ["loss"])[0] for _ in range(3)]
        found.append((losses, contents(program)))
        session = executor.session(program, ["loss"])
        assert session.measured_peak_bytes == session.report.peak
    assert found[0][0] == found[1][0]
    for name, array in found[1][1].items():
        np.testing.assert_array_equal(found[0][1][name], array)


def test_running_statistics_wait_for_the_loss() -> None:
    program = normalised(bias=0.0, checked=True)
    before = contents(program)
    feed = {"x": np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)}
    with pytest.raises(NotFiniteError, match=r"the first nan comes from\n.*Log\(%n\)"):
        rc.Executor().run(program, feed, ["loss"])
    for name, array in contents(program).items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("how", ["checkpoints", "budget", "bf16", "fp16", "clip"])
def test_with_what_else_a_step_may_have(how: str) -> None:
    program = rc.load(rc.models.build("mlp", batch=4))
    loss = rc.stop_on_nan(rc.losses.mse(program["pred"])).name
    clip = rc.clip.ClipGradByGlobalNorm(1.0) if how == "clip" else None
    options: dict[str, Any] = {
        "checkpoints": {"checkpoints": ["fc_1"]}, "budget": {"budget": "100%"}, "clip": {},
    }.get(how, {"precision": how})  # fmt: skip
    step = rc.compile_step(program, loss, rc.SGD(grad_clip=clip), **options).program
    executor, feed = rc.Executor(), synthetic_batch(step)
    executor.run(step, feed, [loss])
    before = contents(step)
    feed["label"][0, 0] = np.nan
    with pytest.raises(NotFiniteError, match="the input %label has nan"):
        executor.run(step, feed, [loss])
    for name, array in contents(step).items():
        np.testing.assert_array_equal(array, before[name])


def test_a_formula_in_bf16_ends_in_float32_with_the_check_too() -> None:
    texts = []
    for wanted in (True, False):
        program = rc.load(rc.models.build("mlp", batch=4))
        loss = rc.losses.mse(program["pred"])
        rc.MixedPrecision(rc.SGD(), "bf16").minimize(rc.stop_on_nan(loss) if wanted else loss)
        texts.append([o.op for o in program.operators if o.op.name != "CheckFinite"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        ([1, -1, 2], [1, 1, 1], r"the loss is nan: .*\n  the first nan comes from\n.*Log\(.*\n.*is from -1 to 2"),
        ([1, 0, 2], [1, 1, 1], r"the loss is inf: .*\n  the first infinite value comes from\n.*Log\(.*is from 0 to 2"),
        ([1, 1, 2], [1, np.inf, 1], "parameter %w has infinities, else from 1 to 1 before this step: an earlier upd"),
        ([1, np.nan, 2], [1, 1, 1], "the input %x has nan, else from 1 to 2: look at the data"),
        ([1, np.inf, 2], [0, 0, 0], r"the first nan comes from\n.*Mul\(%x, %w\).*\n.*%x has infinities"),
    ],
)
def test_where_it_came_up(x: list, w: list, message: str) -> None:
    program = logarithm()
    program.data["w"][...] = w
    rc.SGD().minimize(rc.stop_on_nan(program["loss"]))
    with pytest.raises(NotFiniteError) as e:
        rc.Executor().run(program, {"x": np.array(x, np.float32)}, ["loss"])
    assert re.search(message, str(e.value), re.DOTALL), str(e.value)
    assert rc.parse(str(program)) == program.block


def test_infinities_that_mask_are_not_blamed() -> None:
    """-inf at masked scores is meant; the mean of nothing is the fault."""
    program = rc.Program(Block("net", inputs=(Value("m", TensorType("bool", (2, 3))),)))
    program.declare("parameters", "w", np.ones((2, 3), np.float32))
    b = program.builder()
    w = program["w"].value
    p = b.Softmax(b.Where(program["m"].value, w, b.constant(-np.inf, w)), axis=1)
    b.emit(rc.language.op.op_class("ReduceMean")(keepdims=0), b.Mul(p, w), name="loss")
    program.append(b, outputs=["loss"])
    rc.SGD().minimize(rc.stop_on_nan(program["loss"]))
    executor = rc.Executor()
    mask = np.array([[True, True, False], [True, True, True]])
    executor.run(program, {"m": mask}, ["loss"])
    with pytest.raises(NotFiniteError, match=r"the first nan comes from\n.*Softmax\("):
        executor.run(program, {"m": mask & [[True], [False]]}, ["loss"])


def test_what_is_refused() -> None:
    program = mlp()
    with pytest.raises(UsageError, match="already a training step"):
        rc.stop_on_nan(program["loss"])
    program = rc.load(rc.models.build("mlp", batch=4))
    with pytest.raises(UsageError, match=r"stop_on_nan takes a loss, one floating-point number, but 'pred' is f32"):
        rc.stop_on_nan(program["pred"])
    with pytest.raises(UsageError, match="no operator of 'net' computes 'x'"):
        StopOnNan("x").run(logarithm().block)
    once = StopOnNan("loss").run(logarithm().block)
    assert StopOnNan("loss").run(once) is once
