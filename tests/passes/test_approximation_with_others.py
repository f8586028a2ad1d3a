"""Approximations beside slices, gradient merge, mixed precision, clipping and values in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import recompute as rc
from recompute.errors import UsageError

OPTIONS = {"layers": 1, "hidden": 32, "heads": 2, "context": 32, "seq": 32, "vocab": 50, "dropout": 0}
ALL = "sketch:0.2,bits:4,store:8"
Wrapped = Callable[[rc.RecomputeOptimizer], Any]


def trained(wrap: Wrapped, inner: Any, allowed: str) -> tuple[list[float], int, tuple[str, ...]]:
    """Two losses, the peak, and what is approximated."""
    program = rc.load(rc.models.build("gpt2-tiny", **OPTIONS), batch=8)
    loss = rc.losses.cross_entropy(program["logits"], axis=-1)
    optimizer = rc.RecomputeOptimizer(inner)
    wrapped = wrap(optimizer.set_approximations(allowed) if allowed else optimizer)
    wrapped.minimize(loss)
    executor, batch = rc.Executor(), rc.data.synthetic_batch(program)
    losses = [float(executor.run(program, batch, [loss])[0]) for _ in range(2)]
    session = executor.session(program, (loss.name,))
    assert session.measured_peak_bytes == session.report.peak
    return losses, session.report.peak, () if program.plan is None else program.plan.approximations


@pytest.mark.parametrize(
    "wrap",
    [
        lambda o: o.set_slices("all:0:2"),
        lambda o: rc.GradientMergeOptimizer(o, k_steps=2),
        lambda o: o.set_checkpoints(["h.0.out"]).set_slices("all:0:2"),
    ],
    ids=["slices", "gradient-merge", "checkpoints-slices"],
)
def test_each_slice_approximates_its_own(wrap: Wrapped) -> None:
    """Weights that the forward pass transposes for all slices stay as they are: the second slice still reads them."""
    losses, peak, choices = trained(wrap, rc.SGD(0.1), ALL)
    names = {c.partition("=")[0] for c in choices}
    assert "decoder" not in names and len({n.partition("#")[2] for n in names if "#" in n}) == 2
    exact_losses, exact_peak, _ = trained(wrap, rc.SGD(0.1), "")
    assert losses[0] == exact_losses[0] and abs(losses[1] - exact_losses[1]) < 0.02
    assert losses[1] != exact_losses[1] and peak <= exact_peak


@pytest.mark.parametrize(
    "inner",
    [
        lambda: rc.MixedPrecision(rc.SGD(0.1), "bf16"),
        lambda: rc.MixedPrecision(rc.SGD(0.1), "fp16"),
        lambda: rc.SGD(0.1, grad_clip=rc.clip.ClipGradByGlobalNorm(0.5)),
    ],
    ids=["bf16", "fp16", "clipping"],
)
def test_precision_and_clipping(inner: Callable[[], Any]) -> None:
    losses, _, choices = trained(lambda o: o, inner(), ALL)
    assert choices and losses[1] < losses[0]
    assert not any(c.startswith(("wte", "wpe", "h.0.attn.c_attn.weight", "h.0.mlp.c_fc.weight")) for c in choices)


def test_values_in_host_memory_are_refused() -> None:
    with pytest.raises(UsageError, match="host memory are not combined with approximations"):
        trained(lambda o: o.set_checkpoints(["h.0.out"]).set_offload(), rc.SGD(0.1), ALL)
