"""What is said about budgets that nothing fits: proofs hold for the lowered step, and the advice is near them."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest

import recompute as rc
from recompute.compiling.compiler import plain_fitting
from recompute.compiling.steps import attach_loss
from recompute.language.ir import Role
from recompute.models.common import Init, InputSpec, Net
from recompute.passes.planners.fit.plan import fit_within
from recompute.passes.planners.fit.problem import Fitting
from recompute.passes.planners.fit.refusal import lowest_quickly
from recompute.passes.planners.methods.auto import quick_frontier_of
from recompute.runtime.lowering import resolved
from recompute.training.base import Optimizer

#: a table far larger than the rest: the two gradients of it would be most of the step's memory
_TIED = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 4096, "seq": 8, "dropout": 0.0}
#: activations far larger than the weights
_DEEP = {"layers": 4, "hidden": 16, "heads": 2, "vocab": 64, "seq": 32, "dropout": 0.0}


def fitting(options: dict[str, float], batch: int, optimizer: Optimizer) -> Fitting:
    program = rc.load(rc.models.build("gpt2-tiny", weights=False, **options), batch=batch)
    loss = rc.losses.cross_entropy(program["logits"]).name
    return plain_fitting(program, loss, optimizer, resolved(rc.Target("cuda:0", cost="h100-80")))


@pytest.mark.parametrize("mixed", [False, True])
def test_no_more_is_proven_of_a_tied_network_than_it_needs(mixed: bool) -> None:
    optimizer = rc.MixedPrecision(rc.AdamW(1e-4), "bf16") if mixed else rc.SGD(0.01)
    f = fitting(_TIED, 1, optimizer)
    assert any(o.op.name == "AddRows" for o in f.plain.compiled.operators)
    assert f.derived.problem.fixed < f.least <= f.plain.peak


def test_the_budget_that_is_advised_repeats_as_much_as_it_takes() -> None:
    f = fitting(_DEEP, 4, rc.SGD(0.01))
    with pytest.raises(rc.BudgetError, match="are needed") as refused:
        fit_within(f, f.least - 1)
    advised = refused.value.sure.peak
    first = quick_frontier_of(f.derived.problem).first
    assert first is not None
    assert f.least <= advised < first.peak
    assert f"a budget of {advised}B or more" in str(refused.value)
    assert lowest_quickly(fitting(_DEEP, 4, rc.SGD(0.01)), advised).peak == advised  # what every search falls back on


#: networks whose lowered steps have fewer values, or smaller scratch, than the steps that are planned
_NETWORKS: dict[str, tuple[int, dict[str, int]]] = {
    "bert-tiny": (16, {}),
    "gpt2-tiny": (2, {}),
    "vit-tiny": (2, {"layers": 2}),
    "llama-tiny": (4, {}),
    "lstm": (2, {}),
    "ds_cnn": (4, {}),
}


def _channels_last(net: Net) -> None:
    """Exported from channels-last convolutions: its Transposes go, as the convolution's result is so already."""
    net.input(InputSpec("x", "float32", (4, 3, 32, 32)))
    y = net.conv("x", "stem", channels=(3, 64), kernel=3, padding=1)
    y = net.add("Transpose", [y], "turned", perm=[0, 2, 3, 1])
    net.output(net.add("ReduceMean", [y, net.constant("axes", [1, 2])], "mean", keepdims=0), ("n", "c"))


def _slopes(net: Net) -> None:
    """A gradient that overwrites an operand only within a loop."""
    net.input(InputSpec("x", "float32", (1024, 4)))
    y = net.gemm("x", "first", sizes=(4, 256), init=_NORMAL)
    y = net.add("PRelu", [y, net.parameter("slopes", (256,), Init("constant", 0.2))], "active")
    net.output(net.gemm(y, "last", sizes=(256, 4), init=_NORMAL), ("n", "c"))


def _partly_folded(net: Net) -> None:
    """Products read what is transposed, gradients of weights the Transpose: it runs when those do."""
    net.input(InputSpec("x", "float32", (2, 128, 4)))
    y = net.add("Softmax", [net.dense("x", "first", sizes=(4, 16), init=_NORMAL)], "soft", axis=-1)
    y = net.add("Transpose", [y], "turned", perm=[0, 2, 1])
    parts = [net.dense(y, f"part{i}", sizes=(128, 128), init=_NORMAL) for i in range(3)]
    scores = net.add("MatMul", [parts[0], net.add("Transpose", [parts[1]], "keys", perm=[0, 2, 1])], "scores")
    y = net.add("MatMul", [net.add("Softmax", [scores], "weights", axis=-1), parts[2]], "attention")
    net.output(y, ("n", "s", "c"))


def _pooled_norm(net: Net) -> None:
    """A normalisation whose gradient is opened to loops, which need less scratch."""
    net.input(InputSpec("x", "float32", (4, 3, 16, 16)))
    y = net.batch_norm(net.conv("x", "stem", channels=(3, 32), kernel=3, padding=1), "norm", channels=32)
    y = net.average_pool(y, "pool", kernel=2, stride=2)
    net.output(net.add("ReduceMean", [y, net.constant("axes", [2, 3])], "mean", keepdims=0), ("n", "c"))


def _turned_mask(net: Net) -> None:
    """A Relu between Transposes that go: its gradient's loop makes it again from the normalisation's operand."""
    net.input(InputSpec("x", "float32", (2, 3, 32, 32)))
    y = net.batch_norm(net.conv("x", "stem", channels=(3, 8), kernel=3, padding=1), "norm", channels=8)
    y = net.add("Relu", [net.add("Transpose", [y], "turned", perm=[0, 2, 3, 1])], "relu")
    y = net.average_pool(net.add("Transpose", [y], "back", perm=[0, 3, 1, 2]), "pool", kernel=2, stride=2)
    net.output(net.add("ReduceMean", [y, net.constant("axes", [2, 3])], "mean", keepdims=0), ("n", "c"))


_NORMAL = Init("normal", 0.02)
_DRAWN = [_channels_last, _slopes, _partly_folded, _pooled_norm, _turned_mask]


@pytest.mark.parametrize("draw", _DRAWN)
@pytest.mark.parametrize("place", ["cpu", "cuda:0"])
def test_no_lowered_step_is_below_its_bounds(draw: Callable[[Net], None], place: str) -> None:
    net = Net(batch=1, weights=False, seed=0)
    draw(net)
    program = rc.load(onnx.shape_inference.infer_shapes(net.model("drawn", description="")))
    loss = rc.losses.mse(program).name
    bounds_hold(plain_fitting(program, loss, rc.Adam(), resolved(rc.Target(place, cost="h100-80"))))


@pytest.mark.parametrize("name", _NETWORKS)
@pytest.mark.parametrize("place", ["cpu", "cuda:0"])
def test_no_compiled_step_is_below_its_bounds(name: str, place: str) -> None:
    batch, options = _NETWORKS[name]
    program = rc.load(rc.models.build(name, batch=batch, weights=False, **options))
    loss, _ = attach_loss(program, None)
    bounds_hold(plain_fitting(program, loss, rc.Adam(), resolved(rc.Target(place, cost="h100-80"))))


def bounds_hold(f: Fitting) -> None:
    low = lowest_quickly(f, 0)
    assert f.least <= min(f.plain.peak, f.unrepeated.peak, low.peak)
    more = sum(f.seconds(o) for o in low.block.operators if o.role is Role.RECOMPUTE)
    costs = [(f.plain, f.cost(f.plain)), (f.unrepeated, f.cost(f.unrepeated))]
    costs += [(low, f.derived.problem.cost + more)] if low is not f.plain else []
    for step, cost in costs:
        assert f.bound(step.peak) <= cost * (1 + 1e-9)
