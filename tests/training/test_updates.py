"""The updates as their classes describe them, by plain NumPy in float64, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from recompute import TensorType
from recompute.errors import TypeRuleError
from recompute.language.op import Op, op_class
from recompute.ops.optimizer.base import PART, Update

SHAPE = (3, 5)
RATE, STEP = np.array(0.25, np.float32), np.array(2, np.int64)
Arrays = list[Any]


def sgd(w: Any, g: Any, decay: float = 0.0) -> Arrays:
    return [w - 0.25 * (g + decay * w)]


def momentum(w: Any, g: Any, v: Any, keep: float = 0.9, damp: float = 0.0, nesterov: bool = False) -> Arrays:
    v = keep * v + (1 - damp) * g
    return [w - 0.25 * (g + keep * v if nesterov else v), v]


def adagrad(w: Any, g: Any, s: Any, epsilon: float = 1e-10) -> Arrays:
    s = s + g * g
    return [w - 0.25 * g / (np.sqrt(s) + epsilon), s]


def rmsprop(w: Any, g: Any, s: Any, a: Any = None, v: Any = None, rho: float = 0.99, keep: float = 0.0) -> Arrays:
    s = rho * s + (1 - rho) * g * g
    a = None if a is None else rho * a + (1 - rho) * g
    u = g / (np.sqrt(s if a is None else s - a * a) + 1e-8)
    v = None if v is None else keep * v + u
    return [x for x in (w - 0.25 * (u if v is None else v), s, a, v) if x is not None]


def adam(
    w: Any, g: Any, m: Any, v: Any, top: Any = None, b1: float = 0.9, b2: float = 0.999, decay: float = 0.0
) -> Arrays:
    w = w - 0.25 * decay * w
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    top = None if top is None else np.maximum(top, v)
    used = v if top is None else top
    step = m / (1 - b1**3) / (np.sqrt(used / (1 - b2**3)) + 1e-8)
    return [x for x in (w - 0.25 * step, m, v, top) if x is not None]


def make(name: str, **options: Any) -> Any:
    return op_class(name)(**options)


#: (the update, how many states, what comes behind the learning rate: S the step, a state, - nothing; the formula)
def label(x: Any) -> str:
    """A parameter's name in the tests' identifiers, the same in every process."""
    return label(x[0]) if isinstance(x, tuple) else getattr(x, "__name__", str(x)[:60])


CASES: list[tuple[Op, int, str, Callable[..., Arrays]]] = [
    (make("SGDUpdate"), 0, "", sgd),
    (make("SGDUpdate", weight_decay=0.5), 0, "", lambda w, g: sgd(w, g, 0.5)),
    (make("MomentumUpdate"), 1, "", momentum),
    (make("MomentumUpdate", nesterov=True, momentum=0.5), 1, "", lambda w, g, v: momentum(w, g, v, 0.5, 0, True)),
    (make("MomentumUpdate", dampening=0.25), 1, "S", lambda w, g, v: momentum(w, g, v, 0.9, 0.25)),
    (make("MomentumUpdate", weight_decay=0.5), 1, "", lambda w, g, v: momentum(w, g + 0.5 * w, v)),
    (make("AdagradUpdate"), 1, "", adagrad),
    (make("AdagradUpdate", epsilon=0.5, weight_decay=0.5), 1, "", lambda w, g, s: adagrad(w, g + 0.5 * w, s, 0.5)),
    (make("RMSPropUpdate"), 1, "", rmsprop),
    (make("RMSPropUpdate"), 1, "a", lambda w, g, s, a: rmsprop(w, g, s, a)),
    (make("RMSPropUpdate", momentum=0.5), 1, "-v", lambda w, g, s, v: rmsprop(w, g, s, None, v, keep=0.5)),
    (make("RMSPropUpdate", rho=0.5), 1, "av", lambda w, g, s, a, v: rmsprop(w, g, s, a, v, rho=0.5)),
    (make("RMSPropUpdate", weight_decay=0.5), 1, "", lambda w, g, s: rmsprop(w, g + 0.5 * w, s)),
    (make("AdamUpdate"), 2, "S", adam),
    (make("AdamUpdate", weight_decay=0.5), 2, "S", lambda w, g, m, v: adam(w, g + 0.5 * w, m, v)),
    (make("AdamUpdate", weight_decay=0.5, decoupled=True), 2, "S", lambda w, g, m, v: adam(w, g, m, v, decay=0.5)),
    (make("AdamUpdate", beta1=0.5, beta2=0.75), 2, "St", lambda w, g, m, v, t: adam(w, g, m, v, t, 0.5, 0.75)),
]


def inputs(states: int, behind: str, dtype: str = "f8", size: tuple[int, ...] = SHAPE) -> Arrays:
    g = np.random.default_rng(1)
    given: Arrays = [g.standard_normal(size).astype(dtype), g.standard_normal(size).astype(dtype)]
    given += [g.uniform(0.5, 1.0, size).astype(dtype) for _ in range(states)] + [RATE]
    for letter in behind:
        drawn = g.uniform(0.5, 0.6, size).astype(dtype)
        given.append({"S": STEP, "-": None}.get(letter, drawn))
    return given


def run(op: Any, given: Arrays) -> Arrays:
    """The arrays that the update writes, new; the others must stay as they are."""
    own = [None if a is None else a.copy() for a in given]
    types = [None if a is None else TensorType.of(a) for a in own]
    outs = [own[i] if i < len(own) else None for i in op.updates]
    scratch = [np.full(t.shape, np.nan, t.numpy) for t in op.scratch(types, [])]
    with np.errstate(all="ignore"):
        op.compute(own, outs, scratch)
    for i, (a, before) in enumerate(zip(own, given, strict=True)):
        assert i in op.updates or a is None or a.tobytes() == before.tobytes()
    return [a for a in outs if a is not None]


@pytest.mark.parametrize(("op", "states", "behind", "formula"), CASES, ids=label)
def test_formulas(op: Any, states: int, behind: str, formula: Callable[..., Arrays]) -> None:
    given = inputs(states, behind)
    arrays = [a for i, a in enumerate(given) if a is not None and i != op.rate_at and a is not STEP]
    for found, expected in zip(run(op, given), formula(*arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-7)


@pytest.mark.parametrize(("op", "states", "behind", "formula"), CASES, ids=label)
def test_epsilons(op: Any, states: int, behind: str, formula: Callable[..., Arrays]) -> None:
    """Where gradients are so small that they count."""
    w, g, *more = inputs(states, behind)
    given = [w, 1e-9 * g, *(a if a is None or a.dtype != np.float64 else 1e-18 * a for a in more)]
    arrays = [a for i, a in enumerate(given) if a is not None and i != op.rate_at and a is not STEP]
    for found, expected in zip(run(op, given), formula(*arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-7)


@pytest.mark.parametrize(
    "states", [c for c in CASES if isinstance(c[0], Update)][:1] + CASES[2:3] + CASES[13:15], ids=label
)
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_parts(states: Any, dtype: str) -> None:
    """Every element is treated alike, in whatever part it is; half precision is worked on in float32."""
    op, count, behind, formula = states
    size = (2 * PART + 3,)
    given = inputs(count, behind, "f4", size)
    exact = formula(*(a.astype("f8") for i, a in enumerate(given) if i != op.rate_at and a is not STEP))
    given[0] = given[0].astype(dtype)
    given[1] = given[1].astype(dtype)
    found = run(op, given)
    assert [a.dtype.str[1:] for a in found] == [dtype, *["f4"] * (len(found) - 1)]
    eps = 4e-3 if dtype == "f2" else 1e-5
    for a, e in zip(found, exact, strict=True):
        assert abs(a - e).max() < eps * max(1, abs(e).max())


@pytest.mark.parametrize("unscale", [0.5, 0.0, 1.0])
@pytest.mark.parametrize(("op", "states", "behind", "formula"), CASES, ids=label)
def test_unscaled(op: Any, states: int, behind: str, formula: Callable[..., Arrays], unscale: float) -> None:
    """The gradient times that; 0 leaves everything, infinite gradients too."""
    given = inputs(states, behind)
    more = [None] * (op.unscale_at - len(given)) + [np.array(unscale, np.float32)]
    plain = [given[0], given[1] * unscale, *given[2:]]
    if not unscale:
        given[1] = given[1].copy()
        given[1].flat[3:5] = np.inf, np.nan
    found = run(op, [*given, *more])
    expected = run(op, plain) if unscale else [a for i in op.updates if i < len(given) and (a := given[i]) is not None]
    for a, e in zip(found, expected, strict=True):
        assert a.tobytes() == e.tobytes()


def test_the_first_gradient_is_taken_whole() -> None:
    op = make("MomentumUpdate", dampening=0.25)
    w, g, v, rate, _ = inputs(1, "S")
    for step, damp in ((0, 0.0), (1, 0.25), (7, 0.25)):
        found = run(op, [w, g, v, rate, np.array(step)])
        for a, e in zip(found, momentum(w, g, v, 0.9, damp), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-7)


def test_a_variance_that_rounding_made_negative_is_zero() -> None:
    """rho 1 leaves s and a as they are: s - a² is below 0, and u = g / epsilon."""
    op = make("RMSPropUpdate", rho=1.0, epsilon=0.5)
    a = np.full(3, 0.5, np.float32)
    s = a * a * np.float32(1 - 2**-20)
    w, g = np.zeros(3, np.float32), np.ones(3, np.float32)
    np.testing.assert_array_equal(run(op, [w, g, s, RATE, a])[0], -0.5 * np.ones(3))


@pytest.mark.parametrize(
    ("name", "options", "types", "count"),
    [
        ("SGDUpdate", {}, "f32[7] f32[7] f32[]", 1),
        ("SGDUpdate", {"weight_decay": 1.0}, "f32[7] f32[7] f32[]", 2),
        ("SGDUpdate", {}, "f32[7] f32[7] f32[] f32[]", 3),
        ("SGDUpdate", {}, "f16[7] f16[7] f32[]", 3),
        ("SGDUpdate", {}, "f16[7] f32[7] f32[]", 2),
        ("SGDUpdate", {}, "f32[7] f16[7] f32[]", 2),
        ("MomentumUpdate", {}, "f32[7] f32[7] f32[7] f32[]", 1),
        ("MomentumUpdate", {}, "f32[7] f32[7] f32[7] f32[] f32[]", 4),
        ("MomentumUpdate", {"dampening": 0.5}, "f32[7] f32[7] f32[7] f32[] i64[] f32[]", 4),
        ("AdamUpdate", {"weight_decay": 1.0, "decoupled": True}, "f32[7] f32[7] f32[7] f32[7] f32[] i64[]", 1),
        ("AdamUpdate", {}, "f32[7] f32[7] f32[7] f32[7] f32[] i64[] _ f32[]", 5),
        ("RMSPropUpdate", {}, "f32[7] f32[7] f32[7] f32[] _ f32[7] f32[]", 5),
    ],
)
def test_scratch(name: str, options: dict[str, Any], types: str, count: int) -> None:
    """As many parts as are worked on, none more: it is memory of the step."""
    op = make(name, **options)
    ins = [None if t == "_" else TensorType.parse(t) for t in types.split()]
    found = op.scratch(ins, [])
    assert found == (TensorType("f32", (7,)),) * count
    large = [t if t is None or not t.shape else t.with_shape((PART + 1,)) for t in ins]
    assert set(op.scratch(large, [])) == {TensorType("f32", (PART,))}
    small = op.infer(*ins)
    assert small == tuple(ins[i] for i in op.updates[: len(small)] if i < len(ins)) or "_" in types


@pytest.mark.parametrize(
    ("name", "options", "types", "why"),
    [
        ("SGDUpdate", {}, "f32[7] f32[8] f32[]", "the gradient must have the parameter's shape"),
        ("SGDUpdate", {}, "i64[7] f32[7] f32[]", "the gradient must have the parameter's shape"),
        ("SGDUpdate", {}, "f32[7] i64[7] f32[]", "the gradient must have the parameter's shape"),
        ("SGDUpdate", {}, "f32[7] f32[7] f32[1]", "the learning rate must be one floating-point number"),
        ("SGDUpdate", {}, "f32[7] f32[7] i64[]", "the learning rate must be one floating-point number"),
        ("SGDUpdate", {}, "f32[7] f32[7] f32[] f64[]", "unscale must be f32[]"),
        ("SGDUpdate", {}, "f32[7] f32[7] f32[] f32[1]", "unscale must be f32[]"),
        ("MomentumUpdate", {}, "f32[7] f32[7] f64[7] f32[]", "its state must be f32[7]"),
        ("MomentumUpdate", {}, "f16[7] f16[7] f16[7] f32[]", "its state must be f32[7]"),
        ("MomentumUpdate", {"dampening": 0.5}, "f32[7] f32[7] f32[7] f32[] i32[]", "the step counter must be i64[]"),
        ("AdamUpdate", {}, "f32[7] f32[7] f32[7] f32[7] f32[] i64[1]", "the step counter must be i64[]"),
        ("AdamUpdate", {}, "f32[7] f32[7] f32[7] f32[6] f32[] i64[]", "its state must be f32[7]"),
        ("AdamUpdate", {}, "f32[7] f32[7] f32[7] f32[7] f32[] i64[] f32[6]", "its state must be f32[7]"),
        ("Increment", {}, "i64[] f64[]", "unscale must be f32[]"),
    ],
)
def test_types_that_are_refused(name: str, options: dict[str, Any], types: str, why: str) -> None:
    ins = [None if t == "_" else TensorType.parse(t) for t in types.split()]
    with pytest.raises(TypeRuleError) as e:
        make(name, **options).infer(*ins)
    assert why in str(e.value)


def test_an_array_that_is_not_contiguous_is_refused() -> None:
    given = inputs(0, "")
    given[0] = np.zeros((5, 3)).T
    with pytest.raises(ValueError, match="must be contiguous"):
        make("SGDUpdate").compute(given, [given[0]], [np.empty(15)])


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_the_step_counter(dtype: Any) -> None:
    op = make("Increment")
    for unscale, expected in ((None, 42), (0.0, 41), (-0.5, 42), (2.0, 42)):
        x = np.array(41, dtype)
        op.compute([x] if unscale is None else [x, np.array(unscale, np.float32)], [x], [])
        assert x == expected and x.dtype == dtype


@pytest.mark.parametrize(
    ("name", "flops"),
    [("SGDUpdate", 2), ("MomentumUpdate", 4), ("AdagradUpdate", 9), ("RMSPropUpdate", 12), ("AdamUpdate", 14)],
)
def test_costs(name: str, flops: int) -> None:
    """What planners and estimates reckon with, for each element of the parameter."""
    op = make(name)
    types = {"SGDUpdate": "f32[7] f32[7] f32[]", "AdamUpdate": "f32[7] f32[7] f32[7] f32[7] f32[] i64[]"}
    ins = [TensorType.parse(t) for t in types.get(name, "f32[7] f32[7] f32[7] f32[]").split()]
    assert op.cost(ins, op.infer(*ins)).flops == 7 * flops
