"""Retention intervals in constraint programming: each node runs a few times, each time its values stay for a while.

The event at which node v runs for the sake of node j is number j(j+1)/2 + v, so that within the stage of j nodes run in
order, each once (Moccasin, ICML 2023, arXiv 2304.14463).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....errors import load_extra
from ..core.problem import RematerialisationProblem, checked_sequence
from ..core.schedules import keep_schedule
from ..core.simulate import pruned, simulate
from ..core.watch import current, interruptible
from .min_cut import saved_within

#: sums of scaled bytes and costs stay below this
_LARGEST = 1 << 40
#: CP-SAT's deterministic time in units of `watch`, what the model takes included
_SOLVING = 1.5


def start(problem: RematerialisationProblem, budget: int) -> list[int]:
    """The plain order where it fits, else the best of a few cuts (the lowest peak where none fits)."""
    best = list(range(len(problem)))
    outcome = simulate(problem, best)
    if outcome.peak <= budget or not any(n.backward for n in problem.nodes):
        return best
    for fraction in (0.9, 0.7, 0.5, 0.3, 0.1):
        sequence = pruned(problem, keep_schedule(problem, saved_within(problem, fraction)))
        found = simulate(problem, sequence)
        if (max(found.peak, budget), found.cost) < (max(outcome.peak, budget), outcome.cost):
            best, outcome = sequence, found
    return best


def improve(
    problem: RematerialisationProblem,
    budget: int,
    sequence: Sequence[int],
    *,
    effort: float = 5.0,
    time_limit: float = math.inf,
    copies: int = 3,
    free: Collection[int] | None = None,
    workers: int = 1,
    seed: int = 0,
) -> tuple[list[int], float | None, bool]:
    """(sequence, bound, proven): a sequence at least as good as the one given, within the budget if one is found.

    Better means: a lower peak while that is above the budget, then a lower cost.  `free`: the nodes that may run at
    other times than they do; all others run when they run now (a large neighbourhood); None: all are free.
    `bound`: no sequence of at most `copies` runs of each node (or as many as it has now), each once in a stage and in
    order, costs less (None with `free`, and while the peak is above the budget); `proven` says that the one returned
    is a best of those, or, with `free`, of that neighbourhood.
    """
    checked_sequence(problem, sequence)
    deadline = time.monotonic() + time_limit
    best = min([*sequence], _staged(problem, sequence), key=lambda s: _rank(problem, s, budget))
    staged = _staged(problem, best)
    bound, proven = None, False
    for minimise_peak in (True, False):
        if minimise_peak == (simulate(problem, staged).peak > budget):
            model = _Model(problem, budget, staged, copies, free, minimise_peak)
            found = model.solve(effort, deadline - time.monotonic(), workers, seed)
            staged = staged if found is None else found
            best = min(best, staged, key=lambda s: _rank(problem, s, budget))
            bound = None if minimise_peak or free is not None else model.bound
            proven = model.proven
    return best, bound, proven


def _rank(problem: RematerialisationProblem, sequence: Sequence[int], budget: int) -> tuple[int, float]:
    outcome = simulate(problem, sequence)
    return max(outcome.peak, budget), outcome.cost


def _staged(problem: RematerialisationProblem, sequence: Sequence[int]) -> list[int]:
    """The sequence with each stage in order and no node twice in it."""
    done, stage, found = 0, set[int](), list[int]()
    for i in sequence:
        if i == done:
            found += [*sorted(stage), i]
            stage, done = set(), done + 1
        else:
            stage.add(i)
    return pruned(problem, found)


@dataclass
class _Copy:
    """A run of a node: its event, whether it takes place, the last event of each value; numbers where fixed."""

    at: Any
    active: Any
    ends: dict[int, Any] = field(default_factory=dict)
    saved: list[Any] = field(default_factory=list)
    stages: dict[int, Any] = field(default_factory=dict)


class _Model:
    """The constraint programme; `sequence` is its hint, and what all but the free nodes do."""

    def __init__(
        self,
        problem: RematerialisationProblem,
        budget: int,
        sequence: Sequence[int],
        copies: int,
        free: Collection[int] | None,
        minimise_peak: bool,
    ) -> None:
        self.cp = load_extra("ortools.sat.python.cp_model", "plan", "strategy 'moccasin'")
        self.model = self.cp.CpModel()
        self.problem, self.sequence, self.copies = problem, sequence, copies
        self.free = set(range(len(problem))) if free is None else set(free)
        self.end = _event(len(problem), 0)
        self.bound: float | None = None
        self.proven = False
        self.runs: list[list[_Copy]] = [[] for _ in problem.nodes]
        self.inputs = {v: self.model.new_int_var(0, self.end, "") for v in problem.inputs}
        self.hint()
        self.nodes()
        self.reads()
        self.memory(budget, minimise_peak)
        self.scale = _scale([n.cost for n in problem.nodes])
        if not minimise_peak:
            self.model.minimize(
                sum(
                    math.floor(node.cost * self.scale) * run.active
                    for node, runs in zip(problem.nodes, self.runs, strict=True)
                    for run in runs
                )
            )

    def hint(self) -> None:
        """Events of the sequence: for each node when it runs, and the last use of what it writes each time."""
        self.events: list[list[int]] = [[] for _ in self.problem.nodes]
        self.uses: dict[tuple[int, int], int] = {}
        self.input_uses = dict.fromkeys(self.problem.inputs, 0)
        done = 0
        for i in self.sequence:
            now = _event(done, i)
            done += i == done
            for v in self.problem.nodes[i].reads:
                self.used(v, now)
            self.events[i].append(now)
            for v in self.problem.nodes[i].writes:
                self.used(v, now)
        for v in self.problem.outputs:
            self.used(v, self.end - 1)

    def used(self, v: int, now: int) -> None:
        p = self.problem.producer[v]
        if p < 0:
            self.input_uses[v] = now
        else:
            self.uses[v, len(self.events[p]) - 1] = now

    def nodes(self) -> None:
        """Each node's runs, in order; the first is at its own stage, the others at later ones."""
        n = len(self.problem)
        for i, node in enumerate(self.problem.nodes):
            events = self.events[i]
            count = max(len(events), self.copies) if i in self.free and node.repeatable else len(events)
            count = min(count, n - i)
            for k in range(count):
                if k == 0 or i not in self.free:
                    run = _Copy(events[k], 1)
                else:
                    run = self.rerun(i, k)
                for v in node.writes:
                    run.ends[v] = self.last_use(v, run, self.uses.get((v, k), _event(n - 1, i)))
                self.runs[i].append(run)
            self.in_order(i, self.runs[i])

    def last_use(self, v: int, run: _Copy, now: int) -> Any:
        """A variable, or what it is now where neither the producer nor a reader is free."""
        p = self.problem
        if p.producer[v] not in self.free and self.free.isdisjoint(p.readers[v]):
            return now
        end = self.model.new_int_var(_least(run), self.end, "")
        self.add(end >= run.at)
        self.model.add_hint(end, now)
        return end

    def rerun(self, i: int, k: int) -> _Copy:
        n, events = len(self.problem), self.events[i]
        domain = self.cp.Domain.from_values([_event(j, i) for j in range(i + k, n)])
        run = _Copy(self.model.new_int_var_from_domain(domain, ""), self.model.new_bool_var(""))
        at = events[k] if k < len(events) else _event(n - 1, i)
        self.model.add_hint(run.at, at)
        self.model.add_hint(run.active, k < len(events))
        return run

    def in_order(self, i: int, runs: list[_Copy]) -> None:
        """Runs follow each other, and a value is no longer read once there is a new one."""
        for a, b in itertools.pairwise(runs):
            if isinstance(b.active, int):  # the producer is not free, and both run when they do
                for end in a.ends.values():
                    self.add(end < b.at)
                continue
            self.model.add(b.at > a.at).only_enforce_if(b.active)
            for end in a.ends.values():
                self.model.add(end < b.at).only_enforce_if(b.active)
            if not isinstance(a.active, int):
                self.model.add_implication(b.active, a.active)
            # one way only to be inactive
            self.model.add(b.at == _event(len(self.problem) - 1, i)).only_enforce_if(~b.active)
            for end in b.ends.values():
                self.model.add(end == b.at).only_enforce_if(~b.active)

    def reads(self) -> None:
        """Constraints: a run finds each value that it reads in the interval of some run of the producer."""
        for i, node in enumerate(self.problem.nodes):
            for k, run in enumerate(self.runs[i]):
                now = self.events[i][k] if k < len(self.events[i]) else -1
                for v in node.reads:
                    self.covered(v, run.at, run.active, now)
        for v in self.problem.outputs:
            self.covered(v, self.end - 1, 1, self.end - 1)

    def covered(self, v: int, at: Any, active: Any, now: int) -> None:
        p = self.problem.producer[v]
        if p < 0:
            self.add(self.inputs[v] >= at, active)
            return
        sources = self.runs[p]
        latest = sum(e < now for e in self.events[p]) - 1
        if len(sources) == 1 or (p not in self.free and isinstance(at, int)):
            self.add(sources[latest].ends[v] >= at, active)
            return
        chosen = []
        for k, run in enumerate(sources):
            choice = self.model.new_bool_var("")
            self.model.add(run.at < at).only_enforce_if(choice)
            self.model.add(run.ends[v] >= at).only_enforce_if(choice)
            if not isinstance(run.active, int):
                self.model.add_implication(choice, run.active)
            self.model.add_hint(choice, k == latest)
            chosen.append(choice)
        self.model.add_bool_or([*chosen, *([] if isinstance(active, int) else [~active])])

    def add(self, constraint: Any, active: Any = 1) -> None:
        """A constraint for runs that take place; none where all that it names is fixed."""
        if not isinstance(constraint, bool):
            added = self.model.add(constraint)
            if not isinstance(active, int):
                added.only_enforce_if(active)

    def memory(self, budget: int, minimise_peak: bool) -> None:
        """Intervals of values and of scratch under the budget, in units that make a plan of the model fit for sure."""
        p = self.problem
        unit = _unit([*p.sizes, *(n.scratch for n in p.nodes)])
        room = (budget - p.fixed) // unit
        whole = sum(-(-s // unit) for s in p.sizes) * self.copies
        capacity: Any = max(0, room)
        if minimise_peak:
            peak = simulate(p, self.sequence).peak - p.fixed
            capacity = self.model.new_int_var(max(0, room), max(-(-peak // unit) * 2, whole, 1), "")
            self.model.minimize(capacity)
        intervals, demands = [], []
        for interval, size in self.intervals():
            intervals.append(interval)
            demands.append(-(-size // unit))
        self.model.add_cumulative(intervals, demands, capacity)

    def intervals(self) -> Iterator[tuple[Any, int]]:
        """(interval, bytes); the end of one that another run's output takes the place of is one event earlier."""
        p, model = self.problem, self.model
        earlier: dict[tuple[int, int], list[Any]] = {}
        for i, runs in enumerate(self.runs):
            for run in runs:
                self.overwritten(i, run, earlier)
        for v, end in self.inputs.items():
            model.add_hint(end, self.input_uses[v])
            if p.readers[v] or v in p.outputs:
                run = _Copy(0, 1)
                yield self.interval(run, self.stop(run, end, earlier.get((v, 0)))), p.sizes[v]
        for i, node in enumerate(p.nodes):
            for k, run in enumerate(self.runs[i]):
                for v, end in run.ends.items():
                    if p.sizes[v]:
                        yield self.interval(run, self.stop(run, end, earlier.get((v, k)))), p.sizes[v]
                if node.scratch:
                    yield self.interval(run, run.at + 1), node.scratch

    def stop(self, run: _Copy, end: Any, earlier: list[Any] | None) -> Any:
        """The first event at which a value is gone."""
        if not earlier:
            return end + 1
        stop = self.model.new_int_var(_least(run), self.end + 1, "")
        self.model.add(stop == end + 1 - sum(earlier))
        return stop

    def interval(self, run: _Copy, stop: Any) -> Any:
        if isinstance(run.at, int):
            return self.model.new_interval_var(run.at, stop - run.at, stop, "")
        length = self.model.new_int_var(0, self.end + 1, "")
        return self.model.new_optional_interval_var(run.at, length, stop, run.active, "")

    def overwritten(self, i: int, run: _Copy, earlier: dict[tuple[int, int], list[Any]]) -> None:
        """At most one value dies when this run reads it and lends its place to what the run writes."""
        p, choices = self.problem, []
        for v in p.nodes[i].overwrites:
            if v in p.outputs or all(p.sizes[w] != p.sizes[v] for w in p.nodes[i].writes):
                continue
            source = p.producer[v]
            ends = [self.inputs[v]] if source < 0 else [r.ends[v] for r in self.runs[source]]
            for k, end in enumerate(ends):
                if isinstance(end, int) and isinstance(run.at, int) and end != run.at:
                    continue
                choice = self.model.new_bool_var("")
                self.add(end == run.at, choice)
                if not isinstance(run.active, int):
                    self.model.add_implication(choice, run.active)
                earlier.setdefault((v, k), []).append(choice)
                choices.append(choice)
        if len(choices) > 1:
            self.model.add_at_most_one(choices)

    def solve(self, effort: float, seconds: float, workers: int, seed: int) -> list[int] | None:
        """A sequence of the model; None where none was found in time."""
        solver = self.cp.CpSolver()
        solver.parameters.random_seed = seed
        solver.parameters.num_workers = workers
        solver.parameters.interleave_search = workers > 1
        solver.parameters.max_deterministic_time = effort
        solver.parameters.cp_model_presolve = False  # takes longer than the search
        solver.parameters.catch_sigint_signal = False  # it swallows Ctrl-C, and takes Python's handler away for good
        watch = current()
        seconds = min(seconds, watch.left)
        if seconds < math.inf:
            solver.parameters.max_time_in_seconds = max(0.01, seconds)
        status = interruptible(lambda: solver.solve(self.model), solver.stop_search)
        watch.spend(_SOLVING * solver.response_proto.deterministic_time)
        if self.scale and status in (self.cp.OPTIMAL, self.cp.FEASIBLE, self.cp.UNKNOWN):
            self.bound = max(0.0, solver.best_objective_bound) / self.scale
        self.proven = status == self.cp.OPTIMAL
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None
        events = [
            (run.at if isinstance(run.at, int) else solver.value(run.at), i)
            for i, runs in enumerate(self.runs)
            for run in runs
            if isinstance(run.active, int) or solver.value(run.active)
        ]
        return pruned(self.problem, [i for _, i in sorted(events)])


def _least(run: _Copy) -> int:
    return run.at if isinstance(run.at, int) else 0


def _event(stage: int, node: int) -> int:
    """Number of the moment at which `node` runs for the sake of node `stage` (itself: stage == node)."""
    return stage * (stage + 1) // 2 + node


def _unit(sizes: Collection[int]) -> int:
    """Bytes that count as one: the sizes' common divisor if that keeps sums small, else what does."""
    common = math.gcd(*sizes) or 1
    return common if sum(sizes) // common < _LARGEST else -(-sum(sizes) // _LARGEST)


def _scale(costs: Collection[float]) -> float:
    """Whole units of cost in one of the problem's: 1 where costs are whole numbers, else a millionth of a millionth of
    them all.  Costs are rounded down, so that bounds hold."""
    whole = sum(costs)
    if whole < _LARGEST and all(c == int(c) for c in costs):
        return 1.0
    return (1 << 36) / whole if whole else 1.0
