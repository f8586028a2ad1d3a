"""Layout as a pass: the same numbers, recomputation's bits, hardly any transposes, no more memory."""

from __future__ import annotations

import types

import numpy as np
import pytest
from zoo_cases import narrow, network

import recompute as rc
from recompute import models, parse
from recompute.compiling.compiler import _made
from recompute.errors import UsageError
from recompute.language import ir
from recompute.language.ir import Block, Role
from recompute.language.kernels import PROVIDERS
from recompute.language.program import Program
from recompute.language.types import TensorType
from recompute.ops.channels_last import FORMS, channels_last_form
from recompute.ops.convolution.conv import Conv
from recompute.passes import ChannelsLast, cleaned, pipeline, run_passes
from recompute.passes.scheduling.schedule import live_peak
from recompute.testing import evaluate, in_float64

NETWORKS = ["alexnet", "densenet121", "fcn8", "googlenet", "lenet", "mobilenet_v2", "pspnet", "resnet18", "segnet",
            "unet", "vgg11_bn"]  # fmt: skip


def stepped(name: str, checkpoints: list[str] | None = None) -> tuple[Program, str, dict[str, np.ndarray]]:
    """A narrowed network's training step, without plan; recomputed where checkpoints are given."""
    program, loss, feed = network(name)
    optimizer = rc.Momentum(learning_rate=0.01)
    if checkpoints is not None:
        optimizer = rc.RecomputeOptimizer(optimizer).set_checkpoints(checkpoints)
    step = _made(program, loss, optimizer, ())
    step.block = cleaned(step.block, rc.Target())
    return step, loss, feed


def turned(block: Block) -> Block:
    after = run_passes(block, [ChannelsLast()])
    assert parse(str(after)) == after
    return after


def trained(step: Program, block: Block, loss: str, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The loss of two steps and what has been trained."""
    program, executor = Program(block, {n: a.copy() for n, a in step.data.items()}), rc.Executor()
    losses = [executor.run(program, feed, [loss])[0] for _ in range(2)]
    return {**program.data, "": np.stack(losses)}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_same_numbers(name: str) -> None:
    step, loss, feed = stepped(name)
    step = in_float64(step)
    feed = {k: a.astype(np.float64) if a.dtype == np.float32 else a for k, a in feed.items()}
    after = turned(step.block)
    assert any(type(o.op) in FORMS.values() for o in after.operators)
    assert not any(type(o.op) in FORMS and next(o.reads()).ndim > 2 for o in after.operators)
    expected = trained(step, step.block, loss, feed)
    for key, array in trained(step, after, loss, feed).items():
        np.testing.assert_allclose(array, expected[key], rtol=1e-12, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("name", ["mobilenet_v2", "pspnet", "resnet18"])
def test_recomputed_bits_are_the_same(name: str) -> None:
    plain, loss, feed = stepped(name)
    entry = models.info(name, **narrow(name))
    again, *_ = stepped(name, [c for c in entry.checkpoints if c in plain])
    assert any(o.role is Role.RECOMPUTE for o in again.block.operators)
    expected = trained(plain, turned(plain.block), loss, feed)
    for key, array in trained(again, turned(again.block), loss, feed).items():
        assert array.tobytes() == expected[key].tobytes(), key


@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny", "lstm", "mlp4"])
def test_what_has_no_images_stays_as_it_is(name: str) -> None:
    step, *_ = stepped(name)
    assert turned(step.block) is step.block


@pytest.mark.parametrize(("name", "transposes"), [("resnet50", 1), ("mobilenet_v2", 1), ("unet", 1)])
def test_memory_and_transposes(name: str, transposes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for copies that a kernel does not make, as much memory as before; the images alone are transposed."""
    step, *_ = stepped(name)
    for cls in (*FORMS, *FORMS.values()):
        monkeypatch.setattr(cls, "scratch", lambda self, ins, outs: ())
    monkeypatch.setattr(ir, "_workspace", ir._workspace.__wrapped__)  # other tests' operators keep their workspace
    after = turned(step.block)
    assert sum(o.op.name == "Transpose" for o in after.operators) == transposes
    images = sum(v.nbytes for v in step.block.inputs)
    assert live_peak(after) <= 1.002 * live_peak(step.block) + images


def test_a_parameter_that_changes_is_turned_again() -> None:
    block = parse("""program p {
      input %x: f64[2,3,4,5]
      param %w: f64[2,3,1,1]
      state %map: f64[2,4,5]
      %y: f64[2,2,4,5] = Conv(%x, %w)
      %a: f64[2,2,4,5] = Add(%y, %map)
      %more: f64[2,4,5] = Mul(%map, %map)
      %map: f64[2,4,5] = RunningUpdate(%map, %more)
      %b: f64[2,2,4,5] = Add(%a, %map)
      %z: f64[2,2,4,5] = MaxPool(%b) {kernel_shape=[1,1]}
      output %z, %map
    }""")
    after = turned(block)
    assert sum(o.op.name == "Transpose" and o.inputs[0].name == "map" for o in after.operators) == 2  # type: ignore[union-attr]
    g = np.random.default_rng(0)
    feed = {v.name: g.standard_normal(v.shape) for v in (*block.inputs, *block.parameters, *block.state)}
    for a, b in zip(evaluate(block, feed), evaluate(after, feed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_form_says_what_it_is() -> None:
    for cls, form in FORMS.items():
        assert form.__name__ == f"ChannelsLast{cls.__name__}" and cls.__name__ in (form.__doc__ or "")
    conv = channels_last_form(Conv())
    assert conv is not None
    with pytest.raises(rc.RecomputeError, match=r"ChannelsLastConv\(f32\[2,5,5,3\], f32\[4,2,3,3\]\): .*3 channels"):
        conv.infer(TensorType("f32", (2, 5, 5, 3)), TensorType("f32", (4, 2, 3, 3)))


def test_nothing_turns_around_convolutions_that_stay() -> None:
    step, *_ = stepped("resnet18")
    none = types.SimpleNamespace(name="none", accepts=lambda op: "Conv" not in op.op.name)
    PROVIDERS["none"] = none
    try:
        assert run_passes(step.block, [ChannelsLast(("none",))]) is step.block
    finally:
        del PROVIDERS["none"]


def test_it_comes_before_liveness() -> None:
    with pytest.raises(UsageError, match="'channels-last' comes before 'liveness'"):
        run_passes(stepped("resnet18")[0].block, pipeline("liveness,channels-last"))
