"""Programs at other sizes than they were loaded with: another batch, other lengths; all with the same arrays."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import UsageError
from ..language.ir import Role
from ..language.program import Program
from .modes import (
    checked_dims,
    evaluate,
    fed_batch,
    for_test,
    forward_at,
    freeze,
    share_arrays,
    sizes_of,
    values_to_compare,
)
from .protocol import Described
from .spec import Spec, StepAgain

__all__ = ["at_sizes", "evaluate", "for_feed", "for_test", "freeze", "step_like", "unused", "values_to_compare"]


def step_like(program: Program, step: Program, spec: Spec, how: StepAgain) -> Program:
    """A forward pass at other sizes as a training step with the arrays of `program`.

    The optimizer is a copy: the user's own has the state of `program`.  UsageError where its parameters are others.
    """
    lists = {"parameter_list": how.parameters or None, "no_grad_set": how.no_grad or None}
    Described(unused(spec)).minimize(step[how.loss], None, **lists)
    shapes = [{v.name: v.shape for v in p.block.parameters} for p in (step, program)]
    if shapes[0] != shapes[1]:
        other = next(n for n in {**shapes[0], **shapes[1]} if shapes[0].get(n) != shapes[1].get(n))
        raise UsageError(
            f"at these sizes '{other}' has another shape than in program '{program.block.name}': "
            f"{shapes[0].get(other)} in place of {shapes[1].get(other)}"
        )
    share_arrays(step, program)
    return step


def unused(spec: Spec) -> Spec:
    """The spec with a copy of its rule of updates, which has the state of one program."""
    return spec.with_(rule=copy.copy(spec.rule))


def for_feed(program: Program, feed: Mapping[str, Any]) -> tuple[int | None, tuple[tuple[str, int], ...]] | None:
    """The batch and the sizes of dimensions that are fed, where these are others than the program's; else None.

    None, too, where the model does not leave open what is other.
    """
    if program.again is None:
        return None
    try:
        if all(np.shape(feed[v.name]) == v.shape for v in program.block.inputs if v.name in feed):
            return None
    except ValueError:  # no array: the executor says so
        return None
    current = sizes_of(program)
    sizes = fed_batch(program, feed), tuple(sorted(sizes_of(program, feed).items()))
    return None if sizes == (None, tuple(sorted(current.items()))) else sizes


def at_sizes(program: Program, batch: int | None, dims: Mapping[str, int]) -> Program:
    """The program at another batch (None: its own) and sizes of dimensions, with its arrays.

    UsageError where it cannot be made.
    """
    checked_dims(dims)
    if not any(op.role is Role.OPTIMIZE for op in program.operators):
        other = forward_at(program, batch, dims)
        share_arrays(other, program)
        return other
    how = program.step_again
    if how is None or how.forward is None or (program.logical is not how.block and program.compiled is None):
        raise UsageError(
            f"program '{program.block.name}' cannot be compiled for the sizes fed: it was not made a training step by "
            "minimize, or was changed since. Load the model at these sizes"
        )
    if program.mesh is not None:
        raise UsageError(f"program '{program.block.name}' is one of several ranks': it runs at its own sizes alone")
    size = program.forward_block.batch or 1
    other = how.forward(size if batch is None else batch, {**sizes_of(program), **dims})
    spec = how.spec.for_batch(size if batch is None else batch, how.most)
    try:
        return step_like(program, other, spec, how)
    except UsageError:  # a plan that is for other sizes
        if spec == spec.without_plan():
            raise
        other = how.forward(size if batch is None else batch, {**sizes_of(program), **dims})
        return step_like(program, other, spec.without_plan(), how)
