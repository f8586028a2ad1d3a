"""A function with a plan's names on its values, and `jax.checkpoint` around what is recomputed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from ..errors import UsageError
from .costs import VIEWS, nbytes
from .flat import Flat, Step, evaluate, flatten, outputs_of
from .problem import CROSSING, value_name

#: steps of a run, at least
_SHORTEST = 16


def trace(f: Callable[..., Any], args: Sequence[Any]) -> tuple[Flat, Any]:
    """The function's steps, and the shape of what it returns.  UsageError for arguments that are no arrays."""
    for leaf in jax.tree.leaves(args):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
            raise UsageError(
                f"an argument has a {type(leaf).__name__} ({leaf!r:.60}) where an array is expected: bind "
                "other arguments by functools.partial"
            )
    closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
    return flatten(closed), jax.tree.structure(shape)


def applied(
    f: Callable[..., Any], planned_for: Flat, names: frozenset[str], saved: Callable[..., bool] | None
) -> Callable[..., Any]:
    """A function like `f` whose gradient saves `names` by the policy `saved`, and recomputes all else (None: nothing).

    UsageError, when it is called, where `f` is not the function that was planned for.
    """

    @wraps(f)
    def planned(*args: Any, **named: Any) -> Any:
        if named:
            bound = signature(f).bind(*args, **named)
            if bound.kwargs:
                raise UsageError(f"planned for arguments by position: give {list(bound.kwargs)} by functools.partial")
            args = bound.args
        flat, tree = trace(f, args)
        _same(planned_for, flat)
        if saved is None:
            return f(*args)
        values = {**flat.constants, **dict(zip(flat.inputs, jax.tree.leaves(args), strict=True))}
        _run(flat, values, names, saved)
        return jax.tree.unflatten(tree, outputs_of(flat, values))

    return planned


def _same(planned: Flat, now: Flat) -> None:
    """UsageError where a function is not the one that was planned for."""
    if planned.signature == now.signature:
        return
    shapes = [[f"{a.dtype}{list(a.shape)}" for a in (f.avals[v] for v in f.inputs)] for f in (planned, now)]
    if shapes[0] != shapes[1]:
        n = next((k for k, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b), min(map(len, shapes)))
        was, is_now = (s[n] if n < len(s) else "nothing" for s in shapes)
        raise UsageError(f"planned for {was} as array {n} of the arguments, but given {is_now}: plan for these shapes")
    raise UsageError(
        f"the function is not the one that was planned: {len(planned.steps)} operations then, {len(now.steps)} now, or "
        "others. Plan for this function"
    )


def _run(flat: Flat, values: dict[int, Any], names: frozenset[str], saved: Callable[..., bool]) -> None:
    """All steps of a function: scans with checkpointed bodies, what lies between them checkpointed as a whole."""

    def named(step: Step, made: Sequence[Any]) -> list[Any]:
        full = [value_name(step.name, k) for k in range(len(made))]
        return [checkpoint_name(x, n) if n in names else x for n, x in zip(full, made, strict=True)]

    def wrapped(step: Step, once: Callable[..., Any]) -> Callable[..., Any]:
        return jax.checkpoint(once, policy=saved, prevent_cse=False)

    for steps, later in _parts(flat, names):
        if steps[0].body:
            evaluate(flat, steps, values, named, wrapped)
            continue
        made = {v for s in steps for v in s.writes}
        reads = sorted({v for s in steps for v in s.reads if isinstance(v, int)} - made)
        writes = sorted(made & later)

        def part(
            *inputs: Any, steps: list[Step] = steps, reads: list[int] = reads, writes: list[int] = writes
        ) -> list[Any]:
            inside = dict(zip(reads, inputs, strict=True))
            evaluate(flat, steps, inside, named, wrapped)
            return [inside[v] for v in writes]

        results = jax.checkpoint(part, policy=saved)(*(values[v] for v in reads))
        values.update(zip(writes, results, strict=True))


def _parts(flat: Flat, names: frozenset[str]) -> list[tuple[list[Step], set[int]]]:
    """Runs of steps, each scan by itself, with the values that are read after them.

    A run also ends where whatever crosses is saved in any case: JAX then recomputes each run by itself, once the
    gradient of what follows is there.
    """
    borders = _borders(flat, names)
    parts: list[list[Step]] = []
    for i, step in enumerate(flat.steps):
        if not parts or step.body or parts[-1][0].body or i in borders:
            parts.append([])
        parts[-1].append(step)
    later = {v for v in flat.outputs if isinstance(v, int)}
    result = []
    for steps in reversed(parts):
        result.append((steps, set(later)))
        later.update(v for s in steps for v in s.reads if isinstance(v, int))
    return result[::-1]


def _borders(flat: Flat, names: frozenset[str]) -> set[int]:
    """Numbers of the steps before which all values that cross are saved, but for a few bytes (random keys)."""
    last = {v: i for i, step in enumerate(flat.steps) for v in step.reads if isinstance(v, int)}
    last.update((v, len(flat.steps)) for v in flat.outputs if isinstance(v, int))
    held = {*flat.inputs, *flat.constants}
    saved: set[int] = set(held)
    start, crossing, ends, borders = 0, 0, [0] * (len(flat.steps) + 1), set()
    for i, step in enumerate(flat.steps):
        if i - start >= _SHORTEST and crossing <= CROSSING:
            borders.add(i)
            start = i
        for k, v in enumerate(step.writes):
            view = step.primitive in VIEWS and step.reads[0] in saved
            if value_name(step.name, k) in names or view:
                saved.add(v)
            elif v in last:
                crossing += nbytes(flat.avals[v])
                ends[last[v]] += nbytes(flat.avals[v])
        crossing -= ends[i]
    return borders
