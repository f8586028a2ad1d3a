"""Checks for operators, gradients and rewrites: what the project's tests use, and what an author of an operator or a
pass needs.

Gradients are checked by random directions (HIPS autograd's idea): with loss L = Σ wᵢ·yᵢ for random w, the derivative
of L along a random direction must equal the central difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .language.builder import Builder
from .language.element import evaluate as evaluate_elements
from .language.formulas import formula
from .language.ir import Block, Constant, Operator, Role, Value
from .language.op import Op
from .language.program import Program
from .language.samples import Case, Draw
from .language.text import parse, show
from .language.types import TensorType
from .language.verify import verify
from .passes.gradient.autodiff import differentiate
from .runtime.executor import Executor

__all__ = [
    "Case",
    "Draw",
    "all_ops",
    "case_block",
    "cases",
    "check_case",
    "check_element",
    "check_expansion",
    "check_gradient",
    "check_inplace",
    "check_writes_fully",
    "evaluate",
    "in_float64",
    "weighted_loss",
]


def cases(cls: type[Op]) -> list[Case]:
    """The samples of an operator class, the same every time."""
    return list(cls.samples(Draw(cls.__name__)))


def case_block(case: Case) -> tuple[Block, dict[str, np.ndarray]]:
    """A block that applies the case's operator to inputs `x0`, `x1`, ..., and what to feed."""
    values = [None if a is None else Value(f"x{i}", TensorType.of(a)) for i, a in enumerate(case.inputs)]
    types = case.op.infer(*(None if v is None else v.type for v in values))
    count = len(types) if case.want is None else case.want
    if case.op.updates:
        outs = [values[i] for i in case.op.updates[:count]]
        block = Block("case", state=tuple(v for v in values if v is not None))
    else:
        outs = [Value(f"y{i}", t) for i, t in enumerate(types[:count])]
        block = Block("case", inputs=tuple(v for v in values if v is not None))
    op = Operator(case.op, tuple(values), tuple(outs))
    feed = {v.name: a for v, a in zip(values, case.inputs, strict=True) if v is not None and a is not None}
    return block.with_operators([op], outputs=tuple(v.name for v in outs if v is not None)), feed


def evaluate(
    block: Block,
    feed: dict[str, np.ndarray],
    fetch: Sequence[str] | None = None,
    *,
    providers: Sequence[str] | None = None,
) -> list[np.ndarray]:
    """Runs a block once; `feed` also gives its parameters and state, whose arrays are not changed.

    `providers`: those of its kernels (None: all that are here; a program with addresses has the kernels that it names).
    """
    data = {v.name: feed[v.name].copy() for v in (*block.parameters, *block.buffers, *block.state)}
    inputs = {v.name: feed[v.name] for v in block.inputs}
    names = list(block.outputs if fetch is None else fetch)
    return Executor(schedule=False, rebuild=False, providers=providers).run(Program(block, data), inputs, names)


def check_case(case: Case) -> None:
    """The registry-wide suite for one sample.  AssertionError with what differs."""
    block, feed = case_block(case)
    verify(block)
    assert parse(show(block)) == block, "the text form does not parse back"
    check_writes_fully(case)
    check_inplace(case)
    check_element(case, block, feed)
    check_expansion(case, block, feed)
    doubles = any(a is not None and a.dtype == np.float64 for a in case.inputs)
    if (
        case.gradient
        and doubles
        and not case.op.updates
        and any(block.values()[n].dtype == "f64" for n in block.outputs)
    ):
        wrt = [f"x{i}" for i, a in enumerate(case.inputs) if a is not None and a.dtype == np.float64]
        wrt = [n for n in wrt if int(n[1:]) not in case.still]
        check_gradient(block, feed, wrt=wrt, tolerance=case.tolerance, second_order=case.second_order)


def check_writes_fully(case: Case) -> None:
    """Outputs do not depend on what the buffers held, and inputs stay as they were."""
    types = case.op.infer(*(None if a is None else TensorType.of(a) for a in case.inputs))
    count = len(types) if case.want is None else case.want
    scratch = case.op.scratch(
        [None if a is None else TensorType.of(a) for a in case.inputs],
        list(types[:count]) + [None] * (len(types) - count),
    )
    results = []
    for filler in (0x55, 0xFF):
        ins: list[Any] = [None if a is None else np.array(a) for a in case.inputs]
        outs: list[Any] = [_filled(t, filler) for t in types[:count]] + [None] * (len(types) - count)
        for i, j in enumerate(case.op.updates[:count]):
            outs[i] = ins[j]
        with np.errstate(all="ignore"):
            case.op.compute(ins, outs, [_filled(t, filler) for t in scratch])
        results.append(outs)
        changed = {case.op.updates[i] for i in range(min(count, len(case.op.updates)))}
        for i, (a, before) in enumerate(zip(ins, case.inputs, strict=True)):
            assert i in changed or a is None or a.tobytes() == np.asarray(before).tobytes(), (
                f"{case.op.name} changes its input {i}"
            )
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert a is None or a.tobytes() == b.tobytes(), f"{case.op.name} does not write its output {i} fully"


def check_inplace(case: Case) -> None:
    """Where an output may take an input's buffer, the bits are the same as in a buffer of its own."""
    types = case.op.infer(*(None if a is None else TensorType.of(a) for a in case.inputs))
    count = len(types) if case.want is None else case.want
    present = [*types[:count], *[None] * (len(types) - count)]
    scratch = case.op.scratch([None if a is None else TensorType.of(a) for a in case.inputs], present)
    for at, k in ((i, k) for i in range(count) for k in case.op.overwrites(i)):
        source = case.inputs[k] if k < len(case.inputs) else None
        if source is None or TensorType.of(source) != types[at]:
            continue
        results = []
        for shared in (False, True):
            ins: list[Any] = [None if a is None else np.array(a) for a in case.inputs]
            outs: list[Any] = [None if t is None else _filled(t, 0xFF) for t in present]
            if shared:
                outs[at] = ins[k]
            with np.errstate(all="ignore"):
                case.op.compute(ins, outs, [_filled(t, 0x55) for t in scratch])
            results.append([a.tobytes() for a in outs if a is not None])
        assert results[0] == results[1], f"{case.op.name}: output {at} in place of input {k} differs"


def check_element(case: Case, block: Block, feed: dict[str, np.ndarray]) -> None:
    """Where the operator has an expression for one element, it gives the numbers of its numerics."""
    types = [None if a is None else TensorType.of(a) for a in case.inputs]
    exprs = formula(case.op, tuple(None if t is None else t.dtype for t in types))
    if exprs is None:
        return
    outs = block.operators[0].outputs
    values = evaluate_elements([x for x in exprs if x is not None], case.inputs)
    made = iter(values)
    results = [None if x is None else next(made) for x in exprs]
    expected = iter(evaluate(block, feed))
    for v, got in zip(outs, results, strict=False):
        if v is None:
            continue
        assert got is not None, f"{case.op.name} has no expression for an output"
        wanted = next(expected)
        assert got.dtype == wanted.dtype, f"{case.op.name}: its expression is {got.dtype}"
        eps = float(ml_dtypes.finfo(wanted.dtype).eps) if v.type.is_float else 0.0
        got = np.broadcast_to(got, wanted.shape)
        if v.type.is_float:
            got, wanted = got.astype(np.float64), wanted.astype(np.float64)
        np.testing.assert_allclose(got, wanted, rtol=16 * eps, atol=4 * eps, err_msg=f"{case.op.name}: its element")


def _filled(t: TensorType, byte: int) -> np.ndarray:
    raw = np.full(max(t.nbytes, 1), byte if t.dtype != "bool" else byte & 1, np.uint8)
    return raw[: t.nbytes].view(t.numpy).reshape(t.shape)


def check_expansion(case: Case, block: Block, feed: dict[str, np.ndarray]) -> None:
    """Where the operator expands into simpler ones, both give the same numbers."""
    b = Builder.on(block, prefix="e")
    op = block.operators[0]
    outs = case.op.expand(b, *op.inputs)
    if outs is None or case.op.updates:
        return
    names = [v.name if v is not None else None for v in outs[: len(op.outputs)]]
    expanded = block.with_operators(
        b.operators, constants=tuple(b.constants), outputs=tuple(dict.fromkeys(n for n in names if n))
    )
    for value, o in zip(outs, op.outputs, strict=False):
        assert value is None or o is None or value.type == o.type, f"{case.op.name}: expands to {value}, not {o}"
    expected = evaluate(verify(expanded), feed, [n for n in names if n])
    got = evaluate(block, feed, [o.name for o, n in zip(op.outputs, names, strict=False) if n and o is not None])
    for g, e in zip(got, expected, strict=True):
        eps = float(np.finfo(g.dtype).eps) if g.dtype.kind == "f" else 0.0
        np.testing.assert_allclose(g, e, rtol=200 * eps, atol=200 * eps, err_msg=f"{case.op.name}: expansion differs")


def check_gradient(
    block: Block,
    feed: dict[str, np.ndarray],
    *,
    wrt: Sequence[str] | None = None,
    tolerance: float = 1e-6,
    second_order: bool = False,
    directions: int = 2,
    step: float = 1e-5,
) -> None:
    """Checks the derivatives of a block's float64 outputs along random directions against central differences.

    The loss is Σ wᵢ·yᵢ with random w.  With `second_order` the gradient itself is differentiated once more and
    checked the same way.
    """
    if wrt is None:
        wrt = [v.name for v in (*block.inputs, *block.parameters) if v.dtype == "f64"]
    scalar, loss = weighted_loss(block, [n for n in block.outputs if block.values()[n].dtype == "f64"])
    grad_block, pairs = differentiate(scalar, loss, wrt)
    _compare(scalar, loss, grad_block, pairs, feed, wrt, tolerance, directions, step, "gradient")
    if second_order and pairs:
        twice, loss2 = weighted_loss(grad_block, [g.name for _, g in pairs])
        grad2, pairs2 = differentiate(twice, loss2, wrt)
        _compare(twice, loss2, grad2, pairs2, feed, wrt, tolerance * 10, directions, step, "second derivative")


def weighted_loss(block: Block, outputs: Sequence[str]) -> tuple[Block, str]:
    """The block with a last value Σ wᵢ·yᵢ over the elements of `outputs`, w random but fixed."""
    b = Builder.on(block, role=Role.FORWARD, prefix="loss")
    values = block.values()
    terms = []
    for i, name in enumerate(dict.fromkeys(outputs)):
        v = values[name]
        w = b.constant(np.random.default_rng(7 + i).uniform(0.5, 1.5, v.shape), v)
        terms.append(b.ReduceSum(b.Mul(v, w), keepdims=0))
    total = b.add_all(terms)
    after = block.with_operators(
        [*block.operators, *b.operators], constants=(*block.constants, *b.constants), outputs=(total.name,)
    )
    return after, total.name


def _compare(
    block: Block,
    loss: str,
    grad_block: Block,
    pairs: Sequence[tuple[Value, Value]],
    feed: dict[str, np.ndarray],
    wrt: Sequence[str],
    tolerance: float,
    directions: int,
    step: float,
    what: str,
) -> None:
    verify(grad_block)
    gradients = evaluate(grad_block, feed, [g.name for _, g in pairs])
    grads = {v.name: g for (v, _), g in zip(pairs, gradients, strict=True)}
    g = np.random.default_rng(3)
    for _ in range(directions):
        along = {n: g.choice([-1.0, 1.0], feed[n].shape) * g.uniform(0.5, 1.0, feed[n].shape) for n in wrt}
        exact = sum(float((grads[n] * d).sum()) for n, d in along.items() if n in grads)
        ahead = {n: feed[n] + step * d for n, d in along.items()}
        behind = {n: feed[n] - step * d for n, d in along.items()}
        up = float(evaluate(block, {**feed, **ahead}, [loss])[0].reshape(()))
        down = float(evaluate(block, {**feed, **behind}, [loss])[0].reshape(()))
        numeric = (up - down) / (2 * step)
        scale = max(abs(exact), abs(numeric), 1.0)
        assert abs(exact - numeric) <= tolerance * scale, (
            f"{what} of {', '.join(o.op.name for o in block.operators[:1])}: {exact!r} along a direction, "
            f"central difference {numeric!r}"
        )


def all_ops() -> Iterator[type[Op]]:
    """Every registered operator class, by name."""
    from . import ops  # noqa: F401
    from .language.op import REGISTRY

    for name in sorted(REGISTRY):
        yield REGISTRY[name]


def in_float64(program: Program) -> Program:
    """The program with every float32 value, constant and attribute in float64, for gradient checks.

    Names stay; parameters and buffers are converted copies.
    """
    block = program.block
    new: dict[str, Value] = {}

    def wide(v: Value) -> Value:
        new[v.name] = Value(v.name, v.type.with_dtype("f64") if v.dtype == "f32" else v.type)
        return new[v.name]

    declared = {
        field: tuple(wide(v) for v in getattr(block, field)) for field in ("inputs", "parameters", "buffers", "state")
    }
    constants = tuple(Constant(wide(c.value), c.data) for c in block.constants)
    operators = []
    for o in block.operators:
        attributes = {k: "f64" if v == "f32" else v for k, v in vars(o.op).items()}
        op = type(o.op)(**attributes)
        inputs = tuple(None if v is None else new[v.name] for v in o.inputs)
        types = op.infer(*(None if v is None else v.type for v in inputs))
        outputs: list[Value | None] = []
        for v, t in zip(o.outputs, types, strict=False):
            if v is not None and not op.updates:
                new[v.name] = Value(v.name, t)
            outputs.append(None if v is None else new[v.name])
        operators.append(Operator(op, inputs, tuple(outputs), o.role))
    changes: dict[str, Any] = {**declared, "constants": constants}
    data = {n: a.astype(np.float64) if a.dtype == np.float32 else a.copy() for n, a in program.data.items()}
    return Program(block.with_operators(operators, **changes), data)
