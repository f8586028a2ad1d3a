"""The planning problem of a function and its gradient, from their jaxpr.

The function is traced with a name (`jax.ad_checkpoint.checkpoint_name`) on every result, together with its
vector-Jacobian product.  What depends on the cotangents is the backward pass.  A policy can save values of the forward
pass that have a name, and nothing else: what the derivative rules compute of these (1 - tanh(x)^2, say) runs in the
backward pass, as it does inside `jax.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ..devices import Device
from ..passes.planners.core.problem import Node, RematerialisationProblem
from .costs import FUSED, VIEWS, nbytes, seconds
from .flat import Flat, Step, evaluate, flatten, outputs_of

#: the prefix of values' names
PREFIX = "recompute:"
#: bytes of values that may cross from one run of steps to the next though no plan saves them
CROSSING = 4096


def value_name(step: str, k: int) -> str:
    """The name of result number k of a step (given by its name)."""
    return f"{PREFIX}{step}" + (f".{k}" if k else "")


def narrow(flat: Flat, shortest: int = 16) -> list[str]:
    """Names of the values that cross alone from one step to the next, in order, `shortest` steps or more apart.

    Arguments and values of a few bytes (random keys) do not count, and views count as what they are made of.
    """
    origin: dict[int, int | None] = dict.fromkeys((*flat.inputs, *flat.constants))
    last: dict[int, int] = {}
    names: dict[int, str] = {}
    for i, step in enumerate(flat.steps):
        roots = [origin[v] for v in step.reads if isinstance(v, int)]
        last.update((r, i) for r in roots if r is not None)
        view = step.primitive in VIEWS and len(roots) == 1
        for k, v in enumerate(step.writes):
            origin[v] = roots[0] if view else v if nbytes(flat.avals[v]) > CROSSING else None
            names[v] = value_name(step.name, k)
    last.update((r, len(flat.steps)) for v in flat.outputs if isinstance(v, int) and (r := origin[v]) is not None)
    result: list[str] = []
    crossing: set[int] = set()
    before = 0
    for i, step in enumerate(flat.steps):
        crossing |= {v for v in step.writes if origin[v] == v and last.get(v, i) > i}
        crossing -= {v for v in crossing if last[v] <= i}
        if len(crossing) == 1 and i - before >= shortest:
            result.append(names[next(iter(crossing))])
            before = i
    return list(dict.fromkeys(result))


def given_names(flat: Flat) -> dict[str, list[str]]:
    """The caller's names (`checkpoint_name`), in bodies of scans, too: caller's name → our names, views resolved.

    Arguments have no name of ours: they are there in any case.
    """
    maker = {v: (step, k) for step in flat.steps for k, v in enumerate(step.writes)}
    names: dict[str, list[str]] = {}
    for step in flat.steps:
        if step.body:
            for name, ours in given_names(step.body).items():
                names.setdefault(name, []).extend(ours)
        if step.primitive != "name":
            continue
        ours = names.setdefault(step.equation.params["name"], [])
        source = maker.get(step.reads[0])
        while source is not None and source[0].primitive in VIEWS:
            source = maker.get(source[0].reads[0])
        if source is not None:
            ours.append(value_name(source[0].name, source[1]))
    return names


@dataclass(frozen=True)
class Scan:
    """A plan for the body of a scan: `kept` names, their bytes in one iteration, what one iteration takes.

    `seconds`: of the backward pass, recomputation included; `scratch`: bytes alive at once while it runs.
    """

    kept: frozenset[str]
    saved: int
    seconds: float
    scratch: int


@dataclass
class Derived:
    """A problem, and `names`: of its values that a policy can save (value → name)."""

    problem: RematerialisationProblem
    names: dict[int, str]


def differentiable(aval: Any) -> bool:
    """Whether a value has a gradient: floating-point and complex numbers."""
    return hasattr(aval, "dtype") and jax.dtypes.issubdtype(aval.dtype, np.inexact)


def _savable(x: Any) -> bool:
    """JAX rounds saved values with `reduce_precision`, which takes no complex ones (jax 0.10.2)."""
    return not jax.dtypes.issubdtype(x.dtype, np.complexfloating)


def traced(flat: Flat, wanted: Sequence[int], cotangents: Sequence[int]) -> Flat:
    """The function and its vector-Jacobian product, as one list of steps.

    `wanted`: positions of the inputs whose gradients are asked for; `cotangents`: positions of the outputs that have
    one.  The inputs are those of `flat`, then the cotangents; the outputs are those of `flat`, then the gradients.
    """

    def named(step: Step, made: Sequence[Any]) -> list[Any]:
        return [checkpoint_name(x, value_name(step.name, k)) if _savable(x) else x for k, x in enumerate(made)]

    def checkpointed(step: Step, once: Any) -> Any:
        return jax.checkpoint(once, prevent_cse=False)

    def joint(inputs: list[Any], given: list[Any]) -> list[Any]:
        def forward(*chosen: Any) -> tuple[list[Any], list[Any]]:
            all_inputs = list(inputs)
            for i, x in zip(wanted, chosen, strict=True):
                all_inputs[i] = x
            values = {**flat.constants, **dict(zip(flat.inputs, all_inputs, strict=True))}
            evaluate(flat, flat.steps, values, named, checkpointed)
            outs = outputs_of(flat, values)
            return [outs[i] for i in cotangents], outs

        _, pull, outs = jax.vjp(forward, *(inputs[i] for i in wanted), has_aux=True)
        return [*outs, *pull(given)]

    def shape(v: Any) -> Any:
        aval = flat.avals[v] if isinstance(v, int) else v.aval
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    closed = jax.make_jaxpr(joint)([shape(v) for v in flat.inputs], [shape(flat.outputs[i]) for i in cotangents])
    return flatten(closed)


def derive(joint: Flat, outputs: int, given: int, device: Device, scans: Mapping[str, Scan] | None = None) -> Derived:
    """The problem of what `traced` gave: the first `outputs` are the function's, the last `given` inputs cotangents.

    Arguments and constants are fixed bytes: the caller holds them.  Views, and values that XLA computes where they are
    read (broadcasts), take no bytes of their own.  `scans`: the plans of bodies, by the names of their steps.
    """
    return _Deriving(joint, outputs, given, device, scans or {}).run()


class _Deriving:
    def __init__(self, joint: Flat, outputs: int, given: int, device: Device, scans: Mapping[str, Scan]) -> None:
        self.joint, self.device = joint, device
        first = len(joint.inputs) - given
        self.held = {*joint.inputs[:first], *joint.constants}
        self.maker = {v: s for s in joint.steps for v in s.writes}
        self.sources: dict[int, tuple[int, ...]] = {}
        self.named: dict[int, str] = {}  # value of the jaxpr → the first name that it has
        for step in joint.steps:
            self._look(step)
        self.cotangents = joint.inputs[first:]
        self.backward = _dependent(joint, self.cotangents)
        self.primal = self._ancestors(self.roots(joint.outputs[:outputs]))
        owner = {value_name(name, k): name for name in scans for k in range(64)}
        pairs = ((self.maker[v], owner[n]) for v, n in self.named.items() if n in owner)
        self.scans = {step.name: scans[name] for step, name in pairs}
        self.nodes: list[Node] = []
        self.sizes: list[int] = []
        self.labels: list[str] = []
        self.values: dict[int, int] = {}  # value of the jaxpr → value of the problem
        self.again: dict[int, int] = {}  # the same, for what the backward pass computes of saved values
        self.kept: dict[str, int] = {}  # scan → what its body saves

    def run(self) -> Derived:
        """Forward nodes, backward nodes, outputs."""
        joint = self.joint
        inputs = [self.new(v, "cotangent") for v in self.cotangents]
        for step in joint.steps:
            if step.name in self.primal and not self._free(step):
                self._forward(step)
        for step in joint.steps:
            if step.name in self.backward and not self._free(step):
                self._backward(step)
        outs = dict.fromkeys(self.read(v) for v in self.roots(joint.outputs))
        problem = RematerialisationProblem(
            nodes=tuple(self.nodes),
            sizes=tuple(self.sizes),
            values=tuple(self.labels),
            inputs=tuple(inputs),
            outputs=tuple(outs),
            fixed=sum(nbytes(joint.avals[v]) for v in self.held),
        )
        return Derived(problem, {self.values[v]: n for v, n in self.named.items() if v in self.values})

    def _look(self, step: Step) -> None:
        """Notes what a view or a broadcast stands for, and the name of a value."""
        if not self._free(step):
            return
        sources = self.roots(step.reads)
        for v in step.writes:
            self.sources[v] = sources
        if step.primitive == "name" and len(sources) == 1 and sources[0] == self._seen_through(step.reads[0]):
            name = step.equation.params["name"]
            if name.startswith(PREFIX):
                self.named.setdefault(sources[0], name)

    def _seen_through(self, v: Any) -> Any:
        """The value that a chain of views (broadcasts excluded) starts from."""
        while (step := self.maker.get(v)) is not None and step.primitive in VIEWS:
            v = step.reads[0]
        return v

    @staticmethod
    def _free(step: Step) -> bool:
        return step.primitive in VIEWS or step.primitive in FUSED

    def roots(self, reads: Sequence[Any]) -> tuple[int, ...]:
        """The values that are read, views and broadcasts replaced by what they are made of; no arguments."""
        result: dict[int, None] = {}
        for v in reads:
            if isinstance(v, int) and v not in self.held:
                result.update(dict.fromkeys(self.sources.get(v, (v,))))
        return tuple(result)

    def _ancestors(self, values: Sequence[int]) -> set[str]:
        ancestors: set[str] = set()
        stack = list(values)
        while stack:
            step = self.maker.get(stack.pop())
            if step is not None and step.name not in ancestors:
                ancestors.add(step.name)
                stack += self.roots(step.reads)
        return ancestors

    def new(self, v: int, label: str, size: int | None = None) -> int:
        """A value of the problem."""
        self.sizes.append(nbytes(self.joint.avals[v]) if size is None else size)
        self.labels.append(self.named.get(v, label))
        if size is None:
            self.values[v] = len(self.sizes) - 1
        return len(self.sizes) - 1

    def read(self, v: int) -> int:
        """The value of the problem that stands for one of the jaxpr, as the backward pass reads it."""
        return self.again[v] if v in self.again else self.values[v]

    def _forward(self, step: Step) -> None:
        reads = tuple(self.values[v] for v in self.roots(step.reads))
        writes = [self.new(v, step.name) for v in step.writes]
        scan = self.scans.get(step.name)
        if scan is not None:
            size = scan.saved * step.equation.params["length"]
            self.kept[step.name] = self.new(-1, f"{step.name}: saved by its body", size)
            writes.append(self.kept[step.name])
        once = scan is not None or bool(step.equation.effects)
        self._add(step, reads, writes, backward=False, repeatable=not once)

    def _backward(self, step: Step) -> None:
        roots = self.roots(step.reads)
        for v in roots:
            self._rebuilt(v)
        reads = [self.read(v) for v in roots]
        makers = {m.name for v in roots if (m := self.maker.get(v)) is not None and m.name in self.kept}
        reads += [self.kept[name] for name in makers]
        scan = self.scans[min(makers)] if makers and step.body else None
        self._add(step, tuple(reads), [self.new(v, step.name) for v in step.writes], backward=True, scan=scan)

    def _rebuilt(self, v: int) -> None:
        """Adds nodes for a value that no policy can save: it is computed of saved ones, in the backward pass."""
        stack = [v]
        while stack:
            v = stack[-1]
            step = self.maker.get(v)
            if v in self.again or step is None or step.name in self.backward or self._saved(v, step):
                stack.pop()
                continue
            roots = self.roots(step.reads)
            missing = [u for u in roots if self._must_rebuild(u)]
            if missing:
                stack += missing
                continue
            stack.pop()
            reads = tuple(self.read(u) for u in roots)
            writes = []
            for u in step.writes:
                writes.append(self.new(u, step.name, nbytes(self.joint.avals[u])))
                self.again[u] = writes[-1]
            self._add(step, reads, writes, backward=True)

    def _must_rebuild(self, v: int) -> bool:
        step = self.maker.get(v)
        return not (v in self.again or step is None or step.name in self.backward or self._saved(v, step))

    def _saved(self, v: int, step: Step) -> bool:
        """Whether the forward pass makes a value that can be saved, or that a scan saves in any case."""
        return v in self.values and (v in self.named or step.name in self.kept or bool(step.equation.effects))

    def _add(
        self, step: Step, reads: tuple[int, ...], writes: list[int], *, backward: bool, repeatable: bool = False,
        scan: Scan | None = None,
    ) -> None:  # fmt: skip
        length = step.equation.params.get("length", 1) if scan else 1
        cost = scan.seconds * length if scan else seconds(step.equation, self.device)
        same = {self.sizes[w] for w in writes}
        in_place = () if step.primitive in _MOVES or step.body else tuple(v for v in reads if self.sizes[v] in same)
        scratch = scan.scratch if scan else 0
        self.nodes.append(Node(step.name, cost, reads, tuple(writes), scratch, backward, repeatable, in_place))


#: operations whose result cannot take the place of an operand
_MOVES = ("dot_general", "conv_general_dilated", "transpose", "gather", "sort", "rev", "cumsum", "concatenate")


def _dependent(joint: Flat, on: Sequence[int]) -> set[str]:
    """Names of the steps that depend on some values."""
    values, names = set(on), set()
    for step in joint.steps:
        if any(v in values for v in step.reads if isinstance(v, int)):
            names.add(step.name)
            values.update(step.writes)
    return names
