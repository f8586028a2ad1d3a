"""Gradient merge: several micro-batches in one step, equal to one large batch, with recomputation and all wrappers."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from tests.training.test_modes import network

import recompute as rc
from recompute import models
from recompute.compiling.steps import Steps, attach_loss
from recompute.errors import UsageError
from recompute.passes import memory_report
from recompute.training.fleet import DistributedStrategy, distributed_optimizer
from recompute.training.optimizers import GradientMerge, GradientMergeOptimizer

BATCH, PIECES = 64, 4
RNG = np.random.default_rng(0)


@functools.cache
def transformer(batch: int) -> rc.Program:
    """Two blocks with dropout, and a loss that leaves some labels out."""
    sizes = {"layers": 2, "hidden": 32, "vocab": 32, "seq": 16, "context": 16}
    program = rc.load(models.build("gpt2-tiny", batch=batch, **sizes))
    attach_loss(program, None)
    return program


def words(batch: int) -> dict[str, np.ndarray]:
    """Some labels do not count, more in the first micro-batch than in others."""
    rng = np.random.default_rng(1)
    ids, labels = (rng.integers(0, 32, (batch, 16)) for _ in range(2))
    labels[:9, :5] = -100
    return {"input_ids": ids, "label": labels}


def trained(program: rc.Program, feed: Any, optimizer: Any, steps: int = 2) -> tuple[list[float], dict[str, Any], int]:
    """Losses, arrays and the peak, predicted and measured, of a few steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rc.RecomputeWarning)
        optimizer.minimize(program["loss"])
    executor = rc.Executor()
    losses = [float(executor.run(program, feed, ["loss"])[0]) for _ in range(steps)]
    session = executor.session(program, ["loss"])
    assert session.measured_peak_bytes == memory_report(session.block).peak
    return losses, {n: np.array(a) for n, a in program.data.items()}, session.measured_peak_bytes


def of_transformer(optimizer: Any, batch: int = BATCH, steps: int = 2) -> tuple[list[float], dict[str, Any], int]:
    return trained(transformer(batch).clone(), words(batch), optimizer, steps)


def merged(optimizer: Any, **options: Any) -> GradientMergeOptimizer:
    """The transformer of the tests is built for its batch: that of all micro-batches."""
    return GradientMerge(optimizer, PIECES, batch=BATCH, **options)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all((a[n] == b[n]).all() for n in a)


def test_four_micro_batches_are_one_large_batch() -> None:
    large, small = of_transformer(rc.Momentum(0.1)), of_transformer(rc.Momentum(0.1), BATCH // PIECES)
    found = of_transformer(merged(rc.Momentum(0.1)))
    np.testing.assert_allclose(found[0], large[0], rtol=1e-6)
    for name, array in large[1].items():
        np.testing.assert_allclose(found[1][name], array, rtol=0, atol=1e-6, err_msg=name)
    assert small[2] < found[2] < large[2]
    assert found[1]["step"] == 2


def test_each_micro_batch_recomputes_alike_with_the_same_bits() -> None:
    plain = of_transformer(merged(rc.Momentum(0.1)))
    made = rc.RecomputeOptimizer
    for optimizer in (
        made(merged(rc.Momentum(0.1))).set_checkpoints(["h.0.out"]),
        merged(made(rc.Momentum(0.1)).set_checkpoints(["h.0.out"])),
        merged(rc.Momentum(0.1)).set_strategy("chen"),
    ):
        found = of_transformer(optimizer)
        assert found[0] == plain[0] and same(found[1], plain[1])
        assert found[2] < plain[2] or optimizer.spec.request is not None  # a strategy without a budget may need more


def test_what_all_micro_batches_share_is_computed_once() -> None:
    """The casts of the weights, although segments between checkpoints would run them again."""
    program = transformer(BATCH).clone()
    optimizer = rc.RecomputeOptimizer(merged(rc.MixedPrecision(rc.SGD(0.1), "bf16"))).set_checkpoints(["h.0.out"])
    optimizer.minimize(program["loss"])
    weights = {v.name for v in program.block.parameters}
    casts = [o.inputs[0].name for o in program.operators if o.op.name == "Cast" and o.inputs[0].name in weights]
    assert casts and len(casts) == len(set(casts))
    assert any(o.role is rc.Role.RECOMPUTE for o in program.operators)


def test_a_budget_is_met_by_recomputation_in_each_micro_batch(tmp_path: Any) -> None:
    program = transformer(BATCH)
    plain = rc.compile_step(program, "loss", merged(rc.SGD(0.1)))
    budget = int(plain.figures.peak_bytes * 0.85)
    step = rc.compile_step(program, "loss", merged(rc.SGD(0.1)), budget=budget, effort=0.1)
    assert step.planned.fits and step.planned.slices == ("micro:0:4",) and step.plan.reruns
    assert step.planned.bound <= step.planned.seconds
    again = [o for o in step.program.logical.operators if o.role is rc.Role.RECOMPUTE]
    assert len(again) % PIECES == 0 and step.planned.kept and not any("#" in n for n in step.planned.kept)
    step.saved.save(tmp_path / "plan.json")
    other = rc.compile_step(program, "loss", merged(rc.SGD(0.1)), plan=tmp_path / "plan.json")
    assert other.figures.peak_bytes == step.figures.peak_bytes <= budget
    feed, executor = words(BATCH), rc.Executor()
    losses = [[executor.run(s.program, feed, ["loss"])[0].item() for _ in range(2)] for s in (plain, step, other)]
    assert losses[0] == losses[1] == losses[2]
    assert all(same(dict(s.program.data.items()), dict(plain.program.data.items())) for s in (step, other))
    assert executor.session(step.program, ["loss"]).measured_peak_bytes == step.figures.peak_bytes
    with pytest.raises(UsageError, match="its slices are micro:0:4, those of the step are micro:0:2"):
        rc.compile_step(program, "loss", GradientMerge(rc.SGD(0.1), 2, batch=BATCH), plan=tmp_path / "plan.json")


def test_halves_are_added_up_in_float32_and_checked_once() -> None:
    large = of_transformer(rc.MixedPrecision(rc.SGD(0.1), "fp16"))
    program = transformer(BATCH).clone()
    found = trained(program, words(BATCH), merged(rc.MixedPrecision(rc.SGD(0.1), "fp16")))
    for name, array in large[1].items():
        np.testing.assert_allclose(found[1][name], array, rtol=0, atol=2e-4, err_msg=name)
    ops = [o.op.name for o in program.operators]
    assert ops.count("InverseIfFinite") == ops.count("LossScaleUpdate") == 1
    (check,) = (o for o in program.operators if o.op.name == "InverseIfFinite")
    assert all(v.dtype == "f32" for v in check.reads())


def test_an_overflow_in_one_micro_batch_skips_the_step() -> None:
    scaling = rc.amp.LossScaling(initial=2.0**126)
    optimizer = merged(rc.MixedPrecision(rc.SGD(0.1), "fp16", loss_scaling=scaling))
    _, arrays, _ = of_transformer(optimizer, steps=1)
    assert optimizer.inner.get_loss_scaling() == 2.0**125 and arrays["step"] == 0
    before = transformer(BATCH).data
    assert all((arrays[n] == before[n]).all() for n in before if n in arrays)


def test_clipping_schedules_and_groups_see_the_merged_gradient() -> None:
    def optimizer() -> Any:
        groups = [{"match": "*bias*", "lr": 0.5, "weight_decay": 0}]
        rate = rc.lr.LinearWarmup(0.1, 4, 0.0, 0.1)
        return rc.SGD(rate, grad_clip=rc.clip.ClipGradByGlobalNorm(0.05), weight_decay=0.1, groups=groups)

    large, inner = of_transformer(optimizer(), steps=3), optimizer()
    found = of_transformer(merged(inner), steps=3)
    for name, array in large[1].items():
        np.testing.assert_allclose(found[1][name], array, rtol=0, atol=1e-6, err_msg=name)
    assert inner.get_lr() == pytest.approx(0.075) and found[1]["step"] == 3


def test_a_sum_is_as_many_times_the_mean() -> None:
    mean, total = (
        of_transformer(merged(rc.SGD(0.1)), steps=1),
        of_transformer(merged(rc.SGD(0.025), avg=False), steps=1),
    )
    for name in (v.name for v in transformer(BATCH).block.parameters):
        np.testing.assert_allclose(total[1][name], mean[1][name], rtol=0, atol=1e-7, err_msg=name)


# -- programs that are made at the batch of all micro-batches ---------------------------------------------------------


def without_dropout() -> onnx.ModelProto:
    model = network()
    for node in model.graph.node:
        if node.op_type == "Dropout":
            node.op_type = "Identity"
            del node.input[1:]
    return model


def images(batch: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {"x": rng.standard_normal((batch, 2, 5, 5)).astype(np.float32), "label": rng.integers(0, 3, batch)}


def classifier(batch: int, model: onnx.ModelProto) -> rc.Program:
    program = rc.load(model, batch=batch)
    rc.losses.cross_entropy(program)
    return program


def test_batch_statistics_are_those_of_each_micro_batch() -> None:
    """As four steps of 6 would take them, running statistics included; gradients are their mean."""
    program = classifier(6, without_dropout())
    feed = images(24)
    losses, arrays, _ = trained(program, feed, GradientMerge(rc.SGD(0.1), 4), steps=1)
    assert program.block.batch == 24 and program["scores"].shape == (24, 3)
    single = classifier(6, without_dropout())
    before = {n: np.array(a) for n, a in single.data.items()}
    _, pairs = rc.SGD(0.0).minimize(single["loss"])
    executor, total, seen = rc.Executor(), {}, []
    for i in range(4):
        part = {n: a[6 * i : 6 * i + 6] for n, a in feed.items()}
        loss, *grads = executor.run(single, part, ["loss", *(g.name for _, g in pairs)])
        seen.append(float(loss))
        for (p, _), g in zip(pairs, grads, strict=True):
            total[p.name] = total.get(p.name, 0) + g.astype(np.float64) / 4
    assert losses[0] == pytest.approx(np.mean(seen), rel=1e-6)
    for name, g in total.items():
        np.testing.assert_allclose(arrays[name], before[name] - 0.1 * g, rtol=0, atol=1e-6, err_msg=name)
    for name in ("body.m1", "body.v1", "body.m2", "body.v2"):
        np.testing.assert_allclose(arrays[name], single.data[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("how", ["strategy", "checkpoints"])
def test_batch_statistics_survive_recomputation(how: str) -> None:
    """Dropout too."""
    feed = images(24)
    plain = trained(classifier(6, network()), feed, GradientMerge(rc.SGD(0.1), 4))
    optimizer = GradientMerge(rc.SGD(0.1), 4)
    optimizer = optimizer.set_strategy("chen") if how == "strategy" else optimizer.set_checkpoints(["d1"])
    found = trained(classifier(6, network()), feed, optimizer)
    assert found[0] == plain[0] and same(found[1], plain[1])


def test_a_wrong_label_in_the_last_micro_batch_changes_nothing() -> None:
    program = classifier(6, network())
    GradientMerge(rc.SGD(0.1), 4).minimize(program["loss"])
    before = {n: np.array(a) for n, a in program.data.items()}
    feed = images(24)
    feed["label"][-1] = 7
    with pytest.raises(rc.RecomputeError, match="7"):
        rc.Executor().run(program, feed, ["loss"])
    assert same(before, dict(program.data.items()))


def test_evaluation_has_any_batch() -> None:
    program = classifier(6, network())
    trained(program, images(24), GradientMerge(rc.SGD(0.1), 4))
    (whole,) = program.evaluate({"x": images(24)["x"]}, ["scores"])
    (part,) = program.evaluate({"x": images(24)["x"][:5]}, ["scores"])
    np.testing.assert_allclose(part, whole[:5], rtol=1e-5, atol=1e-6)


def test_fleet_takes_paddles_names() -> None:
    strategy = DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 4, "avg": True}
    strategy.recompute = True
    strategy.recompute_configs = {"checkpoints": ["d1"]}
    feed = images(24)
    found = trained(classifier(6, network()), feed, distributed_optimizer(rc.SGD(0.1), strategy))
    plain = trained(classifier(6, network()), feed, GradientMergeOptimizer(rc.SGD(0.1), k_steps=4))
    assert found[0] == plain[0] and same(found[1], plain[1])


def test_steps_are_compiled_at_any_batch() -> None:
    """`batch` is that of a micro-batch, as it is of the program."""
    options = {"layers": 1, "seq": 16}
    plain = Steps("gpt2-tiny", optimizer=rc.SGD(0.1), options=options)
    steps = Steps("gpt2-tiny", optimizer=GradientMerge(rc.SGD(0.1), 4), options=options)
    for batch in (4, 8):
        assert plain.peak(batch) < steps.peak(batch) < plain.peak(4 * batch)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: GradientMerge(rc.SGD(), 0), "k_steps must be a whole number of at least 1, not 0"),
        (lambda: GradientMerge(rc.SGD(), True), "k_steps must be a whole number"),
        (lambda: GradientMerge(rc.SGD(), 4, batch=6), "6 samples cannot be cut into 4 equal"),
        (lambda: GradientMerge(rc.SGD(), 4, avg=1), "avg must be True or False"),
        (lambda: GradientMerge("sgd", 4), "GradientMergeOptimizer wraps must be an optimizer"),
        (lambda: GradientMerge(rc.SGD(), 4), "cannot be made at another batch than 64: .*batch=64"),
        (lambda: merged(rc.SGD()).set_slices("all:0:2"), "are the same: give one of them"),
        (lambda: merged(rc.SGD()).set_checkpoints("h.0.out").set_offload(), "not combined with slices"),
    ],
)
def test_errors(make: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make().minimize(transformer(BATCH).clone()["loss"])


def test_one_micro_batch_is_a_plain_step() -> None:
    plain, one = of_transformer(rc.SGD(0.1), 4), of_transformer(GradientMerge(rc.SGD(0.1), 1), 4)
    assert plain[0] == one[0] and same(plain[1], one[1]) and plain[2] == one[2]


def test_the_list_of_passes_makes_the_same_step(tmp_path: Any) -> None:
    """Slices after recomputation; a plan that was made with slices also applies without a GradientMerge."""
    program = transformer(16)
    step = rc.compile_step(program, "loss", GradientMerge(rc.SGD(0.1), 2, batch=16), strategy="chen", dump=tmp_path)
    texts = sorted(tmp_path.iterdir())
    assert texts[-1].read_text().strip() == rc.show(step.program.block).strip()
    names = [t.stem.split("-", 1)[1] for t in texts]
    assert names.index("open-means") < names.index("recompute") < names.index("slice")
    other = rc.compile_step(program, "loss", rc.SGD(0.1), plan=step.saved)
    assert other.figures.peak_bytes == step.figures.peak_bytes and step.figures.recomputed_operators > 0
