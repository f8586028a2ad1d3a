"""Proofs of programs that ranks share: rows of tables, parts of reductions and sums, what operators are linear in."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.language.axes import Cut
from recompute.language.builder import Builder
from recompute.language.factors import Place
from recompute.language.ir import Block, Constant, Operator, Value
from recompute.language.op import Op
from recompute.language.types import TensorType
from recompute.ops.indexing.gather import Gather, GatherGrad
from recompute.ops.indexing.scatter import GatherElements, GatherElementsGrad
from recompute.passes.sharding.rows import _local, rows_of_part
from recompute.proof.numbers import Numbers
from recompute.proof.prove import final
from recompute.testing import all_ops, cases, evaluate

SHAPE = (2, 6, 4)
TAKING: list[Any] = [Gather(1), GatherElements(1), GatherGrad(SHAPE, 1), GatherElementsGrad(SHAPE, 1)]


def same(block: Block, names: tuple[str, str]) -> bool:
    """Whether two values of a block have the same number."""
    env, _ = final(Numbers(), block)
    return env[names[0]] == env[names[1]]


def shared_rows(op: Any, ranks: int, *, constant: bool) -> tuple[Block, tuple[str, str]]:
    """An operator that takes or adds rows, and the same from what each rank has: their sum, or the joined parts."""
    b, grads = Builder(), isinstance(op, (GatherGrad, GatherElementsGrad))
    shape = (2, 3, 4) if isinstance(op, (GatherElements, GatherElementsGrad)) else (3,)
    at = b.constant(4, "i64") if constant else Value(b.names.take("at"), TensorType("i64", shape))
    rows = shape if len(shape) > 1 else (2, *at.shape, 4)
    first = Value(b.names.take("x"), TensorType("f64", rows if grads else SHAPE))
    inputs = [at, first] if grads else [first, at]
    whole, size, parts = b.emit(op, *inputs), SHAPE[1] // ranks, []
    for r in range(ranks):
        own = inputs if grads else [b.Slice(first, starts=(r * size,), ends=((r + 1) * size,), axes=(1,)), at]
        o = Operator(op, tuple(inputs), (Value(b.names.take("part"), whole.type),))
        last = rows_of_part(b, o, Cut(Place(1, 1, size), ranks), r, own)
        parts.append(Value(b.names.take("rows"), last.op.infer(*last.types[0])[0]))
        b.operators.append(dataclasses.replace(last, outputs=(parts[-1],)))
    together = b.Concat(*parts, axis=1) if grads else b.add_all(parts)
    names = whole.name, together.name
    declared = (first,) if constant else (first, at)
    return Block("rows", declared, operators=tuple(b.operators), constants=tuple(b.constants), outputs=names), names


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize(
    ("op", "constant"), [*((op, False) for op in TAKING), (Gather(1), True), (GatherGrad(SHAPE, 1), True)]
)
def test_rows_of_parts_are_those_of_the_whole_table(op: Any, constant: bool, ranks: int) -> None:
    """With another constant, of where a part begins, or how long it or the table is, only if no value changes."""
    block, names = shared_rows(op, ranks, constant=constant)
    assert same(block, names)
    draw = np.random.default_rng(0)
    at = np.arange(np.prod(block.inputs[-1].shape)).reshape(block.inputs[-1].shape) % 12 - 6
    feed = {"x": draw.normal(size=block.inputs[0].shape)} | ({} if constant else {"at": at})
    np.testing.assert_allclose(*evaluate(block, feed), rtol=1e-12)
    refused = 0
    for i, c in enumerate(block.constants):
        other = Constant(c.value, tuple(x + 1 for x in c.data))
        wrong = dataclasses.replace(block, constants=(*block.constants[:i], other, *block.constants[i + 1 :]))
        if same(wrong, names):
            np.testing.assert_allclose(*evaluate(wrong, feed), rtol=1e-12)
        refused += not same(wrong, names)
    assert refused


def test_rows_by_numbers_that_may_be_fractions_are_not_proved() -> None:
    """Where another bound of a part is the same for all whole numbers, and not for others."""
    x, at, b = Value("x", TensorType("f32", (6, 4))), Value("at", TensorType("f64", (3,))), Builder()
    parts = []
    for start in (0, 3):
        local, inside = _local(b, at, start, 3, 6)
        part = b.Slice(x, starts=(start,), ends=(start + 3,), axes=(0,))
        taken = b.Gather(part, b.Cast(local, to="i64"), axis=0)
        parts.append(b.Where(b.Reshape(inside, shape=(3, 1)), taken, b.constant(0, taken)))
    name, numbers = b.Add(*parts).name, Numbers()
    block = Block("rows", (x, at), operators=tuple(b.operators), constants=tuple(b.constants), outputs=(name,))
    others = [Constant(c.value, (-0.5,)) if c.data == (0,) and c.value.dtype == "f64" else c for c in b.constants]
    both = block, dataclasses.replace(block, constants=tuple(others))
    feed = {"x": np.ones(x.shape, np.float32), "at": np.array([1, 2.75, 4])}
    assert len({final(numbers, k)[0][name] for k in both}) == 2
    assert not np.array_equal(*(evaluate(k, feed)[0] for k in both))


@pytest.mark.parametrize("name", ["ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceLogSumExp", "ReduceMean",
                                  "ReduceL2", "ReduceSumSquare"])  # fmt: skip
def test_reductions_of_the_reductions_of_parts(name: str) -> None:
    """Of sums, products, largest elements and sums of exponentials they are the whole's, of others not."""
    x, b = Value("x", TensorType("f64", (6, 4))), Builder()
    parts = [getattr(b, name)(b.Slice(x, starts=(i,), ends=(i + 2,), axes=(0,)), axes=(0,)) for i in (0, 2, 4)]
    names = getattr(b, name)(x, axes=(0,)).name, getattr(b, name)(b.Concat(*parts, axis=0), axes=(0,)).name
    block = Block("parts", (x,), operators=tuple(b.operators), constants=tuple(b.constants), outputs=names)
    a, c = evaluate(block, {"x": np.random.default_rng(0).random(x.shape)})
    assert same(block, names) is (name not in ("ReduceMean", "ReduceL2", "ReduceSumSquare"))
    assert np.allclose(a, c) or not same(block, names)


def half(b: Builder, how: str, x: Value, i: int, axis: int = 0) -> Value:
    """One half's part of a reduction of an axis of 4; of both halves for 2."""
    part = b.Slice(x, starts=(2 * i,), ends=(2 * i + 2,), axes=(axis,)) if i < 2 else x
    return getattr(b, f"Reduce{how}")(part, axes=(axis,))


#: by what is wrong: dtype, a whole result, and what is made of one half of a sum and the other half of another
HALVES: dict[str, tuple[str, Any, Any]] = {
    "factor": ("f64", lambda b, x, z: b.Mul(half(b, "Sum", x, 2), half(b, "Sum", z, 2)),
               lambda b, x, z: b.Add(b.Mul(half(b, "Sum", x, 0), half(b, "Sum", z, 2)),
                                     b.Mul(half(b, "Sum", x, 2), half(b, "Sum", z, 1)))),
    "side": ("f64", lambda b, x, z: b.MatMul(half(b, "Sum", x, 2), half(b, "Sum", z, 2), transB=1),
             lambda b, x, z: b.Add(b.MatMul(half(b, "Sum", x, 0), half(b, "Sum", z, 2), transB=1),
                                   b.MatMul(half(b, "Sum", z, 1), half(b, "Sum", x, 2), transB=1))),
    "index": ("f64", lambda b, x, z: half(b, "Sum", half(b, "Sum", x, 2, 1), 2),
              lambda b, x, z: b.Add(half(b, "Sum", half(b, "Sum", x, 0, 1), 2),
                                    half(b, "Sum", half(b, "Sum", x, 2, 1), 1))),
    "rounding": ("i64", lambda b, x, z: b.Div(half(b, "Sum", x, 2), b.constant(7, x)),
                 lambda b, x, z: b.Add(*(b.Div(half(b, "Sum", x, i), b.constant(7, x)) for i in (0, 1)))),
    "shape": ("f64", lambda b, x, z: b.Expand(half(b, "Max", x, 2), shape=(4, 4)),
              lambda b, x, z: b.Max(b.Reshape(half(b, "Max", x, 0), shape=(4, 1)),
                                    b.Reshape(half(b, "Max", x, 1), shape=(1, 4)))),
}  # fmt: skip


@pytest.mark.parametrize("wrong", HALVES)
def test_halves_of_different_sums_are_no_whole(wrong: str) -> None:
    dtype, *results = HALVES[wrong]
    b, values = Builder(), tuple(Value(name, TensorType(dtype, (4, 4))) for name in "xz")
    names = tuple(f(b, *values).name for f in results)
    block = Block("halves", values, operators=tuple(b.operators), constants=tuple(b.constants), outputs=names)
    draw = np.random.default_rng(0)
    a, c = evaluate(block, {v.name: draw.integers(0, 99, v.shape).astype(v.type.numpy) for v in values})
    assert not np.allclose(a, c) and not same(block, names)


def test_slices_of_what_was_joined_of_repeated_elements() -> None:
    x, b = Value("x", TensorType("f64", (3, 2))), Builder()
    twice = b.Expand(x, shape=(2, 3, 2))
    first = b.Slice(b.Concat(twice, twice, axis=0), starts=(0,), ends=(2,), axes=(0,))
    names = first.name, twice.name
    block = Block("joined", (x,), operators=tuple(b.operators), constants=tuple(b.constants), outputs=names)
    assert same(block, names)


@pytest.mark.parametrize("cls", [cls for cls in all_ops() if cls.linear and not cls.updates], ids=lambda c: c.__name__)
def test_operators_are_linear_where_they_say_so(cls: type[Op]) -> None:
    """Parts of sums and quotients pass through them: twice a group of inputs gives twice the results."""
    checked = 0
    for case in cases(cls):
        for group in cls.linear:
            there = [k for k in group if k < len(case.inputs) and case.inputs[k] is not None]
            if any(case.inputs[k].dtype != np.float64 for k in there) or not there:  # type: ignore[union-attr]
                continue
            twice = [a * 2 if k in there and a is not None else a for k, a in enumerate(case.inputs)]
            for a, c in zip(applied(case.op, case.inputs), applied(case.op, twice), strict=True):
                np.testing.assert_allclose(c, a * 2, rtol=1e-9, atol=1e-12)
            checked += 1
    assert checked


def applied(op: Op, inputs: Any) -> list[np.ndarray]:
    """All results of an operator on arrays."""
    types = [None if a is None else TensorType.of(np.asarray(a)) for a in inputs]
    outs = [np.zeros(t.shape, t.numpy) for t in op.infer(*types)]
    scratch = [np.zeros(t.shape, t.numpy) for t in op.scratch(types, [TensorType.of(a) for a in outs])]
    op.compute([None if a is None else np.array(a) for a in inputs], list(outs), scratch)
    return outs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-mini", "llama-tiny", "moe-tiny", "vit-tiny"])
def test_transformers_that_ranks_share_are_proved(name: str) -> None:
    """Vocabularies, sequences, heads and experts are divided."""
    steps = []
    for rank in (None, 0, 1):
        program = rc.load(rc.models.build(name), batch=2)
        loss = program["loss"] if "loss" in program else rc.losses.cross_entropy(program[program.block.outputs[0]])
        if rank is None:
            rc.SGD().minimize(loss)
        else:
            program = rc.compile_step(program, loss, rc.DataParallel(rc.SGD(), "tp=2", rank, batch=2)).program
            assert sum(o.op.communicates == "begin" for o in program.block.operators) > 10
        steps.append(program)
    assert not rc.prove_ranks(steps[0], steps[1:], "tp=2").unproved


def test_a_rank_of_another_type_is_not_proved() -> None:
    """Of weights in half precision whose elements are only moved."""
    text = "program p {{\n param %w: {0}[2,3]\n %y: {0}[3,2] = Transpose(%w) {{perm=[1,0]}}\n output %y\n}}"
    whole, half = (rc.Program(rc.parse(text.format(t)), {"w": np.ones((2, 3), n)}) for t, n in
                   (("f32", np.float32), ("f16", np.float16)))  # fmt: skip
    assert list(rc.prove_ranks(whole, [whole, half], "dp=2", partly=True).unproved) == ["y@1", "w@1"]


def test_half_of_the_groups_of_a_convolution() -> None:
    x, w = (Value(n, TensorType("f64", s)) for n, s in (("x", (2, 6, 4, 4)), ("w", (6, 1, 3, 3))))
    b, ends = Builder(), {"starts": (3,), "ends": (6,)}
    wanted = b.Slice(b.Conv(x, w, group=6), **ends, axes=(1,))
    half_ = b.Conv(b.Slice(x, **ends, axes=(1,)), b.Slice(w, **ends, axes=(0,)), group=3)
    names = wanted.name, half_.name
    assert same(Block("groups", (x, w), operators=tuple(b.operators), outputs=names), names)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [("vit-tiny", "zero1"), ("mobilenet_v2", "tp")])
def test_plans_of_ranks_are_proved(name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The half of a class token, and of the groups of a convolution."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    (first, _), proved = importlib.import_module("proof_plans").PLANS[plan].proof(name)
    proof = proved(first)
    assert len(proof.proved) > 900 and not proof.unproved
