"""Extreme numbers (infinities, NaN, zeros of both signs, and those at which a function changes): an operator's
numerics, its formula for one element, its expansion and the processor's kernels agree (those of a device:
tests/cuda/test_cuda_operators.py; PyTorch's gradients: test_extreme_gradients.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from recompute.language.builder import Builder
from recompute.language.kernels import accepting
from recompute.language.types import TensorType
from recompute.language.verify import verify
from recompute.ops.common import Elementwise
from recompute.ops.linear.products import Gemm, MatMul
from recompute.runtime.cpu.device import native
from recompute.runtime.lowering import providers
from recompute.testing import Case, all_ops, case_block, cases, check_element, evaluate

EXTREME = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -3.0, 6.0, 1e-30, 1e30, -1e30], np.float32
)
OPS = {cls.__name__: cls for cls in all_ops() if issubclass(cls, Elementwise)}
#: operators whose formulas give other numbers there on purpose, and why
DIFFERS = {
    "BatchNormSlope": "a product with an infinite scale is written in another order",
    "SoftplusGrad": "numbers below 0 are no softplus, but some of these are",
    "MishGrad": "the expansion's exponential overflows, where the formula's is of a negative number",
}
EVERY = {cls.__name__: cls for cls in all_ops() if cls.__name__ != "Free"}
#: operators whose kernels give other numbers there on purpose, and why
KERNELS_DIFFER = {
    **{f"{last}{name}": "what is beside an image is left out, or is 0, which times an infinite number is none"
       for name in ("Conv", "ConvTranspose", "ConvGradInput", "ConvGradWeight") for last in ("", "ChannelsLast")},
    **dict.fromkeys(("MaxRoiPool", "MaxRoiPoolGrad", "RoiAlign", "RoiAlignGrad"), "regions have no such corners"),
    **dict.fromkeys(("Resize", "ResizeGrad"), "weights of 0 are left out"),
    **dict.fromkeys(("LinearCrossEntropyGrad", "NormGrad"), "factors of which some are infinite in another order"),
    **dict.fromkeys(("CTCLoss", "CTCLossGrad"), "1e30 is no logarithm of a probability, and -1e30 is impossible"),
    "Sketch": "each takes sums of its own",
    **dict.fromkeys(("TiledAttentionGrad", "HeadsLastTiledAttention", "HeadsLastTiledAttentionGrad"),
                    "what is hidden or dropped is left out, or is 0, which times an infinite number is none"),
}  # fmt: skip


def extreme(case: Case, seed: int, kind: type[np.floating] = np.float32) -> Case:
    """The sample with float64 numbers drawn from EXTREME, as `kind`.

    Those of products of matrices do not overflow: whether a sum with an infinite number is then NaN depends on its
    order, and on whether a product is rounded before it is added.
    """
    g = np.random.default_rng(seed)
    most = 1e15 if isinstance(case.op, (MatMul, Gemm)) else np.inf
    numbers = np.where(np.isfinite(EXTREME), EXTREME.clip(-most, most), EXTREME)
    arrays = tuple(
        g.choice(numbers, a.shape).astype(kind) if a is not None and a.dtype == np.float64 else a for a in case.inputs
    )
    names = [f.name for f in dataclasses.fields(case.op) if getattr(case.op, f.name) == "f64"]
    dtypes = dict.fromkeys(names, TensorType.of(np.empty(0, kind)).dtype)
    return dataclasses.replace(case, op=dataclasses.replace(case.op, **dtypes), inputs=arrays)


def same(got: Any, want: Any, what: str) -> None:
    """The same infinities, NaN and zeros; other numbers to within rounding."""
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6, equal_nan=True, err_msg=what)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in OPS if n not in DIFFERS])
def test_formulas_expansions_and_numerics_agree(name: str) -> None:
    for seed, case in enumerate(c for c in cases(OPS[name]) for _ in range(2)):
        if not any(a is not None and a.dtype == np.float64 for a in case.inputs):
            continue
        case = extreme(case, seed)
        block, feed = case_block(case)
        with np.errstate(all="ignore"):
            wanted = evaluate(block, feed, providers=())
            check_element(case, block, feed)
            b = Builder.on(block, prefix="e")
            outs = case.op.expand(b, *block.operators[0].inputs)
            if outs is None or case.op.updates:
                continue
            names = [v.name for v in outs[: len(wanted)]]
            expanded = block.with_operators(
                b.operators, constants=tuple(b.constants), outputs=tuple(dict.fromkeys(names))
            )
            for got, want in zip(evaluate(verify(expanded), feed, names, providers=()), wanted, strict=True):
                same(got, want, f"{case.op}: its expansion")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in EVERY if n not in KERNELS_DIFFER])
def test_kernels_and_numerics_agree(name: str, any_size: None) -> None:
    if name == "ReluGrad" and not native.unavailable():
        block, _ = case_block(extreme(cases(EVERY[name])[0], 0))
        assert accepting(providers(), block.operators[0]), "no kernel takes what it is given here"
    for seed, case in enumerate(cases(EVERY[name])):
        if any(a is not None and a.dtype == np.float64 for a in case.inputs):
            block, feed = case_block(extreme(case, seed))
            with np.errstate(all="ignore"):
                for got, want in zip(evaluate(block, feed), evaluate(block, feed, providers=()), strict=True):
                    same(got, want, f"{case.op}: its kernel")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["SoftmaxCrossEntropyGrad", "NegativeLogLikelihoodGrad"])
def test_a_label_that_is_ignored_has_no_gradient_whatever_follows(name: str) -> None:
    """Loss 0 of an ignored label, of which a root is taken: 0 · ∞."""
    scores, labels, dloss = np.full((3, 4), -1.0), np.array([1, -1, 2]), np.array([2.0, np.inf, 1.0])
    options = {"reduction": "none", "ignore_index": -1}
    soft = name.startswith("Softmax")
    op = EVERY[name](**options) if soft else EVERY[name](shape=(3, 4), **options)
    case = Case(op, (*([scores] if soft else []), labels, None, dloss))
    block, feed = case_block(case)
    b = Builder.on(block, prefix="e")
    (out,) = op.expand(b, *block.operators[0].inputs)
    expanded = block.with_operators(b.operators, constants=tuple(b.constants), outputs=(out.name,))
    for found in (evaluate(block, feed), evaluate(block, feed, providers=()), evaluate(verify(expanded), feed)):
        assert not found[0][1].any() and np.isfinite(found[0]).all() and found[0][0].any()
