"""Where an axis goes in a block: the batch of training steps, run in slices; products with themselves; compositions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import models
from recompute.data.batches import synthetic_batch
from recompute.language.axes import Cut, Followed, Partial, follow, piece, through_expansion
from recompute.language.builder import Builder
from recompute.language.factors import Place, digits, factor
from recompute.language.ir import Block, Operator, Value
from recompute.language.op import Op
from recompute.language.types import TensorType
from recompute.testing import in_float64

SMALL: dict[str, dict[str, Any]] = {
    "resnet18": {"width": 4, "image": 32, "classes": 5},
    "bert-tiny": {"hidden": 16, "heads": 2, "seq": 6, "vocab": 20, "positions": 8},
    "gpt2-tiny": {"hidden": 16, "heads": 2, "seq": 6, "vocab": 20, "context": 8},
}
#: the operators of these networks that need the whole batch, besides updates and means of losses
NEED = {"resnet18": {"BatchNormTrain", "BatchNormGrad"}}


def step(name: str) -> tuple[rc.Program, list[str], dict[str, np.ndarray]]:
    """A training step in float64 at a batch of three, the gradients of weights, and what to feed."""
    program = rc.load(models.build(name, batch=3, **SMALL[name]), seed=3)
    kind, _ = rc.losses.natural_loss(program)
    loss = kind if kind in program else getattr(rc.losses, kind)(program).name
    feed = synthetic_batch(program, 0, {s.name: s for s in models.info(name, **SMALL[name]).inputs})
    rc.optimizers.SGD(0.1).minimize(program[loss])
    double = in_float64(program)
    types = {v.name: v.type.numpy for v in double.block.inputs}
    weights = [g for p, g in program.gradients if "bn" not in p and "downsample.1" not in p]
    return double, weights, {n: a.astype(types[n]) for n, a in feed.items()}


def run(op: Op, inputs: list[Any], outs: tuple[TensorType | None, ...]) -> list[Any]:
    made = [None if t is None else np.zeros(t.shape, t.numpy) for t in outs]
    for i, j in enumerate(op.updates[: len(made)]):
        inputs[j] = made[i] = inputs[j].copy()
    room = [np.zeros(t.shape, t.numpy) for t in op.scratch([_type(a) for a in inputs], list(outs))]
    op.compute(inputs, made, room)
    return made


def _type(a: Any) -> TensorType | None:
    return None if a is None else TensorType.of(a)


class InSlices:
    """Runs a block in two slices, as `follow` says."""

    def __init__(self, way: Followed, size: int, data: dict[str, np.ndarray]) -> None:
        self.way, self.borders = way, ((0, size // 3), (size // 3, size))
        self.whole = dict(data)
        self.parts: dict[str, list[np.ndarray]] = {}
        self.states: dict[str, Cut | Partial] = {}

    def value(self, v: Value | None, k: int | None, place: Place | None = None) -> Any:
        """The whole of a value, or slice `k` of it where it is partial, or cut at `place`."""
        if v is None:
            return None
        s = self.states.get(v.name)
        if k is not None and (s == Partial() or (isinstance(s, Cut) and s.place == place)):
            return self.parts[v.name][k]
        if s == Partial():
            a = self.parts[v.name][0] + self.parts[v.name][1]
        elif s is not None:
            assert isinstance(s, Cut)
            a = _joined(self.parts[v.name], s)
        else:
            a = self.whole[v.name]
        return a if place is None or k is None else place.cut(a, self.borders[-1][1], *self.borders[k])

    def operator(self, i: int, o: Operator) -> None:
        f = self.way.factors.get(i)
        outs = (*(v and v.type for v in o.outputs), *[None] * (len(o.op.infer(*_types(o))) - len(o.outputs)))
        made = [self.way_state(v) for v in o.outputs]
        linear = f is None and any(s == Partial() for s in made)
        if (f is None or f.whole) and not linear:
            results = run(o.op, [self.value(v, None) for v in o.inputs], outs)
            for v, s, a in zip(o.outputs, made, results, strict=False):
                cut = isinstance(s, Cut)
                self.write(v, s, [s.place.cut(a, s.size, *b) for b in self.borders] if cut else a)  # type: ignore
            return
        pieces = []
        for k, (start, stop) in enumerate(self.borders):
            op, types = o.op, outs
            if f is not None:
                op, _, types = piece(o.op, f, start, stop - start, _types(o), outs)
            places = f.inputs if f is not None else [None] * len(o.inputs)
            got = run(op, [self.value(v, k, p) for v, p in zip(o.inputs, places, strict=True)], types)
            for j in f.shares if f is not None else ():
                got[j] = got[j] * ((stop - start) / f.size)  # type: ignore[union-attr]
            pieces.append(got)
        for v, s, *both in zip(o.outputs, made, *pieces, strict=False):
            self.write(v, s, both)

    def way_state(self, v: Value | None) -> Any:
        return None if v is None else self.way.states.get(v.name)

    def write(self, v: Value | None, s: Any, a: Any) -> None:
        if v is None:
            return
        self.states.pop(v.name, None)
        if s is None:
            self.whole[v.name] = a
        else:
            self.states[v.name], self.parts[v.name] = s, a


def _types(o: Operator) -> tuple[TensorType | None, ...]:
    return tuple(None if v is None else v.type for v in o.inputs)


def _joined(parts: list[np.ndarray], s: Cut) -> np.ndarray:
    p, shape = s.place, parts[0].shape
    lead, rest = shape[: p.axis], shape[p.axis + 1 :]
    split = [a.reshape(*lead, p.outer, a.shape[p.axis] // (p.outer * p.inner), p.inner, *rest) for a in parts]
    return np.concatenate(split, axis=p.axis + 1).reshape(*lead, p.extent(s.size), *rest)


@pytest.mark.parametrize("name", SMALL)
def test_batch_of_a_training_step(name: str) -> None:
    program, weights, feed = step(name)
    block = program.block
    way = follow(block, {v.name: 0 for v in block.inputs})
    whole = dict(feed) | {c.value.name: c.numpy() for c in block.constants} | dict(program.data)
    sliced = InSlices(way, 3, whole)
    for v in block.inputs:
        sliced.write(v, way.states[v.name], [feed[v.name][a:b] for a, b in sliced.borders])
    for i, o in enumerate(block.operators):
        inputs = [None if v is None else whole[v.name] for v in o.inputs]
        count = len(o.op.infer(*_types(o)))
        outs = (*(v and v.type for v in o.outputs), *[None] * (count - len(o.outputs)))
        sliced.operator(i, o)
        for v, a in zip(o.outputs, run(o.op, inputs, outs), strict=False):
            if v is not None:
                whole[v.name] = a
                np.testing.assert_allclose(sliced.value(v, None), a, rtol=1e-9, atol=1e-9, err_msg=v.name)
    needing = {block.operators[i].op.name for i, _ in way.needs}
    assert needing == NEED.get(name, set()) | {"SGDUpdate", "SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyGrad"}
    assert weights and all(way.states[g] == Partial() for g in weights), "gradients of weights are sums over the batch"
    cut = [v for v in block.values().values() if isinstance(way.states.get(v.name), Cut)]
    assert all(v.shape[way.states[v.name].place.axis] % 3 == 0 for v in cut) and len(cut) > 100  # type: ignore


def test_activations_are_cut_at_their_first_axis() -> None:
    program, _, _ = step("gpt2-tiny")
    way = follow(program.block, {"input_ids": 0})
    for o in program.block.operators:
        if o.role.value == "forward" and o.outputs[0] is not None and o.outputs[0].shape[:1] == (3,):
            assert way.states[o.outputs[0].name] == Cut(Place(0), 3)


def small(*types: str) -> tuple[Builder, list[Value]]:
    b = Builder()
    return b, [Value(b.names.take(f"x{i}"), TensorType.parse(t)) for i, t in enumerate(types)]


def block_of(b: Builder, inputs: list[Value]) -> Block:
    return Block(inputs=tuple(inputs), operators=tuple(b.operators), constants=tuple(b.constants))


def test_two_indices_of_one_value_meet() -> None:
    b, (x,) = small("f32[4,5]")
    y = b.MatMul(x, x, transB=1)
    way = follow(block_of(b, [x]), {"x0": 0})
    assert way.states[y.name] in (Cut(Place(0), 4), Cut(Place(1), 4)) and len(way.needs) == 1


def test_partial_sums_through_linear_operators() -> None:
    b, (x, w, c) = small("f32[6,3]", "f32[6,2]", "f32[3,2]")
    first, second = b.MatMul(x, w, transA=1), b.MatMul(x, w, transA=1)
    total = b.Mul(b.Add(first, second), b.constant(0.5, x))
    turned = b.Transpose(total, perm=(1, 0))
    biased, bent = b.Add(first, c), b.Relu(second)
    way = follow(block_of(b, [x, w, c]), {"x0": 0})
    assert all(way.states[v.name] == Partial() for v in (first, second, total, turned))
    assert biased.name not in way.states and bent.name not in way.states
    assert way.cuts[0, 1] == Cut(Place(0), 6), "the other factor is read in slices"
    assert {b.operators[i].op.name for i, _ in way.needs} == {"Add", "Relu"}


def test_batch_through_reshapes_and_heads() -> None:
    b, (x, w) = small("f32[2,4,6]", "f32[6,6]")
    rows = b.MatMul(b.Reshape(x, shape=(8, 6)), w)
    heads = b.Transpose(b.Reshape(rows, shape=(2, 4, 3, 2)), perm=(0, 2, 1, 3))
    scores = b.MatMul(heads, heads, transB=1)
    merged = b.Reshape(scores, shape=(6, 4, 4))
    batch = follow(block_of(b, [x, w]), {"x0": 0})
    assert batch.states[rows.name] == Cut(Place(0, inner=4), 2) and batch.states[merged.name] == Cut(
        Place(0, inner=3), 2
    )
    assert not batch.needs
    by_head = follow(block_of(b, [x, w]), {"x1": Place(1, inner=2)})
    assert by_head.states[heads.name] == Cut(Place(1), 3) and by_head.states[merged.name] == Cut(Place(0, outer=2), 3)
    assert not by_head.needs and b.operators[1].op.name == "MatMul"


def test_digits_of_shapes() -> None:
    assert digits((2, 3, 4), (6, 4)) == [
        (2, Place(0), Place(0, inner=3)),
        (3, Place(1), Place(0, outer=2)),
        (4, Place(2), Place(1)),
    ]
    assert digits((6, 4), (4, 6)) == []
    assert digits((0, 4), (4, 0)) == []
    assert factor(12, [0], [Place(1, inner=2)]).refined(3, 2, 2) == factor(
        3, [Place(0, outer=2, inner=2)], [Place(1, outer=2, inner=4)]
    )


@dataclass(frozen=True)
class Averaged(Op, abstract=True):
    """Means of rows, with a count that is written into the expansion; `total`: sums."""

    total: int = 0

    def infer(self, x: TensorType) -> tuple[TensorType, ...]:
        return (x.with_shape(x.shape[:1]),)

    def expand(self, b: Any, x: Any) -> tuple[Any, ...]:
        found = b.ReduceSum(x, axes=(1,), keepdims=0)
        return (found if self.total else b.Mul(found, b.constant(1 / x.shape[1], x)),)


@dataclass(frozen=True)
class Masked(Op, abstract=True):
    """The lower triangle, times ones of the same shape."""

    def infer(self, x: TensorType) -> tuple[TensorType, ...]:
        return (x,)

    def expand(self, b: Any, x: Any) -> tuple[Any, ...]:
        return (b.Trilu(b.Mul(x, b.fill(1.0, x)), upper=0),)


def test_compositions_are_sliced_as_their_parts_are() -> None:
    x = TensorType("f32", (4, 5))
    rows, columns = factor(4, [0], [0]), factor(5, [1], ["sum"])
    assert through_expansion(Averaged(total=1), (x,), (x.with_shape((4,)),)) == (rows, columns)
    assert through_expansion(Averaged(), (x,), (x.with_shape((4,)),)) == (rows,), (
        "a slice would divide by its own count"
    )
    cube = TensorType("f32", (3, 4, 4))
    assert through_expansion(Masked(), (cube,), (cube,)) == (factor(3, [0], [0]),), "a diagonal depends on the start"
