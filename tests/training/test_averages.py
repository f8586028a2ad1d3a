"""Moving averages of the weights: beside NumPy and PyTorch's swa_utils, with every wrapper, applied and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.training.test_modes import network

import recompute as rc
from recompute.errors import JobError, UsageError
from recompute.passes import memory_report
from recompute.training.averages import applied, averages_of

X = np.random.default_rng(0).standard_normal((6, 2, 5, 5)).astype(np.float32)
FEED = {"x": X, "label": np.array([0, 1, 2, 0, 1, 2])}


def minimized(optimizer: Any) -> rc.Program:
    program = rc.load(network(), batch=6)
    rc.losses.cross_entropy(program)
    optimizer.minimize(program["loss"])
    return program


def trained(optimizer: Any, steps: int = 3) -> rc.Program:
    program, executor = minimized(optimizer), rc.Executor()
    for _ in range(steps):
        executor.run(program, FEED, ["loss"])
    return program


def weights(program: rc.Program) -> dict[str, np.ndarray]:
    return {v.name: np.array(program.data[v.name]) for v in program.block.parameters}


WRAPPERS = {
    "plain": lambda o: rc.EMA(o, 0.9),
    "thres_steps": lambda o: rc.ExponentialMovingAverage(o, 0.5, thres_steps=True),
    "inside amp": lambda o: rc.MixedPrecision(rc.EMA(o, 0.9), "fp16"),
    "around amp": lambda o: rc.EMA(rc.MixedPrecision(o, "bf16"), 0.9),
    "recomputed": lambda o: rc.RecomputeOptimizer(rc.EMA(o, 0.9)).set_strategy("chen"),
    "merged": lambda o: rc.GradientMerge(rc.EMA(o, 0.9), 2, batch=6),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_averages_follow_the_formula(name: str) -> None:
    optimizer = WRAPPERS[name](rc.Adam(0.05, grad_clip=rc.clip.ClipGradByGlobalNorm(1.0)))
    program, executor = minimized(optimizer), rc.Executor()
    wanted: dict[str, np.ndarray] = {}
    for step in range(4):
        executor.run(program, FEED, ["loss"])
        keep = min(0.5, (1 + step) / (10 + step)) if name == "thres_steps" else 0.9
        for n, w in weights(program).items():
            wanted[n] = w.astype(np.float64) if step == 0 else keep * wanted[n] + (1 - keep) * w
    for n, average in wanted.items():
        np.testing.assert_allclose(program.data[f"{n}.average"], average, rtol=0, atol=1e-6, err_msg=n)
    session = executor.session(program, ["loss"])
    assert session.measured_peak_bytes == memory_report(session.block).peak
    assert {f"{n}.average" for n in wanted} <= set(optimizer.state_dict())


def test_averages_are_pytorchs() -> None:
    """Fed with weights of a run here, as torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn would be."""
    torch = pytest.importorskip("torch")
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    program, executor = minimized(rc.EMA(rc.SGD(0.1), 0.9)), rc.Executor()
    module = torch.nn.Linear(4, 3)
    model = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(4):
        executor.run(program, FEED, ["loss"])
        module.weight.data[...] = torch.from_numpy(np.array(program.data["head.weight"]))
        model.update_parameters(module)
    found = program.data["head.weight.average"]
    np.testing.assert_allclose(found, model.module.weight.detach().numpy(), rtol=0, atol=1e-6)


def test_training_itself_keeps_its_bits() -> None:
    plain, averaged = trained(rc.Adam(0.05)), trained(rc.EMA(rc.Adam(0.05), 0.9))
    assert all((a == weights(averaged)[n]).all() for n, a in weights(plain).items())


def test_applied_exchanges_weights_and_gives_them_back() -> None:
    program = trained(rc.EMA(rc.Adam(0.05), 0.9))
    before, averages = weights(program), averages_of(program)
    means = {n: np.array(program.data[a]) for n, a in averages.items()}
    plain = program.evaluate({"x": X}, ["scores"])[0]
    arrays = {n: program.data[n] for n in averages}
    with applied(program):
        assert all((program.data[n] == means[n]).all() for n in averages)
        inside = program.evaluate({"x": X}, ["scores"])[0]
        with pytest.raises(JobError, match="hold their averages"):
            rc.Executor().run(program, FEED, ["loss"])
        with pytest.raises(UsageError, match="applied already"), applied(program):
            pass
        with pytest.raises(UsageError, match="cannot be loaded while"):
            rc.state.set_state_dict(program, {}, strict=False)
    assert all((program.data[n] == a).all() and program.data[n] is arrays[n] for n, a in before.items())
    assert not np.array_equal(plain, inside)
    assert (program.evaluate({"x": X}, ["scores"], averaged=True)[0] == inside).all()
    assert (program.evaluate({"x": X}, ["scores"])[0] == plain).all()
    rc.Executor().run(program, FEED, ["loss"])


def test_weights_come_back_when_evaluation_fails() -> None:
    program = trained(rc.EMA(rc.Adam(0.05), 0.9))
    before = weights(program)
    with pytest.raises(UsageError, match="no output can be computed"):
        program.evaluate({}, averaged=True)
    assert all((program.data[n] == a).all() for n, a in before.items()) and not program.averaged


def test_before_the_first_step_averages_are_the_weights() -> None:
    program = minimized(rc.EMA(rc.Adam(0.05), 0.9))
    (plain,) = program.evaluate({"x": X}, ["scores"])
    assert (program.evaluate({"x": X}, ["scores"], averaged=True)[0] == plain).all()
    rc.Executor().run(program, FEED, ["loss"])
    assert not np.array_equal(program.evaluate({"x": X}, ["scores"])[0], plain)


def test_a_step_that_loss_scaling_skips_leaves_them() -> None:
    scaling = rc.amp.LossScaling(initial=2.0**126)
    optimizer = rc.EMA(rc.MixedPrecision(rc.SGD(0.1), "fp16", loss_scaling=scaling), 0.9)
    program = trained(optimizer, steps=1)
    assert program.data["step"] == 0
    for n, a in averages_of(program).items():
        assert (program.data[n] == program.data[a]).all()


def test_state_is_saved_and_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole, half = (trained(rc.EMA(rc.Adam(0.05), 0.9), steps) for steps in (4, 2))
    rc.save_state(half, tmp_path / "state.safetensors")
    again, executor = minimized(rc.EMA(rc.Adam(0.05), 0.9)), rc.Executor()
    rc.load_state(again, tmp_path / "state.safetensors")
    for _ in range(2):
        executor.run(again, FEED, ["loss"])
    assert all((again.data[n] == a).all() for n, a in whole.data.items())
    optimizer = rc.EMA(rc.Adam(0.05), 0.9)
    third = minimized(optimizer)
    state = {n: np.array(half.data[n]) for n in optimizer.state_dict()}
    optimizer.set_state_dict(state)
    assert (third.data["head.weight.average"] == half.data["head.weight.average"]).all()
    with pytest.raises(UsageError, match="it lacks"):
        optimizer.set_state_dict({n: a for n, a in state.items() if not n.endswith("average")})


def test_the_exported_model_has_the_averages() -> None:
    program = trained(rc.EMA(rc.Adam(0.05), 0.9))
    model = rc.export_trained(program, averaged=True)
    found = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    for n, a in averages_of(program).items():
        assert (found[n] == program.data[a]).all()
    plain = rc.export_trained(program)
    found = {t.name: onnx.numpy_helper.to_array(t) for t in plain.graph.initializer}
    assert all((found[n] == w).all() for n, w in weights(program).items())


def test_a_compiled_step_from_a_file_has_them(tmp_path: Path) -> None:
    program = trained(rc.EMA(rc.Adam(0.05), 0.9))
    rc.save_model(rc.export_step(program), tmp_path / "step.onnx")
    again = rc.load_compiled(tmp_path / "step.onnx")
    assert averages_of(again) == averages_of(program)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: rc.EMA(rc.SGD(), 1.0), "decay must be at least 0 and below 1"),
        (lambda: rc.EMA(rc.SGD(), 0.9, thres_steps=1), "thres_steps must be True or False"),
        (lambda: rc.EMA(rc.RecomputeOptimizer(rc.SGD())), "come last: write RecomputeOptimizer"),
        (lambda: rc.EMA(rc.GradientMerge(rc.SGD(), 2)), "come last: write GradientMergeOptimizer"),
        (lambda: trained(rc.SGD(), 0).evaluate({"x": X}, averaged=True), "has no averages: minimize with"),
    ],
)
def test_errors(make: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make()
