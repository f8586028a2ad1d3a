"""Windows of proofs that stand for any sizes: what is proved for these is so for its own sizes, and numbers are told
apart."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.language.builder import Builder
from recompute.language.ir import Block, Value
from recompute.language.op import Op
from recompute.language.types import TensorType
from recompute.ops.norm.batch_norm_parts import BatchNormSlope
from recompute.proof import kinds
from recompute.proof.alike import Alike
from recompute.proof.numbers import expanded
from recompute.proof.prove import prove
from recompute.testing import all_ops, cases


def means(shape: tuple[int, ...], divided: float, *, mean: bool, dtype: str = "f32") -> Block:
    """The mean of a value, or its sum divided by a number."""
    b, x = Builder(), Value("x", TensorType(dtype, shape))
    axes = tuple(range(len(shape)))
    y = b.ReduceMean(x, axes=axes) if mean else b.Div(b.ReduceSum(x, axes=axes), b.constant(divided, x))
    b.operators[-1] = dataclasses.replace(b.operators[-1], outputs=(Value("y", y.type),))
    return Block("mean", (x,), operators=tuple(b.operators), constants=tuple(b.constants), outputs=("y",))


@pytest.mark.parametrize("stands", [kinds.SIZES[:2], (kinds.SIZES[0],) * 2])
def test_a_number_is_no_count_of_other_sizes(stands: tuple[int, int]) -> None:
    """Also if it is the count of the sizes that stand for any, at which the two are one expression."""
    count = stands[0] * stands[1]
    for shape in (stands, (3, 5), stands):
        unproved = prove(means(shape, count, mean=True), means(shape, count, mean=False), partly=True).unproved
        assert bool(unproved) is (shape != stands)


@pytest.mark.parametrize(
    ("dtype", "shape", "number"), [("i8", (2, 3), 6), ("u8", (20, 30), 88), ("f16", (300, 300), math.inf)]
)
def test_types_that_cannot_hold_a_count(dtype: str, shape: tuple[int, int], number: float) -> None:
    """A mean is no sum divided by what its count would overflow to."""
    blocks = (means(shape, number, mean=mean, dtype=dtype) for mean in (True, False))
    assert prove(*blocks, partly=True).unproved


def test_numbers_that_sizes_may_come_to() -> None:
    products = [math.prod(some) for n in (1, 2, 5) for some in itertools.combinations_with_replacement(kinds.SIZES, n)]
    assert all(kinds.is_product(sign * np.float32(x)) for n in products for x in (n, 1 / n) for sign in (1, -1))
    assert not any(map(kinds.is_product, (0, 1, 0.5, 2, 6, 10, 1e-5, 1e-12, 1.702, 12, 255, True, 11.1, float("inf"))))


def slope(shape: tuple[int, ...], count: int) -> Block:
    """The gradient of a batch normalisation, or with `count` its last part."""
    b = Builder()
    x, dy = (Value(n, TensorType("f32", shape)) for n in ("x", "dy"))
    scale, mean, var = (Value(n, TensorType("f32", shape[2:])) for n in ("scale", "mean", "var"))
    if not count:
        y, _, _ = b.ChannelsLastBatchNormGrad(x, scale, mean, var, dy)
    else:
        total, against = (b.ReduceSum(v, axes=(0, 1), keepdims=0) for v in (dy, b.CentredProduct(x, mean, dy)))
        y = b.BatchNormSlope(x, mean, scale, var, total, against, dy, count=count)
    out = Value("y", y.type)
    operators = [dataclasses.replace(o, outputs=tuple(out if v == y else v for v in o.outputs)) for o in b.operators]
    return Block("slope", (x, scale, mean, var, dy), operators=tuple(operators), constants=tuple(b.constants),
                 outputs=("y",))  # fmt: skip


@pytest.mark.parametrize("first", [10, 11])
def test_a_count_of_other_elements_is_not_proved(first: int) -> None:
    for shape, count in (((2, 5, 3), first), ((4, 5, 3), 20), ((4, 5, 3), 21), ((4, 7, 5), 28), ((4, 7, 5), 20)):
        unproved = prove(slope(shape, 0), slope(shape, count), partly=True).unproved
        assert bool(unproved) is (count != shape[0] * shape[1])


@pytest.mark.parametrize("cls", [c for c in all_ops() if issubclass(c, kinds.ANY_SIZE)], ids=lambda c: c.__name__)
def test_no_number_of_an_expansion_is_one_of_sizes(cls: type[Op]) -> None:
    """But for counts: what stands for any size is told from every other number."""
    for case in cases(cls):
        types = [None if a is None else TensorType.of(a) for a in case.inputs]
        outs = case.op.infer(*types)
        body = None if cls is BatchNormSlope or 0 in [t.size for t in outs] else expanded(case.op, types, outs)
        for c in body.constants if body else ():
            assert not any(map(kinds.is_product, c.data))


@pytest.mark.parametrize("name", ["gpt2-tiny", pytest.param("mobilenet_v2", marks=pytest.mark.slow),
                                  pytest.param("unet", marks=pytest.mark.slow)])  # fmt: skip
def test_what_is_proved_for_any_sizes_is_so_for_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    decided = Alike.decided

    def both(self: Alike, order: Sequence[int], pairs: Sequence[Any], *, any_size: bool) -> bool:
        if any_size and decided(self, order, pairs, any_size=True):
            seen.append(decided(self, order, pairs, any_size=False))
            return seen[-1]
        return not any_size and decided(self, order, pairs, any_size=False)

    monkeypatch.setattr(Alike, "decided", both)
    program = rc.load(rc.models.build(name), batch=4)
    loss = rc.losses.cross_entropy(program[program.block.outputs[0]])
    assert rc.compile_step(program, loss, rc.Adam(), prove=True).proof is not None
    assert seen and all(seen)
