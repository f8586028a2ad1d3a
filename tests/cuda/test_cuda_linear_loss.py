"""The head's loss and its gradient on CUDA, in several tiles of rows and words, beside NumPy."""

from __future__ import annotations

from typing import Any

import cuda_cases
import numpy as np
import pytest

import recompute as rc
from recompute.language.kernels import provider
from recompute.language.types import TensorType
from recompute.ops.loss.linear_cross_entropy import LinearCrossEntropy
from recompute.ops.loss.linear_cross_entropy_grad import LinearCrossEntropyGrad
from recompute.runtime import EmulatedCUDAPlace
from recompute.runtime.cuda.device.kernel import Launch, Product
from recompute.runtime.cuda.kernels import linear_loss
from recompute.testing import Case, Draw

pytestmark = cuda_cases.needs_device
EVERY = {"reduction": "mean", "ignore_index": 3, "smoothing": 0.2, "cap": 0.9, "z_loss": 0.03, "scale": 1.3}


def heads() -> dict[str, tuple[Any, ...]]:
    """Operators with their inputs, 37 rows and 70 words of 12 numbers."""
    draw = Draw("heads")
    labels = draw.ints("i64[37]", 0, 70)
    labels[5:9] = 3
    found: dict[str, tuple[Any, ...]] = {}
    for name, dtype, options in (
        ("plain", "f32", {}), ("every option", "f32", EVERY), ("each row", "f32", {"reduction": "none", "cap": 2.0}),
        ("f16", "f16", {"smoothing": 0.1}), ("bf16", "bf16", {"transB": 0, "reduction": "sum"}),
        ("columns", "f32", {"transB": 0, "scale": 0.5}),
    ):  # fmt: skip
        w = "12,70" if options.get("transB") == 0 else "70,12"
        bias = None if name == "plain" else draw(f"{dtype}[70]")
        found[name] = LinearCrossEntropy(**options), draw(f"{dtype}[37,12]"), draw(f"{dtype}[{w}]"), bias, labels
    return found


HEADS = heads()


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tiles of rows, three of words."""
    monkeypatch.setattr(linear_loss, "ROWS", 16)
    monkeypatch.setattr(linear_loss, "WORDS", 32)
    monkeypatch.setattr(linear_loss, "held_rows", lambda rows, words: 16)


def bind(case: Case, kernels: str = "cuda") -> cuda_cases.Bound:
    """The case by kernels of our own between products."""
    op = cuda_cases.case_block(case)[0].operators[0]
    found = provider(kernels)
    assert found.accepts(op)
    made = cuda_cases.Bound(case, op, found, cuda_cases.device())
    assert all(c.kernel.name.startswith("head_") for c in made.calls if isinstance(c, Launch))
    return made


@pytest.mark.parametrize("name", HEADS)
def test_loss(name: str) -> None:
    """Alone, with log-sum-exps, and with gradients where those are made with it."""
    op, *ins = HEADS[name]
    for want in (1, 2, None):
        case = Case(op, tuple(ins), want=want)
        if want is not None or (ins[0].dtype == np.float32 and op.reduction != "none"):
            cuda_cases.check(case, [bind(case)], units=256)


@pytest.mark.parametrize("name", HEADS)
def test_gradient(name: str) -> None:
    op, *ins = HEADS[name]
    draw = Draw(name)
    kind = op.loss_type(TensorType.of(ins[0]), TensorType.of(ins[3]))
    lse = draw("f32[37]") + np.float32(4)
    case = Case(LinearCrossEntropyGrad(**op.options()), (*ins, lse, draw(str(kind)) + np.float32(1)))
    made = bind(case)
    cuda_cases.check(case, [made], units=256)


def test_tf32_is_for_the_products() -> None:
    op, *ins = HEADS["plain"]
    case = Case(op, tuple(ins))
    for kernels, wanted in (("cuda", False), ("cuda_tf32", True)):
        products = [c for c in bind(case, kernels).calls if isinstance(c, Product)]
        assert len(products) == 3 * 3 * 3 and all(p.tf32 is wanted for p in products)


def test_gradients_of_halves_are_not_made_with_the_loss() -> None:
    op, *ins = HEADS["f16"]
    block = cuda_cases.case_block(Case(op, tuple(ins)))[0]
    assert not linear_loss.HeadLoss().accepts(block.operators[0])


def test_a_label_outside_of_the_words_is_reported() -> None:
    op, *ins = HEADS["plain"]
    wrong = ins[3].copy()
    wrong[7] = 70
    block, feed = cuda_cases.case_block(Case(op, (*ins[:3], wrong), want=1))
    with pytest.raises(rc.errors.JobError, match="label 70"):
        rc.Executor(EmulatedCUDAPlace()).run(rc.Program(block, {}), feed, list(block.outputs))


def test_a_step_by_these_kernels(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's: the processor's losses, the predicted peak, the same bits when recomputed."""
    monkeypatch.setattr(linear_loss, "WORDS", 2048)
    found = []
    for place, checkpoints in ((None, False), (cuda, False), (cuda, True)):
        program = rc.load(rc.models.build("gpt2-tiny", batch=2, seq=20, context=32), mode="eval")
        rc.losses.cross_entropy(program)
        assert ["are a head of" in note for note in rc.fuse_head(program)] == [True]
        kept = [c for c in rc.models.info("gpt2-tiny").checkpoints if c in program] if checkpoints else None
        made = rc.compile_step(program, "loss", rc.SGD(0.05), place=place, checkpoints=kept)
        draw, executor = np.random.default_rng(1), rc.Executor(place)
        feed = {v.name: draw.integers(0, 90, v.shape) for v in program.inputs}
        found.append([executor.run(made.program, feed, ["loss"])[0] for _ in range(2)])
        session = executor.session(made.program, ["loss"])
        assert session.measured_peak_bytes == made.figures.peak_bytes
        if place is not None:
            assert {o.kernel for o in made.program.block.operators if o.op.name == "LinearCrossEntropy"} == {"cuda"}
            assert not session.on_host
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    assert [x.tobytes() for x in found[1]] == [x.tobytes() for x in found[2]]
