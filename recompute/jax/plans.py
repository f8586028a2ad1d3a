"""Plans that JAX can carry out: sets of names to save, from saving most to saving least.

`jax.checkpoint` saves a set of values and computes all others once more, so that of a planner's schedule only the set
counts.  The body of a scan saves the same names in each iteration, `length` times their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..devices import Device
from ..passes.planners.core.bound import Cut, hull, lower_bound, turning_points
from ..passes.planners.core.schedules import keep_schedule, read_as_kept
from ..passes.planners.core.simulate import Outcome, pruned, simulate
from ..passes.planners.methods.auto import frontier_of
from .flat import Flat, Step
from .problem import Derived, Scan, derive, differentiable, given_names, narrow, traced, value_name

#: plans of a scan's body, at most
_BODIES = 24
#: values of a body up to which sets are tried one value apart
_SMALL = 80
#: peaks that differ by less than this share count as one
_NEAR = 0.005


@dataclass(frozen=True)
class Candidate:
    """Names to save; `peak`: bytes by our simulation, without XLA's fusion; `cost`: seconds of the step."""

    names: frozenset[str]
    peak: int
    cost: float
    derived: Derived
    scans: Mapping[str, Scan]

    @property
    def bound(self) -> float | None:
        """Seconds that no plan of this peak goes below, in any order (None with scans: bodies are planned apart)."""
        return None if self.scans else lower_bound(self.derived.problem, self.peak)


def candidates(flat: Flat, wanted: Sequence[int], device: Device, most: int) -> tuple[list[Candidate], list[Candidate]]:
    """Plans, each with a lower peak and a higher cost than the one before, `most` at most; and the usual policies.

    The latter are what users write by hand (`_usual`), from the cheapest to the dearest; none in functions with scans,
    whose bodies have them among their options.
    """
    cotangents = [i for i, v in enumerate(flat.outputs) if isinstance(v, int) and differentiable(flat.avals[v])]
    joint = traced(flat, wanted, cotangents)
    plans: list[Candidate] = []
    usual: list[Candidate] = []
    for scans in _bodies(flat, device):
        derived = derive(joint, len(flat.outputs), len(cotangents), device, scans)
        inside = frozenset().union(*(s.kept for s in scans.values()))
        by_hand = () if scans else _usual(flat, derived)
        for into, sets in ((plans, _sets(derived)), (usual, by_hand)):
            for values, outcome in {_judged(derived, kept) for kept in set(sets)}:
                names = inside.union(derived.names[v] for v in values)
                into.append(Candidate(names, outcome.peak, outcome.cost, derived, scans))
    return _spread(_best(plans), most), sorted(usual, key=lambda c: (c.cost, c.peak, sorted(c.names)))


def _usual(flat: Flat, derived: Derived) -> Iterator[frozenset[int]]:
    """Sets saved by hand: results of products (without batch dimensions, or all), values between layers, or both.

    Convolutions count as products.  A layer ends where one value crosses, and has one such end or two.  What the
    caller has named is tried as well: all of it, and each name alone.
    """
    values = {n: v for v, n in derived.names.items()}

    def of(names: Iterable[str]) -> frozenset[int]:
        return frozenset(values[n] for n in names if n in values)

    products = [s for s in flat.steps if s.primitive in ("dot_general", "conv_general_dilated")]
    without = [s for s in products if not any(_batch(s))]
    ends = narrow(flat)
    for saved in ((), without, products):
        inside = of(value_name(s.name, 0) for s in saved)
        yield from (inside | of(ends[::every]) for every in (1, 2))
        if saved:
            yield inside
    named = given_names(flat)
    yield from (of(names) for names in ([n for every in named.values() for n in every], *named.values()) if names)


def _batch(product: Step) -> tuple[int, ...]:
    """Batch dimensions of a `dot_general`; none for a convolution."""
    return product.equation.params["dimension_numbers"][1][0] if product.primitive == "dot_general" else ()


def _sets(derived: Derived) -> Iterator[frozenset[int]]:
    """Values to save: what the planner's schedules keep, what minimum cuts at the turn keep, and nothing."""
    problem, names = derived.problem, set(derived.names)
    for point in list(frontier_of(problem)):
        yield frozenset(read_as_kept(problem, point.sequence) & names)
    for b in turning_points(problem, 1):
        for line in hull(Cut(problem, b)):
            yield frozenset(line.kept & names)
    yield frozenset()


def _judged(derived: Derived, kept: frozenset[int]) -> tuple[frozenset[int], Outcome]:
    """The values of a set that the backward pass reads, and the step's peak and cost as JAX executes the set."""
    problem = derived.problem
    sequence = pruned(problem, keep_schedule(problem, kept))
    return frozenset(read_as_kept(problem, sequence) & set(derived.names)), simulate(problem, sequence)


def _bodies(flat: Flat, device: Device) -> Iterator[dict[str, Scan]]:
    """Plans for all scans' bodies together: each takes its cheapest that saves a share of what it can, or less."""
    options = {step.name: _options(step, device) for step in flat.steps if step.body}
    shares = {s.saved / max(1, plans[0].saved) for plans in options.values() for s in plans} or {1.0}
    for share in sorted(shares, reverse=True):
        most = {n: share * plans[0].saved for n, plans in options.items()}
        yield {n: next((s for s in plans if s.saved <= most[n]), plans[-1]) for n, plans in options.items()}


def _options(step: Step, device: Device) -> list[Scan]:
    """Plans of one body, from saving most to saving nothing; each is cheaper than all that save less."""
    body = step.body
    assert body is not None
    wanted = [i for i, v in enumerate(body.inputs) if differentiable(body.avals[v])]
    cotangents = [i for i, v in enumerate(body.outputs) if isinstance(v, int) and differentiable(body.avals[v])]
    joint = traced(body, wanted, cotangents)
    derived = derive(joint, len(body.outputs), len(cotangents), device)
    problem = derived.problem
    forward = sum(n.cost for n in problem.nodes if not n.backward)
    scans: list[Scan] = []
    for values, outcome in {
        _judged(derived, kept) for kept in {*_sets(derived), *_one_by_one(derived), *_usual(body, derived)}
    }:
        saved = sum(problem.sizes[v] for v in values)
        names = frozenset(derived.names[v] for v in values)
        scans.append(Scan(names, saved, outcome.cost - forward, outcome.peak - problem.fixed - saved))
    best: list[Scan] = []
    for s in sorted(scans, key=lambda s: (s.seconds, s.saved, sorted(s.kept))):
        if not best or s.saved < best[-1].saved:
            best.append(s)
    return best[:: -(-len(best) // _BODIES)] + best[-1:]


def _one_by_one(derived: Derived) -> Iterator[frozenset[int]]:
    """Sets from saving all to saving nothing, without the value each time that costs least for its bytes."""
    problem = derived.problem
    kept = frozenset(v for v in problem.saved if v in derived.names)
    cost = problem.cost
    while kept and len(kept) <= _SMALL:
        yield kept
        costs = {v: simulate(problem, keep_schedule(problem, kept - {v})).cost for v in kept}
        least = min(kept, key=lambda v: ((costs[v] - cost) / max(1, problem.sizes[v]), v))
        kept, cost = kept - {least}, costs[least]


def _best(plans: list[Candidate]) -> list[Candidate]:
    """The plans with a lower peak than all cheaper ones, the highest peak first, the least of all last."""
    kept: list[Candidate] = []
    least = min(plans, key=lambda c: (c.peak, c.cost, sorted(c.names)))
    for c in sorted(plans, key=lambda c: (c.cost, c.peak, sorted(c.names))):
        if not kept or c.peak < kept[-1].peak * (1 - _NEAR) or (c is least and c.peak < kept[-1].peak):
            kept.append(c)
    return kept


def _spread(plans: list[Candidate], most: int) -> list[Candidate]:
    """At most so many: those nearest to peaks at equal distances, the first and the last among them."""
    if len(plans) <= most:
        return plans
    high, low = plans[0].peak, plans[-1].peak
    aims = [high - (high - low) * i / (most - 1) for i in range(most)]
    return list({c.peak: c for c in (min(plans, key=lambda c: abs(c.peak - a)) for a in aims)}.values())
