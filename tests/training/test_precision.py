"""Mixed precision: what the program says, master weights, loss scaling, recomputation, the ways to ask for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import models
from recompute.cli import command as cli
from recompute.compiling.compiler import CompiledStep, compile_step
from recompute.compiling.steps import attach_loss
from recompute.data.batches import synthetic_batch
from recompute.errors import UsageError
from recompute.importer import load as onnx_import
from recompute.language.builder import Builder, Names
from recompute.language.ir import Block, Role, Value
from recompute.language.types import DTYPES, TensorType
from recompute.ops.shape.reshape import Cast
from recompute.passes import Precision, run_passes
from recompute.passes.gradient.autodiff import Autodiff
from recompute.training import fleet
from recompute.training.amp import LossScaling, decorate
from recompute.training.optimizers import NAMES

LOW = {"bf16": "bf16", "fp16": "f16"}


def network(name: str, batch: int = 4) -> tuple[rc.Program, str, dict[str, np.ndarray]]:
    """A network of the zoo with its loss, and a batch."""
    batch = 1 if name == "bert-tiny" else batch
    program = onnx_import.load(models.build(name, batch=batch, seed=0), seed=0)
    loss, _ = attach_loss(program, None)
    entry = models.info(name)
    specs = {s.name: s for s in (*entry.inputs, *((entry.label,) if entry.label else ()))}
    return program, loss, synthetic_batch(program, 0, specs)


def train(step: CompiledStep, feed: dict[str, np.ndarray], loss: str, steps: int) -> list[float]:
    """Losses; the bytes that were allocated must be those that were planned."""
    executor = rc.Executor()
    losses = [float(executor.run(step.program, feed, [loss])[0].reshape(())) for _ in range(steps)]
    assert executor.session(step.program, [loss]).measured_peak_bytes == step.figures.peak_bytes
    return losses


# -- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(("name", "rate"), [("mlp", 0.05), ("lenet", 0.002), ("bert-tiny", 0.01)])
def test_trains_as_in_float32(name: str, rate: float, precision: str) -> None:
    program, loss, feed = network(name)
    curves = []
    scaling = LossScaling(initial=256.0) if precision == "fp16" else None  # which overflows in none of them
    for optimizer in (rc.SGD(rate), rc.MixedPrecision(rc.SGD(rate), precision, loss_scaling=scaling)):
        step = compile_step(program, loss, optimizer)
        curves.append(train(step, feed, loss, 4))
    assert curves[1][-1] < curves[1][0]
    np.testing.assert_allclose(curves[1], curves[0], rtol=2.0**-8 if precision == "bf16" else 2.0**-10)


@pytest.mark.parametrize("precision", LOW)
def test_parameters_and_state_stay_float32(precision: str) -> None:
    program, loss, _ = network("bert-tiny")
    step = compile_step(program, loss, rc.Adam(), precision=precision).program
    block = step.logical
    assert {v.dtype for v in (*block.parameters, *block.state) if v.type.is_float} == {"f32"}
    assert all(step.data[v.name].dtype == np.float32 for v in block.parameters)
    values = block.values()
    low = [o for o in block.operators if o.op.name in ("MatMul", "Gemm", "Gelu")]
    assert low and {v.dtype for o in low for v in o.reads()} == {LOW[precision]}
    assert values[loss].dtype == "f32"
    casts = [o for o in block.operators if isinstance(o.op, Cast) and o.inputs[0] in block.parameters]
    mine = [o.inputs[0] for o in casts if o.role is Role.FORWARD]
    assert len(mine) == len(set(mine)), "a parameter is cast once, for all its readers in the forward pass"
    again = {next(o.writes()).name for o in casts if o.role is Role.BACKWARD}
    assert all(sum(n in {v.name for v in o.reads()} for o in block.operators) == 1 for n in again)


def test_no_cast_of_a_cast() -> None:
    for name in ("lenet", "bert-tiny"):
        program, loss, _ = network(name)
        block = compile_step(program, loss, rc.Adam(), precision="bf16").program.logical
        made = {v.name: o for o in block.operators for v in o.writes()}
        for o in block.operators:
            if isinstance(o.op, Cast) and o.role in (Role.FORWARD, Role.LOSS):
                before = made.get(o.inputs[0].name) if o.inputs[0] else None
                assert before is None or not isinstance(before.op, Cast) or not before.inputs[0].type.is_float
                assert o.inputs[0].dtype != o.op.to


@pytest.mark.parametrize("precision", LOW)
def test_recomputed_steps_have_the_same_bits(precision: str) -> None:
    for name, others in (
        ("lenet", [{"checkpoints": ["pool*"]}, {"strategy": "chen"}]),
        ("bert-tiny", [{"checkpoints": ["layer.0.out", "layer.1.out"]}]),
    ):
        program, loss, feed = network(name)
        found = []
        for options in ({}, *others):
            step = compile_step(program, loss, rc.Adam(1e-3), precision=precision, **options)
            found.append((train(step, feed, loss, 2), step.program.data))
            assert bool(options) == bool(step.figures.recomputed_operators)
        for losses, data in found[1:]:
            assert losses == found[0][0]
            assert all(data[n].tobytes() == a.tobytes() for n, a in found[0][1].items())


def test_activations_take_half() -> None:
    program, loss, _ = network("resnet18", batch=2)
    kept = [compile_step(program, loss, rc.SGD(), precision=p).figures.kept_bytes for p in (None, "bf16", "fp16")]
    weights = 2 * sum(v.size for v in program.block.parameters)  # cast once a step, kept for the backward pass
    assert all(k - weights < 0.55 * kept[0] for k in kept[1:])


# -- the pass -----------------------------------------------------------------------------------------------------


def small(text: str, parameters: str = "") -> tuple[Builder, list[Value]]:
    """A builder and values `x0`, `x1`, ... of these types."""
    values = [Value(f"x{i}", TensorType.parse(t)) for i, t in enumerate(text.split())]
    return Builder(Names(v.name for v in values)), values


def rewritten(b: Builder, inputs: list[Value], outputs: list[Value], **options: Any) -> list[str]:
    """The types that values have behind the pass, by name."""
    block = Block(inputs=tuple(inputs), constants=tuple(b.constants), operators=tuple(b.operators),
                  outputs=tuple(v.name for v in outputs))  # fmt: skip
    after = run_passes(rc.verify(block), [Precision(**options)])
    values = after.values()
    return [values[v.name].dtype for v in outputs]


def test_types_are_promoted() -> None:
    b, (x, w, r) = small("f32[4,4] f32[4,4] f32[4,4]")
    y = b.MatMul(x, w)
    low, wide, joined = b.Relu(y), b.Add(y, r), b.Concat(y, r, axis=0)
    exp, constant = b.Exp(y), b.Mul(y, b.constant(3.0, y))
    assert rewritten(b, [x, w, r], [y, low, wide, joined, exp, constant]) == [
        "bf16", "bf16", "f32", "f32", "f32", "bf16",
    ]  # fmt: skip


def test_constants_beyond_float16_stay() -> None:
    b, (x, w) = small("f32[4,4] f32[4,4]")
    y = b.MatMul(x, w)
    far = b.Add(y, b.constant(-1e9, y))
    assert rewritten(b, [x, w], [far]) == ["bf16"]
    assert rewritten(b, [x, w], [far], to="fp16") == ["f32"]


def test_what_stays_in_float32_by_name() -> None:
    b, (x, w) = small("f32[4,4] f32[4,4]")
    y = b.MatMul(x, w)
    z = b.MatMul(y, w)
    assert rewritten(b, [x, w], [y, z], full=("matmul_1",)) == ["bf16", "f32"]
    with pytest.raises(UsageError, match=r"no operator writes 'matmull'.*did you mean"):
        rewritten(b, [x, w], [y, z], full=("matmull",))


def test_other_types_of_the_model_stay() -> None:
    b, (x, w, h) = small("f64[4,4] f64[4,4] f16[4,4]")
    y, z = b.MatMul(x, w), b.Exp(h)
    assert rewritten(b, [x, w, h], [y, z]) == ["f64", "f16"]


def test_state_that_the_forward_pass_updates_is_cast_again() -> None:
    from recompute.language.ir import Operator
    from recompute.ops.norm.batch_norm import RunningUpdate

    b, (x, m) = small("f32[4,4] f32[4,4]")
    y = b.MatMul(x, m)
    b.operators.append(Operator(RunningUpdate(), (m, y), (m,)))
    z = b.MatMul(x, m)
    block = Block(inputs=(x,), state=(m,), operators=tuple(b.operators), outputs=(y.name, z.name))
    after = run_passes(rc.verify(block), [Precision()])
    assert sum(isinstance(o.op, Cast) and o.inputs[0] == m for o in after.operators) == 2
    update = next(o for o in after.operators if o.op.name == "RunningUpdate")
    assert {v.dtype for v in (*update.reads(), *update.writes())} == {"f32"}


def test_it_comes_before_autodiff() -> None:
    program, loss, _ = network("mlp")
    block = run_passes(program.block, [Autodiff(loss)])
    with pytest.raises(UsageError, match="'precision' comes before 'autodiff'"):
        Precision().run(block)


def test_tf32_stands_in_the_text() -> None:
    program, loss, feed = network("mlp")
    plain, step = (compile_step(program, loss, rc.SGD(), precision=p) for p in (None, "tf32"))
    text = rc.show(step.program.block)
    assert text.splitlines()[1] == "  products tf32"
    assert rc.parse(text) == step.program.block
    assert rc.parse(text.replace("  products tf32\n", "")) != step.program.block
    assert train(plain, feed, loss, 2) == train(step, feed, loss, 2), "the CPU has no such units"
    with pytest.raises(rc.VerifyError, match="unknown products 'tf23'; known: tf32"):
        rc.verify(rc.parse(text.replace("products tf32", "products tf23")))


def test_tf32_is_priced() -> None:
    from recompute.cost import device

    h200 = device("h200")
    assert h200.with_tf32() == device("h200:tf32")
    assert device("v100-16").with_tf32() == device("v100-16")
    program, loss, _ = network("bert-tiny")
    times = [
        compile_step(program, loss, rc.SGD(), precision=p, cost=h200).figures.estimated_step_seconds
        for p in ("fp32", "tf32", "bf16")
    ]
    assert times[1] < times[0]


# -- loss scaling ---------------------------------------------------------------------------------------------------


def tiny(optimizer: Any, scaling: LossScaling | None = None) -> tuple[rc.Program, Any]:
    """A linear model under `optimizer` in float16."""
    b, (x, w) = small("f32[4,3] f32[3,2]")
    y = b.Tanh(b.MatMul(x, w))
    block = Block(inputs=(x,), parameters=(w,), operators=tuple(b.operators), outputs=(y.name,))
    start = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)
    program = rc.Program(block, {w.name: start})
    rc.losses.mse(program)
    mixed = rc.MixedPrecision(optimizer, "fp16", loss_scaling=scaling)
    mixed.minimize(program["loss"])
    return program, mixed


GOOD = {"x0": np.ones((4, 3), np.float32), "label": np.zeros((4, 2), np.float32)}
BAD = {**GOOD, "x0": np.full((4, 3), 1e6, np.float32)}  # infinite in float16


@pytest.mark.parametrize("clip", [None, rc.clip.ClipGradByGlobalNorm(0.5)], ids=["", "clipped"])
@pytest.mark.parametrize("name", NAMES)
def test_an_overflow_changes_nothing_but_the_scale(name: str, clip: Any) -> None:
    program, mixed = tiny(getattr(rc, name)(0.1, grad_clip=clip), LossScaling(initial=1024.0))
    executor = rc.Executor()
    executor.run(program, GOOD, ["loss"])  # state is no longer zeros
    before = {n: a.tobytes() for n, a in program.data.items()}
    assert program.data["step"] == 1 and program.data["good_steps"] == 1
    executor.run(program, BAD, ["loss"])
    changed = {n for n, a in program.data.items() if a.tobytes() != before[n]}
    assert changed == {"loss_scale", "good_steps"}
    assert mixed.get_loss_scaling() == 512.0 and program.data["good_steps"] == 0
    executor.run(program, GOOD, ["loss"])
    assert program.data["step"] == 2 and program.data["x1"].tobytes() != before["x1"]


def test_the_scale_grows() -> None:
    program, mixed = tiny(rc.SGD(0.1), LossScaling(initial=8.0, interval=2))
    executor = rc.Executor()
    scales = []
    for feed in (GOOD, GOOD, GOOD, BAD, GOOD, GOOD):
        executor.run(program, feed, ["loss"])
        scales.append(mixed.get_loss_scaling())
    assert scales == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]


def test_a_scale_that_stays() -> None:
    program, mixed = tiny(rc.SGD(0.1), LossScaling(initial=8.0, interval=1, dynamic=False))
    executor = rc.Executor()
    for feed in (GOOD, BAD, GOOD):
        executor.run(program, feed, ["loss"])
    assert mixed.get_loss_scaling() == 8.0 and program.data["step"] == 2


@pytest.mark.parametrize("clip", [None, rc.clip.ClipGradByNorm(0.01)], ids=["", "clipped"])
def test_powers_of_two_do_not_matter(clip: Any) -> None:
    """As long as nothing leaves float16's range the scale is undone to the bit."""
    found = []
    for initial in (16.0, 1024.0):
        program, _ = tiny(rc.SGD(0.1, grad_clip=clip), LossScaling(initial=initial))
        rc.Executor().run(program, GOOD, ["loss"])
        found.append(program.data["x1"].tobytes())
    assert found[0] == found[1]


def test_small_gradients_do_not_vanish() -> None:
    feed = {**GOOD, "x0": np.full((4, 3), 1e-5, np.float32)}
    moved = []
    for scaling in (LossScaling(), LossScaling(initial=1.0)):
        program, _ = tiny(rc.SGD(1e3), scaling)
        program.data["x1"] = program.data["x1"].copy()
        before = program.data["x1"].copy()
        rc.Executor().run(program, feed, ["loss"])
        moved.append(float(np.abs(program.data["x1"] - before).max()))
    assert moved[0] > 0 and moved[1] == 0


def test_updates_read_the_gradients_before_their_cast() -> None:
    program, _ = tiny(rc.Adam())
    update = next(o for o in program.operators if o.op.name == "AdamUpdate")
    assert update.inputs[0].dtype == "f32" and update.inputs[1].dtype == "f16"
    clipped, _ = tiny(rc.Adam(grad_clip=rc.clip.ClipGradByNorm(1.0)))
    update = next(o for o in clipped.operators if o.op.name == "AdamUpdate")
    assert update.inputs[1].dtype == "f32"


def test_the_scale_is_saved() -> None:
    program, mixed = tiny(rc.Adam(), LossScaling(initial=64.0))
    rc.Executor().run(program, BAD, ["loss"])
    state = mixed.state_dict()
    assert state["loss_scale"] == 32.0 and "x1.moment1" in state
    _, other = tiny(rc.Adam(), LossScaling(initial=64.0))
    other.set_state_dict(state)
    assert other.get_loss_scaling() == 32.0
    with pytest.raises(UsageError, match="lacks 'loss_scale'"):
        other.set_state_dict({n: a for n, a in state.items() if n != "loss_scale"})


def test_bfloat16_needs_no_scale() -> None:
    program, loss, _ = network("mlp")
    step = compile_step(program, loss, rc.Adam(), precision="bf16")
    assert not any(o.op.name == "InverseIfFinite" for o in step.program.operators)
    assert "loss_scale" not in step.program.data


# -- the ways to ask for it -----------------------------------------------------------------------------------------


def test_optimizers_in_each_other() -> None:
    program, loss, feed = network("lenet")
    optimizer = rc.RecomputeOptimizer(rc.MixedPrecision(rc.SGD(0.002), "bf16")).set_checkpoints(["pool*"])
    whole = compile_step(program, loss, optimizer)
    again = compile_step(
        program, loss, rc.RecomputeOptimizer(rc.SGD(0.002)).set_checkpoints(["pool*"]), precision="bf16"
    )
    assert whole.figures.recomputed_operators == again.figures.recomputed_operators > 0
    assert train(whole, feed, loss, 2) == train(again, feed, loss, 2)
    with pytest.raises(UsageError, match="both set the precision"):
        compile_step(program, loss, optimizer, precision="fp16")
    with pytest.raises(UsageError, match=r"write RecomputeOptimizer\(MixedPrecision"):
        rc.MixedPrecision(optimizer)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda: rc.MixedPrecision(rc.SGD(), "fp8"), "unknown precision 'fp8'"),
        (lambda: rc.MixedPrecision("sgd"), "wraps must be an optimizer"),
        (lambda: LossScaling(initial=0.0), "must be above 0"),
        (lambda: LossScaling(interval=0), "interval must be a number of steps"),
        (lambda: decorate(rc.SGD(), dtype="float8"), "'float16' or 'bfloat16'"),
    ],
)
def test_wrong_requests(what: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        what()


def test_fleet() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.amp = True
    strategy.amp_configs = {"init_loss_scaling": 32.0, "incr_every_n_steps": 7}
    found = fleet.distributed_optimizer(rc.SGD(), strategy)
    assert found.precision == "fp16" and found.loss_scaling == LossScaling(initial=32.0, interval=7)
    strategy.amp_configs = {"dtype": "bfloat16"}
    strategy.recompute = True
    strategy.recompute_checkpoints = ["pool*"]
    found = fleet.distributed_optimizer(rc.SGD(), strategy)
    assert isinstance(found, rc.RecomputeOptimizer) and found.inner.precision == "bf16"
    with pytest.raises(UsageError, match=r"amp_configs has no key 'incr_ration'.*did you mean"):
        strategy.amp_configs = {"incr_ration": 2.0}


def test_estimates() -> None:
    given = {"batch": 64, "cost": rc.cost.device("h200"), "providers": ("numpy",)}
    plain, half = (rc.estimate("lenet", precision=p, **given) for p in (None, "bf16"))
    assert half.by_role["activation"] < plain.by_role["activation"]
    assert rc.max_batch("mlp", "1MiB", precision="bf16").best.batch > 0
    program, loss, _ = network("mlp")
    rc.SGD().minimize(program[loss])
    with pytest.raises(UsageError, match="already a training step"):
        rc.estimate(program, precision="bf16")


def test_command_line(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    assert cli.main(["mlp", "--batch", "4", "--precision", "fp16", "--run", "2", "--json", str(out), "-q"]) == 0
    report = json.loads(out.read_text())
    assert report["precision"] == "fp16"
    assert report["run"]["measured_peak_bytes"] == report["run"]["predicted_peak_bytes"]
    assert cli.main(["mlp", "--precision", "bf16", "--memory-budget", "90%", "--compare", "-q"]) == 0


def test_a_step_in_bfloat16_is_exported(tmp_path: Path) -> None:
    import onnx

    program, loss, _ = network("mlp")
    step = compile_step(program, loss, rc.SGD(), precision="bf16")
    onnx.checker.check_model(rc.export_step(step.program), full_check=True)
    assert DTYPES["bf16"].itemsize == 2
