"""Gradients of operators are those of what they expand into: two derivations of one formula, compared at samples."""

from __future__ import annotations

import numpy as np
import pytest

from recompute.language.builder import Builder
from recompute.language.ir import Block
from recompute.language.op import Op
from recompute.passes.gradient.autodiff import differentiate
from recompute.testing import Case, all_ops, case_block, cases, evaluate, weighted_loss

#: operators that have a gradient beside their expansion; others are differentiated by it, and updates not at all
BOTH = [c for c in all_ops() if Op.expand is not c.expand and Op.gradient is not c.gradient and not c.updates]
#: those of which no gradient is compared
NONE = {
    "Cotangent": "it passes on what a user's function gives for the gradient",
    "CustomGradient": "its gradient is a user's, and not its expansion's",
    "DequantizeNBits": "codes and scales are not trained",
    "MovingRange": "statistics are not trained",
    "RangeScale": "statistics are not trained",
    "RangeZero": "statistics are not trained",
    "ShareTies": "its samples lie on ties, where the other inputs have no slope",
}
#: what central differences of samples do not check, as they round, and is compared here all the same
ROUNDED = {"FakeQuantize": ["x0"]}


def gradients(block: Block, feed: dict[str, np.ndarray], wrt: list[str]) -> dict[str, np.ndarray]:
    """Of a weighted sum of the outputs in f64, by the inputs `wrt`; 0 where nothing depends on one."""
    scalar, loss = weighted_loss(block, [n for n in block.outputs if block.values()[n].dtype == "f64"])
    grads, pairs = differentiate(scalar, loss, wrt)
    results = evaluate(grads, feed, [g.name for _, g in pairs]) if pairs else []
    return {n: np.zeros(feed[n].shape) for n in wrt} | {v.name: g for (v, _), g in zip(pairs, results, strict=True)}


def compared(case: Case) -> int:
    """How many gradients of a sample were compared with those of its expansion."""
    block, feed = case_block(case)
    b, (op,) = Builder.on(block, prefix="e"), block.operators
    floats = [f"x{i}" for i, a in enumerate(case.inputs) if a is not None and a.dtype == np.float64]
    wrt = ROUNDED.get(case.op.name, [n for n in floats if case.gradient and int(n[1:]) not in case.still])
    outs = [v.name for v in case.op.expand(b, *op.inputs) or () if v is not None][: len(block.outputs)]
    if not set(wrt) & set(floats) or len(outs) < len(block.outputs):
        return 0
    expanded = block.with_operators(b.operators, constants=tuple(b.constants), outputs=tuple(outs))
    own, other = (gradients(x, feed, wrt) for x in (block, expanded))
    for name in wrt:
        size = max(1.0, float(np.abs(other[name]).max(initial=0)))
        np.testing.assert_allclose(own[name], other[name], rtol=0, atol=1e-11 * size, err_msg=f"{case.op}: {name}")
    return len(wrt)


@pytest.mark.parametrize("cls", BOTH, ids=lambda cls: cls.__name__)
def test_gradients_of_operators_are_those_of_their_expansions(cls: type[Op]) -> None:
    count = sum(compared(case) for case in cases(cls))
    assert (count == 0) is (cls.__name__ in NONE)
