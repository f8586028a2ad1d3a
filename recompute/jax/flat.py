"""A jaxpr as one flat list of steps: nested `jit` calls are inlined, bodies of `scan` are lists of their own.

Values are numbers.  A step holds its equation and is evaluated by JAX itself (`jax.core.eval_jaxpr` of that one
equation), so that rules for derivatives, effects and source lines stay those of JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
from jax.api_util import debug_info
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ..errors import UsageError

#: calls that are inlined; those with shardings, layouts or options of their own stay one step
_CALLS = ("jit", "pjit", "closed_call", "core_call")


@dataclass(frozen=True, eq=False)
class Constant:
    """A number in the code of a function (JAX's own `Literal` has no hash)."""

    val: Any
    aval: Any


@dataclass(frozen=True)
class Step:
    """One equation.  `reads`: numbers of values, and constants.  `name`: unique, and the same each time it is traced.

    `body`: the steps of one iteration of a `scan` that is in no other scan; its inputs are the scan's constants, carry
    and slices.
    """

    name: str
    equation: Any
    reads: tuple[Any, ...]
    writes: tuple[int, ...]
    body: Flat | None = None

    @property
    def primitive(self) -> str:
        """JAX's name of the operation, such as `dot_general`."""
        return self.equation.primitive.name

    @property
    def source(self) -> str:
        """File and line of the caller's code that made the equation."""
        from jax.extend.source_info_util import summarize

        return summarize(self.equation.source_info)


@dataclass
class Flat:
    """Steps in order; `avals`: shape and element type of each value; `inputs`, `outputs` as in the jaxpr.

    `constants`: arrays that the function closes over, by value.
    """

    steps: list[Step] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[Any, ...] = ()
    constants: dict[int, Any] = field(default_factory=dict)

    def new(self, aval: Any) -> int:
        """A new value's number.  UsageError for a mutable one."""
        if hasattr(aval, "inner_aval"):
            raise UsageError(f"the function keeps mutable state ({aval}), of which plans know nothing: carry values")
        self.avals.append(aval)
        return len(self.avals) - 1

    @property
    def signature(self) -> tuple[Any, ...]:
        """A key that is equal for two traces of one function: primitives, shapes and element types, in order."""
        values = tuple(f"{a.dtype}{list(a.shape)}" if hasattr(a, "shape") else str(a) for a in self.avals)
        return tuple((s.primitive, s.writes, s.body.signature if s.body else ()) for s in self.steps), values


def flatten(closed: ClosedJaxpr, prefix: str = "") -> Flat:
    """The steps of a jaxpr; names are `prefix`, the number among all steps and the primitive: `12.dot_general`.

    With a prefix the jaxpr is the body of a scan: a scan inside of it is one step, which JAX differentiates as ever.
    """
    flat = Flat()
    flat.inputs = tuple(flat.new(v.aval) for v in closed.jaxpr.invars)
    flat.outputs = _inline(flat, closed, flat.inputs, prefix)
    return flat


def _inline(flat: Flat, closed: ClosedJaxpr, args: Sequence[Any], prefix: str) -> tuple[Any, ...]:
    """Adds a jaxpr's steps to the list, and returns what its outputs are there."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    for v, array in zip(jaxpr.constvars, closed.consts, strict=True):
        values[v] = flat.new(v.aval)
        flat.constants[values[v]] = array

    def read(v: Any) -> Any:
        return Constant(v.val, v.aval) if isinstance(v, Literal) else values[v]

    for equation in jaxpr.eqns:
        reads = tuple(map(read, equation.invars))
        inner = _inner(equation)
        if inner is not None:
            values.update(zip(equation.outvars, _inline(flat, inner, reads, prefix), strict=True))
            continue
        writes = tuple(flat.new(v.aval) for v in equation.outvars)
        name = f"{prefix}{len(flat.steps)}.{equation.primitive.name}"
        body = (
            flatten(equation.params["jaxpr"], f"{name}/") if equation.primitive.name == "scan" and not prefix else None
        )
        flat.steps.append(Step(name, equation, reads, writes, body))
        values.update(zip(equation.outvars, writes, strict=True))
    return tuple(map(read, jaxpr.outvars))


def _inner(equation: Any) -> ClosedJaxpr | None:
    """The jaxpr of a call that means the same inlined; None for any other equation."""
    params = equation.params
    if equation.primitive.name not in _CALLS:
        return None
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    asked: list[Any] = [s for s in shardings if type(s).__name__ != "UnspecifiedValue"]
    asked += [x for x in (*params.get("in_layouts", ()), *params.get("out_layouts", ())) if x is not None]
    asked += [d for d in params.get("donated_invars", ()) if d] + list(params.get("compiler_options_kvs", ()))
    if inner is None or asked:
        return None
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


#: a function of a step's results as it is evaluated: the step and its results → the results to go on with
Hook = Callable[[Step, Sequence[Any]], Sequence[Any]]
#: how the body of a scan is evaluated: the scan and the function of its inputs → the function to call
Wrap = Callable[[Step, Callable[..., Any]], Callable[..., Any]]


def evaluate(flat: Flat, steps: Sequence[Step], values: dict[int, Any], hook: Hook, wrap: Wrap) -> None:
    """Runs some steps in order; adds what they make to `values` (number → array)."""
    for step in steps:
        args = [values[v] if isinstance(v, int) else v.val for v in step.reads]
        results = _scanned(step, args, hook, wrap) if step.body else _run(step, args)
        values.update(zip(step.writes, hook(step, results), strict=True))


def outputs_of(flat: Flat, values: Mapping[int, Any]) -> list[Any]:
    """The outputs, once all steps have run."""
    return [values[v] if isinstance(v, int) else v.val for v in flat.outputs]


def _run(step: Step, args: Sequence[Any]) -> Sequence[Any]:
    equation = step.equation
    literal = [isinstance(v, Literal) for v in equation.invars]
    names = list(dict.fromkeys(v for v, is_one in zip(equation.invars, literal, strict=True) if not is_one))
    values = {v: a for v, a in zip(equation.invars, args, strict=True) if not isinstance(v, Literal)}
    # a literal of an inlined call may stand where the equation reads a variable: `args` has its value
    alone = Jaxpr((), names, equation.outvars, [equation], equation.effects, _labels(len(names), len(equation.outvars)))
    return jax.core.eval_jaxpr(alone, (), *(values[v] for v in names))


@cache
def _labels(reads: int, writes: int) -> Any:
    """Names for the arguments and results of one equation, which JAX asks for."""
    paths = tuple(f"result[{k}]" for k in range(writes))
    return debug_info("recompute", lambda *args: args, (0,) * reads, {}, result_paths_thunk=lambda: paths)


def _scanned(step: Step, args: Sequence[Any], hook: Hook, wrap: Wrap) -> Sequence[Any]:
    """A scan, its body evaluated step by step."""
    params, body = step.equation.params, step.body
    assert body is not None
    constants, carries = params["num_consts"], params["num_carry"]

    def once(*inputs: Any) -> list[Any]:
        values = {**body.constants, **dict(zip(body.inputs, inputs, strict=True))}
        evaluate(body, body.steps, values, hook, wrap)
        return outputs_of(body, values)

    wrapped = wrap(step, once)

    def iteration(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = wrapped(*args[:constants], *carry, *slices)
        return results[:carries], results[carries:]

    carry, stacked = jax.lax.scan(
        iteration,
        list(args[constants : constants + carries]),
        list(args[constants + carries :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]
