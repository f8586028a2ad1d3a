"""Reverse-mode differentiation of a program."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from ...errors import UsageError, nearest
from ...language.builder import Builder, reverse
from ...language.ir import Block, Operator, Role, Value
from ...language.program import Program
from ..base import Pass
from ..cleanup.dead_code import prune
from .lean_gradients import drop_again, mask_before_routing
from .versions import Versions


class Autodiff(Pass):
    """Append the backward pass of `loss`: the gradient of each trained parameter becomes an output.

    `parameters`: names or globs of the parameters or inputs to differentiate by (default: all parameters);
    `no_grad`: names or globs of values through which no gradient flows.  A value's gradient is called NAME_grad.
    `scale`: a value by which all gradients are multiplied (loss scaling).  A program notes the pairs of parameters and
    gradients in place of outputs (`Program.gradients`).
    """

    refuses = ("gradients",)
    gives = ("gradients",)

    loss: str = "loss"
    parameters: tuple[str, ...] = ()
    no_grad: tuple[str, ...] = ()
    scale: str = ""

    def run(self, block: Block) -> Block:
        """The block with backward operators after the forward ones; gradients join the outputs."""
        after, pairs = differentiate(block, self.loss, self.parameters, self.no_grad, self.scale)
        outputs = dict.fromkeys([*block.outputs, self.loss, *(g.name for _, g in pairs)])
        return after.with_operators(after.operators, outputs=tuple(outputs))

    def rewrite(self, program: Program) -> Block:
        """The block with backward operators; UsageError where there is nothing to train."""
        after, pairs = differentiate(program.block, self.loss, self.parameters, self.no_grad, self.scale)
        if not pairs:
            raise UsageError(f"the loss '{self.loss}' depends on no parameter that is trained")
        program.gradients = [(p.name, g.name) for p, g in pairs]
        outputs = tuple(dict.fromkeys([*after.outputs, self.loss]))
        return after.with_operators(after.operators, outputs=outputs)


def select(patterns: Sequence[str], values: Sequence[Value], what: str) -> list[Value]:
    """Values that names or globs match, in the order of `values`.  UsageError if a pattern matches none."""
    chosen: set[str] = set()
    names = {v.name: v for v in values}
    for pattern in patterns:
        matches = [pattern] if pattern in names else fnmatch.filter(names, pattern)
        if not matches:
            raise UsageError(f"no {what} is called '{pattern}'{nearest(pattern, names)}")
        chosen.update(matches)
    return [v for v in values if v.name in chosen]


def differentiate(
    block: Block, loss: str, parameters: Sequence[str] = (), no_grad: Sequence[str] = (), scale: str = ""
) -> tuple[Block, list[tuple[Value, Value]]]:
    """Adds the backward pass; returns the new block and (parameter, gradient) pairs.

    `scale`: the value with which the gradient of the loss begins (default: 1).

    A parameter on which the loss does not depend has no pair.  If the forward pass updates state whose former value a
    gradient reads, the state is copied right before the update.
    """
    values = block.values()
    if loss not in values:
        raise UsageError(f"there is no value '{loss}' to differentiate{nearest(loss, values)}")
    if values[loss].size != 1 or not values[loss].type.is_float:
        raise UsageError(f"the loss must be one floating-point number, but '{loss}' is {values[loss].type}")
    if parameters:
        wanted = select(parameters, [*block.parameters, *block.inputs, *block.buffers], "parameter")
    else:
        wanted = list(block.parameters)
    stop = {v.name for v in select(no_grad, list(values.values()), "value")}
    if loss in stop:
        return block, []
    wanted = [v for v in wanted if v.name not in stop and v.type.is_float]
    b = Builder.on(block, role=Role.BACKWARD, prefix=f"{loss}.grad")
    seed = b.fill(1.0, values[loss])
    if scale:
        factor = values[scale]
        seed = b.Mul(seed, factor if factor.dtype == seed.dtype else b.Cast(factor, to=seed.dtype))
    versions = Versions(b, block)
    grads, forward = reverse(b, versions.operators, {versions.last.get(loss, loss): seed}, wanted, versions.of(stop))
    pairs = [(v, grads[v.name]) for v in wanted if v.name in grads]
    b.operators = mask_before_routing(b, forward, b.operators, [g.name for _, g in pairs])
    names = _gradient_names(block, b, grads, wanted)
    backward = drop_again(b, forward, prune(b.operators, [g.name for _, g in pairs]))
    backward = [o.renamed(names) for o in backward]
    forward, backward, copies = versions.restore(forward, backward)
    forward = _without_unread_extras(block.operators, forward, backward, block.outputs)
    forward = [o for i, op in enumerate(forward) for o in (*copies.get(i, ()), op)]
    after = block.with_operators([*forward, *backward], constants=(*block.constants, *_used(b, backward)))
    return after, [(v, g.renamed(names.get(g.name, g.name))) for v, g in pairs]


def _gradient_names(block: Block, b: Builder, grads: dict[str, Value], first: Sequence[Value]) -> dict[str, str]:
    """Renames the final gradient of each value to NAME_grad; `first` choose before the others."""
    written = {v.name for o in b.operators for v in o.writes()}
    names: dict[str, str] = {}
    for name in dict.fromkeys([*(v.name for v in first), *grads]):
        g = grads.get(name)
        if g is not None and g.name in written and g.name not in names:
            names[g.name] = b.names.take(f"{name}_grad")
    return names


def _without_unread_extras(
    before: Sequence[Operator], after: Sequence[Operator], backward: Sequence[Operator], outputs: Sequence[str]
) -> list[Operator]:
    """Takes back optional outputs that were made for gradient operators which have been pruned since."""
    read = {v.name for o in backward for v in o.reads()}
    operators = []
    for old, new in zip(before, after, strict=True):
        had = {v.name for v in old.writes()}
        operators.append(new if any(v.name in read for v in new.writes() if v.name not in had) else old)
    return operators


def _used(b: Builder, operators: Sequence[Operator]) -> list:
    read = {v.name for o in operators for v in o.reads()}
    return [c for c in b.constants if c.value.name in read]
