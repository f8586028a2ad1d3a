"""Random programs for tests (hypothesis), and what to feed them."""

from __future__ import annotations

import numpy as np
import pytest

from recompute import verify
from recompute.language.builder import Builder
from recompute.language.ir import Block, Role, Value
from recompute.language.types import TensorType

st = pytest.importorskip("hypothesis.strategies")

UNARY = ("Relu", "Tanh", "Exp", "Neg", "Sigmoid", "Identity")
BINARY = ("Add", "Mul", "Sub")
N = 6


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """A random DAG over [3, N] values with skips, shared parameters, matrix products, reductions and dropout."""
    x = Value("x", TensorType("f32", (3, N)))
    step = Value("step", TensorType("i64"))
    weights = tuple(Value(f"w{i}", TensorType("f32", (N, N))) for i in range(2))
    b = Builder.on(Block(inputs=(x,), parameters=weights, state=(step,)))
    values = [x]
    for i in range(draw(st.integers(2, 14))):
        source = values[draw(st.integers(max(0, len(values) - 4), len(values) - 1))]
        kind = draw(st.integers(0, 5))
        if kind == 0:
            v = b.MatMul(source, weights[draw(st.integers(0, 1))])
        elif kind == 1:
            v = getattr(b, draw(st.sampled_from(BINARY)))(source, values[draw(st.integers(0, len(values) - 1))])
        elif kind == 2:
            v = b.Mul(source, b.ReduceMean(source, axes=(1,)))
        elif kind == 3:
            v = b.Dropout(source, step, ratio=0.25, seed=i)
        else:
            v = getattr(b, draw(st.sampled_from(UNARY)))(source)
        values.append(v)
    b.role = Role.LOSS
    loss = b.emit(_mean(), b.Tanh(b.MatMul(values[-1], weights[0])), name="loss")
    return verify(
        Block(
            "random",
            inputs=(x,),
            parameters=weights,
            state=(step,),
            constants=tuple(b.constants),
            operators=tuple(b.operators),
            outputs=(loss.name,),
        )
    )


def _mean():  # type: ignore[no-untyped-def]
    from recompute.language.op import op_class

    return op_class("ReduceMean")(keepdims=0)


def feeds(block: Block) -> dict[str, np.ndarray]:
    g = np.random.default_rng(1)
    shapes = {v.name: v for v in (*block.inputs, *block.parameters)}
    found = {n: g.uniform(-0.5, 0.5, v.shape).astype(np.float32) for n, v in shapes.items()}
    return {**found, "step": np.array(3, np.int64)}
