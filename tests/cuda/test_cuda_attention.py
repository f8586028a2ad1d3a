"""Attention's kernels on shapes that take every path, beside NumPy, in both orders of the threads: several strips and
tiles, windows, biases that broadcast, shared heads, queries without keys, halves, TF32, groups of columns."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import cuda_cases
import numpy as np
import pytest

import recompute as rc
from recompute.language.kernels import provider
from recompute.language.types import TensorType
from recompute.ops.attention.heads_last import MATRICES, heads_last_form
from recompute.ops.attention.tiled import TiledAttention
from recompute.ops.attention.tiled_grad import TiledAttentionGrad
from recompute.runtime.cuda.code.attention import SHARED, Tiles, chunk, kernel
from recompute.runtime.cuda.code.warp_products import WAYS, warp_products
from recompute.runtime.cuda.kernels.attention import Attention, AttentionGradient
from recompute.testing import Case, Draw

pytestmark = cuda_cases.needs_device


def forward(draw: Draw, dtype: str, shapes: tuple[str, ...], bias: Any = None, **options: Any) -> Case:
    """Shapes of q, k, v, and of a bias, which may be an array."""
    ins = [draw(f"{dtype}[{s}]") for s in shapes]
    ins.append(None if bias is None else bias if isinstance(bias, np.ndarray) else draw(f"{dtype}[{bias}]"))
    ins += [np.array(3)] if options.get("ratio") else []
    return Case(TiledAttention(**options), tuple(ins))


def backward(draw: Draw, case: Case, *, want: int | None = None) -> Case:
    """The gradient, at the results of a forward case."""
    op: Any = case.op
    ins = list(case.inputs)
    given = [None if a is None else TensorType.of(a) for a in ins]
    y, lse = (np.empty(t.shape, t.numpy) for t in op.infer(*given))
    types = given, [TensorType.of(a) for a in (y, lse)]
    op.compute(ins, [y, lse], [np.empty(t.shape, t.numpy) for t in op.scratch(*types)])
    dtype = TensorType.of(ins[0]).dtype
    down, other = (draw(f"{dtype}[{','.join(map(str, y.shape))}]") for _ in range(2))
    if (
        ins[3] is not None and ins[3].shape[-1] == 1
    ):  # all scores of a query at once change nothing: the gradient would be 0
        y = other
    return Case(TiledAttentionGrad(**op.options()), (*ins[:4], y, lse, down, *ins[4:]), want=want)


def masked(shape: tuple[int, ...], dtype: type, hidden: tuple[Any, ...]) -> np.ndarray:
    """A bias that hides some scores."""
    bias = np.zeros(shape, dtype)
    bias[hidden] = -math.inf
    return bias


def all_cases() -> dict[str, Case]:
    """By name."""
    draw = Draw("attention")
    rows_hidden = masked((70, 90), np.float32, (slice(3, 66), slice(None)))
    keys_hidden = masked((2, 1, 1, 80), np.float32, (1, 0, 0, slice(11, None)))
    both = {"cap": 1.5, "ratio": 0.3, "seed": 5}
    return {
        "causal": forward(draw, "f32", ("3,150,24",) * 3, scale=0.2, last=0),
        "odd": forward(draw, "f32", ("2,67,7", "2,101,7", "2,101,13"), scale=0.4),
        "window": forward(draw, "f32", ("140,8", "170,8", "170,4"), first=-20, last=33),
        "empty rows": forward(draw, "f32", ("140,8", "100,8", "100,4"), first=50, last=60),
        "hidden rows": forward(draw, "f32", ("70,8", "90,8", "90,4"), rows_hidden),
        "padding": forward(draw, "f32", ("2,2,70,8", "2,1,80,8", "2,1,80,8"), keys_hidden, scale=0.3),
        "shared heads": forward(draw, "f32", ("2,6,70,8", "2,1,66,8", "2,1,66,8"), "6,1,66", scale=0.3, last=0),
        "shared bias": forward(draw, "f32", ("2,2,3,66,4", "1,2,1,66,4", "1,2,1,66,4"), "1,2,3,66,66", last=4),
        "a bias a query": forward(draw, "f32", ("3,70,8", "3,66,8", "3,66,8"), "3,70,1", first=-9),
        "one bias": forward(draw, "f32", ("3,70,8", "3,66,8", "3,66,8"), "1"),
        "dropout": forward(
            draw, "f32", ("2,3,70,8", "2,1,83,8", "2,1,83,8"), "3,1,83", last=9, cap=1.5, ratio=0.3, seed=5
        ),
        "a part of dropout": forward(
            draw, "f32", ("2,40,24",) * 3, cap=2.0, ratio=0.5, seed=7, rows=(5, 99), at=(2, 11)
        ),
        "wide": forward(draw, "f32", ("20,260", "37,260", "37,328"), scale=0.1),
        "f16": forward(draw, "f16", ("2,70,40", "1,130,40", "1,130,72"), draw("f32[2,1,130]"), scale=0.2, last=60),
        "wide f16": forward(draw, "f16", ("20,136", "70,136", "70,264"), scale=0.1, **both),
        "bf16": forward(draw, "bf16", ("2,70,21", "2,90,21", "2,90,3"), "70,90", scale=0.2),
    }


CASES = all_cases()
GRADIENTS = {n: backward(Draw(n), c, want=3 if c.inputs[3] is None else 4) for n, c in CASES.items()}
#: those that are also multiplied in TF32
TF32 = ("causal", "wide")


def bind(case: Case, kernels: str = "cuda") -> cuda_cases.Bound:
    """The case by a provider."""
    op = cuda_cases.case_block(case)[0].operators[0]
    assert provider(kernels).accepts(op)
    return cuda_cases.Bound(case, op, provider(kernels), cuda_cases.device())


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    made = bind(CASES[name])
    assert len(made.calls) == 1
    cuda_cases.check(CASES[name], [made])


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient(name: str) -> None:
    made = bind(GRADIENTS[name])
    assert len(made.calls) == (3 if GRADIENTS[name].inputs[3] is None else 4)
    cuda_cases.check(GRADIENTS[name], [made])


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.inputs[0].ndim > 2])
def test_heads_beside_each_other_give_the_same_bits(name: str) -> None:
    for case in (CASES[name], GRADIENTS[name]):
        ins, outs = MATRICES[type(case.op)]
        for some in (ins, outs), (ins[:2], outs[:1]), (ins[2:], outs[1:]):
            turned = [np.ascontiguousarray(a.swapaxes(-3, -2)) if i in some[0] else a
                      for i, a in enumerate(case.inputs)]  # fmt: skip
            form = dataclasses.replace(case, op=heads_last_form(case.op, *some), inputs=tuple(turned))
            for i, (a, b) in enumerate(zip(bind(form).run(0xFF), bind(case).run(0xFF), strict=True)):
                assert np.array_equal(a.swapaxes(-3, -2) if i in some[1] else a, b, equal_nan=True)


@pytest.mark.parametrize("name", TF32)
def test_tf32(name: str) -> None:
    """Eleven bits of every factor; more than that would be float32's own."""
    for case in (CASES[name], GRADIENTS[name]):
        made = bind(case, "cuda_tf32")
        assert all("tf32" in k.name or "delta" in k.name for k in made.kernels)
        cuda_cases.check(case, [made], units=2.0**14)
        with pytest.raises(AssertionError):
            cuda_cases.check(case, [made], units=64)


def test_halves_without_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """What devices before compute capability 8.0 run: the same tiles by fused multiply-adds."""
    monkeypatch.setitem(WAYS, "f16", dataclasses.replace(WAYS["f16"], tensor=False))
    for case in (CASES["f16"], GRADIENTS["f16"]):
        warp_products.cache_clear()
        kernel.cache_clear()
        made = bind(case)
        assert not any("mma" in k.text for k in made.kernels)
        cuda_cases.check(case, [made])
    warp_products.cache_clear()
    kernel.cache_clear()


def test_shared_memory_is_what_any_device_has() -> None:
    for way in WAYS:
        for drops in (False, True):
            assert Tiles(way, 256 // chunk(way), 1, drops=drops).shared <= SHARED


@pytest.mark.parametrize("case", [CASES["causal"], GRADIENTS["causal"]], ids=["forward", "gradient"])
def test_who_does_not_run_it(case: Case) -> None:
    """Empty tensors are the operator's own numerics'."""
    op = cuda_cases.case_block(case)[0].operators[0]
    family: Any = Attention() if len(op.outputs) < 3 else AttentionGradient()
    assert family.accepts(op)
    empty = Case(case.op, tuple(None if a is None else a[:, :0] for a in case.inputs), want=case.want)
    assert not family.accepts(cuda_cases.case_block(empty)[0].operators[0])


@pytest.mark.parametrize(("precision", "mode"), [("fp32", "train"), ("tf32", "eval"), ("bf16", "eval")])
def test_a_step_by_these_kernels(precision: str, mode: str, cuda: Any) -> None:
    """GPT-2's, with dropout and without: the processor's losses, the predicted peak, the same bits when recomputed."""
    found, mode = [], "train" if precision == "fp32" else "eval"
    for place, checkpoints in ((None, False), (cuda, False), (cuda, True)):
        program = rc.load(rc.models.build("gpt2-tiny", batch=2, seq=20, context=32, dropout=0.2), mode=mode)
        assert all("is attention" in note for note in rc.fuse_attention(program))
        rc.losses.cross_entropy(program)
        kept = [c for c in rc.models.info("gpt2-tiny").checkpoints if c in program] if checkpoints else None
        options: dict[str, Any] = {"precision": "fp32" if place is None else precision, "checkpoints": kept}
        made = rc.compile_step(program, "loss", rc.SGD(0.05), place=place, **options)
        draw, executor = np.random.default_rng(1), rc.Executor(place)
        feed = {v.name: draw.integers(0, 90, v.shape) for v in program.inputs}
        found.append([executor.run(made.program, feed, ["loss"])[0] for _ in range(2)])
        session = executor.session(made.program, ["loss"])
        assert session.measured_peak_bytes == made.figures.peak_bytes
        if place is not None:
            used = {o.kernel for o in made.program.block.operators if "TiledAttention" in o.op.name}
            assert used == {"cuda_tf32" if precision == "tf32" else "cuda"}
    np.testing.assert_allclose(found[1], found[0], rtol={"fp32": 1e-5, "tf32": 1e-3}.get(precision, 2e-2))
    assert [x.tobytes() for x in found[1]] == [x.tobytes() for x in found[2]]
