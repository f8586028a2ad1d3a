"""Wrappers, precisions and budgets in all combinations, on a network with batch statistics: a budget changes no bit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import recompute as rc
from recompute.passes import RecomputePlan, Rerun
from recompute.passes.recomputation.recompute import apply
from recompute.passes.slicing.slicing import Slice
from recompute.testing import evaluate


@functools.cache
def network(layers: int = 2, width: int = 6) -> onnx.ModelProto:
    """x [N, 3, 8, 8] → (Conv → BatchNormalization → Relu → MaxPool) · layers → Gemm → 4 scores."""
    g = np.random.default_rng(0)
    nodes, weights, x, channels, size = [], [], "x", 3, 8

    def weight(name: str, *shape: int) -> str:
        weights.append(numpy_helper.from_array(g.uniform(0.1, 0.3, shape).astype(np.float32), name))
        return name

    for i in range(layers):
        statistics = [weight(f"{k}{i}", width) for k in "sbmv"]
        nodes += [
            helper.make_node("Conv", [x, weight(f"w{i}", width, channels, 3, 3)], [f"c{i}"], pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", [f"c{i}", *statistics], [f"n{i}"]),
            helper.make_node("Relu", [f"n{i}"], [f"a{i}"]),
            helper.make_node("MaxPool", [f"a{i}"], [f"p{i}"], kernel_shape=[2, 2], strides=[2, 2]),
        ]
        x, channels, size = f"p{i}", width, size // 2
    nodes += [helper.make_node("Flatten", [x], ["f"])]
    nodes += [helper.make_node("Gemm", ["f", weight("fc", 4, width * size * size)], ["y"], transB=1)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)


FEED = {
    "x": np.random.default_rng(1).standard_normal((8, 3, 8, 8)).astype(np.float32),
    "label": np.arange(8, dtype=np.int64) % 4,
}
PRECISIONS: dict[str, Any] = {
    "fp32": lambda o: o,
    "bf16": lambda o: rc.MixedPrecision(o, "bf16"),
    "fp16": lambda o: rc.MixedPrecision(o, "fp16"),
    "fp16, no scaling": lambda o: rc.MixedPrecision(o, "fp16", loss_scaling=False),
}
#: samples that the program has before the optimizer, and the wrapper
WRAPPERS: dict[str, Any] = {
    "none": (8, lambda o: o),
    "merge": (4, lambda o: rc.GradientMerge(o, k_steps=2)),
    "merge, sums": (2, lambda o: rc.GradientMerge(o, k_steps=4, avg=False)),
    "average": (8, lambda o: rc.ExponentialMovingAverage(o, 0.9)),
    "merge of average": (4, lambda o: rc.GradientMerge(rc.ExponentialMovingAverage(o, 0.9), k_steps=2)),
}


def stepped(wrapper: str, precision: str, budget: int | None) -> tuple[list[float], dict[str, Any], int]:
    """Losses and arrays after two steps, and the measured peak."""
    batch, around = WRAPPERS[wrapper]
    program = rc.load(network(), batch=batch)
    loss = rc.losses.cross_entropy(program["y"])
    optimizer = around(PRECISIONS[precision](rc.Momentum(1e-2)))
    if budget is not None:
        optimizer = optimizer if isinstance(optimizer, rc.RecomputeOptimizer) else rc.RecomputeOptimizer(optimizer)
        optimizer.set_budget(budget, effort=0.1)
    optimizer.minimize(loss)
    executor = rc.Executor()
    losses = [float(executor.run(program, FEED, [loss])[0]) for _ in range(2)]
    peak = executor.session(program, [loss.name]).measured_peak_bytes
    assert program.planned is None or program.planned.peak_bytes == peak
    return losses, {n: np.array(a) for n, a in program.data.items()}, peak


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_a_budget_changes_no_bit(wrapper: str, precision: str) -> None:
    losses, arrays, peak = stepped(wrapper, precision, None)
    budget = peak * 8 // 10
    try:
        again, found, within = stepped(wrapper, precision, budget)
    except rc.BudgetError as e:  # it names one that works
        budget = e.sure.peak
        again, found, within = stepped(wrapper, precision, budget)
    assert within <= budget
    assert again == losses and all(np.array_equal(found[n], a) for n, a in arrays.items())


def test_running_statistics_may_be_updated_by_recomputed_ones() -> None:
    """A plan may repeat a batch normalisation before the update of its statistics: each micro-batch updates them."""
    program = rc.load(network(), batch=8)
    loss = rc.losses.cross_entropy(program["y"])
    rc.SGD(1e-2).minimize(loss)
    block = program.logical
    names = [o.op.name for o in block.operators]
    reruns = []
    for i, o in enumerate(block.operators):
        if o.op.name == "BatchNormTrain":
            made = {v.name for v in o.writes()}
            late = [
                k
                for k, r in enumerate(block.operators)
                if names[k] == "RunningUpdate" and made & {v.name for v in r.reads()}
            ]
            reruns.append(Rerun(i, late[0]))
    assert len(reruns) == 2
    micro = Slice(("micro:0:2",))
    feed = {**FEED, **{n: np.array(a) for n, a in program.data.items()}}
    results = []
    for made in (block, apply(block, RecomputePlan(tuple(reruns)))):
        step = micro.run(made)
        fetched = [loss.name, *(v.name for v in (*step.parameters, *step.buffers))]
        results.append(evaluate(step, feed, fetched))
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
    assert not np.array_equal(results[0][1 + len(block.parameters)], program.data[block.buffers[0].name])
