"""Extreme numbers (infinities, NaN, zeros of both signs, and those at which a function changes): an operator's
numerics, its formula for one element, its expansion and the processor's kernels agree.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from recompute.language.builder import Builder
from recompute.language.kernels import accepting
from recompute.language.verify import verify
from recompute.ops.common import Elementwise
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


def extreme(case: Case, seed: int) -> Case:
    """The sample with its floats as float32, drawn from EXTREME."""
    g = np.random.default_rng(seed)
    arrays = tuple(
        g.choice(EXTREME, a.shape).astype(np.float32) if a is not None and a.dtype == np.float64 else a
        for a in case.inputs
    )
    names = [f.name for f in dataclasses.fields(case.op) if getattr(case.op, f.name) == "f64"]
    return dataclasses.replace(case, op=dataclasses.replace(case.op, **dict.fromkeys(names, "f32")), inputs=arrays)


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
@pytest.mark.parametrize("name", OPS)
def test_kernels_and_numerics_agree(name: str, any_size: None) -> None:
    if name == "ReluGrad" and not native.unavailable():
        block, _ = case_block(extreme(cases(OPS[name])[0], 0))
        assert accepting(providers(), block.operators[0]), "no kernel takes what it is given here"
    for seed, case in enumerate(cases(OPS[name])):
        if any(a is not None and a.dtype == np.float64 for a in case.inputs):
            block, feed = case_block(extreme(case, seed))
            with np.errstate(all="ignore"):
                for got, want in zip(evaluate(block, feed), evaluate(block, feed, providers=()), strict=True):
                    same(got, want, f"{case.op}: its kernel")
