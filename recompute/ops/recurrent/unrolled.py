"""RNN, GRU and LSTM step by step, so that each step's state is a value that may be a checkpoint.

The same equations as the fused operators (`Recurrent.step`).  Parts of weights are cut once, not in each step, and
what only the fused gradient would read is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from ...language.builder import Builder
from ...language.contexts import OperatorBuilder
from ...language.ir import leading_to
from ...language.types import TensorType
from ..shape.reshape import reshape
from .parts import cut, filled, joint, row


class Stepping(Protocol):
    """A recurrent operator as far as writing out its steps asks for it (see `recurrent.Recurrent`)."""

    @property
    def hidden_size(self) -> int:
        """Width of the state."""

    gates: ClassVar[int]
    arity: ClassVar[int]
    onnx_outputs: ClassVar[int]

    @property
    def directions(self) -> int:
        """1, or 2 where both directions run."""

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        """Y, the last state(s), and more.  TypeRuleError where shapes do not fit."""

    def order(self, d: int, steps: int) -> list[int]:
        """The steps in the order in which direction `d` takes them."""

    def step(
        self, b: OperatorBuilder, gx: Any, state: Any, r: Any, biases: Any, peepholes: Any
    ) -> tuple[list[Any], list[Any]]:
        """New states, and what is kept of one step."""


class _Once:
    """A builder that gives the earlier result where an operator is asked for again with the same inputs."""

    def __init__(self, b: OperatorBuilder) -> None:
        self._b = b
        self._made: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._b, name)
        if not name[:1].isupper():
            return method

        def apply(*inputs: Any, **attributes: Any) -> Any:
            key = (name, tuple(v and v.name for v in inputs), tuple(sorted(attributes.items())))
            if key not in self._made:
                self._made[key] = method(*inputs, **attributes)
            return self._made[key]

        return apply


def unrolled(op: Stepping, b: Builder, inputs: Sequence[Any], base: str, want: int) -> list[Any]:
    """Y and the last state(s) of `op`, the first `want` of them; steps are called `BASE/STEP/h` and `BASE/STEP/c`.

    Where both directions run, those of the second are `BASE/reverse/STEP/...`.
    """
    x, w, r, bias, lengths, *states = filled(inputs, op.arity)
    op.infer(*(None if v is None else v.type for v in inputs))
    start = len(b.operators)
    names: dict[str, str] = {}
    runs = []
    for d in range(op.directions):
        here = f"{base}/reverse" if d else base
        runs.append(_direction(op, b, d, (x, w, r, bias, lengths), states, here, names))
    b.prefix = base
    results = []
    for i in range(want):
        parts = [run[i] for run in runs]
        results.append(parts[0] if len(parts) == 1 else b.Concat(*parts, axis=1 if i == 0 else 0))
    b.operators[start:] = [o.renamed(names) for o in leading_to(b.operators[start:], results)]
    return [v.renamed(names.get(v.name, v.name)) for v in results]


def _direction(
    op: Stepping, b: Builder, d: int, given: Sequence[Any], states: Sequence[Any], base: str, names: dict[str, str]
) -> list[Any]:
    """Y and last states of one direction; `names` gets what the steps' states are to be called."""
    x, w, r, bias, lengths = given
    steps, batch, features = x.shape
    n, width = op.hidden_size, op.gates * op.hidden_size
    b.prefix = base
    once: Any = _Once(b)
    w, r, bias, h, *others = (None if v is None else row(once, v, d) for v in (w, r, bias, *states))
    zero = once.Fill(dtype=x.dtype, shape=(batch, n))
    biases = (None, None) if bias is None else (cut(once, bias, 0, width, 0), cut(once, bias, width, 2 * width, 0))
    projected = b.MatMul(b.Reshape(x, shape=(steps * batch, features)), w, transB=1)
    rows = b.Split(projected, sizes=(batch,) * steps) if steps > 1 else [projected] * steps
    state = [zero if h is None else h]
    if op.onnx_outputs == 3:
        state.append(zero if not others or others[0] is None else others[0])
    values: dict[int, Any] = {}
    for t in op.order(d, steps):
        b.prefix = f"{base}/{t}"
        new, _ = op.step(once, rows[t], state, r, biases, others[1] if len(others) > 1 else None)
        y = new[0]
        if lengths is not None:
            active = b.Greater(reshape(once, lengths, (batch, 1)), b.constant(t, lengths.dtype))
            new = [b.Where(active, now, before) for now, before in zip(new, state, strict=True)]
            y = b.Where(active, y, zero)
        for v, what in zip(new, "hc", strict=False):
            names.setdefault(v.name, b.names.take(f"{base}/{t}/{what}"))
        values[t], state = y, new
    b.prefix = base
    if not steps:
        return [b.Fill(dtype=x.dtype, shape=(0, 1, batch, n)), *(reshape(b, s, (1, batch, n)) for s in state)]
    y = b.Reshape(joint(b, [values[t] for t in range(steps)]), shape=(steps, 1, batch, n))
    return [y, *(b.Reshape(s, shape=(1, batch, n)) for s in state)]
