"""Simulation of a sequence of nodes: its cost, and the bytes alive while it runs.  All plans are evaluated with it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...recomputation.recompute import RecomputePlan, Rerun
from .lifetimes import lifetimes
from .problem import RematerialisationProblem

T = TypeVar("T")
#: bytes of sequences whose figures are remembered for one problem, at most
_REMEMBERED = 1 << 24
#: sequences of so many nodes or more are simulated by arrays (`lifetimes.py`)
LONG = 200


@dataclass(frozen=True)
class Outcome:
    """`peak`: the most bytes alive at once, what is always there included; `at`: position in the sequence where;
    `cost`: of all nodes that run, in the problem's unit."""

    peak: int
    cost: float
    at: int


def simulate(problem: RematerialisationProblem, sequence: Sequence[int]) -> Outcome:
    """Peak and cost of a sequence of node numbers (each node once in order, reruns in between).

    A value lives from the node that writes it to its last reader before the next time it is written; each rerun
    makes a new value, whatever is still alive of the old one.  This is what `liveness` and the memory plan's rule of
    places in storage do to the program, so that the compiled program's live bytes are the same.
    """
    return _known(problem, sequence, _simulated)


def _known(
    problem: RematerialisationProblem,
    sequence: Sequence[int],
    work: Callable[[RematerialisationProblem, Sequence[int]], T],
) -> T:
    """The result of `work` for a sequence, cached: methods offer the same sequences again and again."""
    known = problem.remembered(work, dict[bytes, T])
    key = array("q", sequence).tobytes()
    if key not in known:
        if len(known) * len(key) > _REMEMBERED:
            known.clear()
        known[key] = work(problem, sequence)
    return known[key]


def _simulated(problem: RematerialisationProblem, sequence: Sequence[int]) -> Outcome:
    if min(sequence, default=0) < 0:
        raise ValueError("a sequence has a negative node number")
    live = profile(problem, sequence)
    peak = max(live, default=0)
    costs = problem.remembered("costs", lambda: [n.cost for n in problem.nodes])
    return Outcome(
        peak=peak + problem.fixed, cost=sum(map(costs.__getitem__, sequence)), at=live.index(peak) if live else -1
    )


def profile(problem: RematerialisationProblem, sequence: Sequence[int]) -> list[int]:
    """Bytes alive while each position of the sequence runs, without those that are always there."""
    if len(sequence) >= LONG and (found := lifetimes(problem, sequence).profile()) is not None:
        return found
    nodes, sizes = problem.nodes, problem.sizes
    last, made = last_uses(problem, sequence)
    freed = [0] * (len(sequence) + 2)
    for occurrence, end in enumerate(last):
        freed[end] += sizes[made[occurrence]]
    live = sum([sizes[v] for v in problem.inputs])
    live -= freed.pop()  # inputs that nothing reads: position -1 is the last element
    k = len(problem.inputs)
    current = {v: o for o, v in enumerate(problem.inputs)}
    found = []
    for j, i in enumerate(sequence):
        node = nodes[i]
        for v in node.writes:
            live += sizes[v]
        running = live + node.scratch
        if node.overwrites and node.writes:
            running -= _saved(problem, i, j, current, last)
        for v in node.writes:
            current[v] = k
            k += 1
        found.append(running)
        live -= freed[j]
    return found


def _saved(problem: RematerialisationProblem, i: int, j: int, current: dict[int, int], last: list[int]) -> int:
    """Bytes that node i, at position j, needs less because its output takes a dying input's place."""
    node, sizes = problem.nodes[i], problem.sizes
    for v in node.overwrites:
        if last[current[v]] == j:
            for w in node.writes:
                if sizes[w] == sizes[v]:
                    return sizes[v]
    return 0


def last_uses(problem: RematerialisationProblem, sequence: Sequence[int]) -> tuple[list[int], list[int]]:
    """(position of the last use, value) of each time a value comes to be: the inputs first, then in order.

    A value that nothing reads has its own position as its last use, an input that nothing reads -1.  What is there of
    an output in the end is used behind the last position: nothing may take its place.
    """
    last = [-1] * len(problem.inputs)
    made = list(problem.inputs)
    current = {v: o for o, v in enumerate(problem.inputs)}
    nodes = problem.nodes
    for j, i in enumerate(sequence):
        node = nodes[i]
        for v in node.reads:
            last[current[v]] = j
        for v in node.writes:
            current[v] = len(made)
            made.append(v)
            last.append(j)
    for v in problem.outputs:
        last[current[v]] = len(sequence)
    return last, made


def pruned(problem: RematerialisationProblem, sequence: Sequence[int]) -> list[int]:
    """The sequence without reruns of which nothing reads an output before the next time it is written."""
    return [*_known(problem, sequence, _pruned)]


def _pruned(problem: RematerialisationProblem, sequence: Sequence[int]) -> array:
    wanted = set(problem.outputs)
    kept = []
    first_at: dict[int, int] = {}
    for j, i in enumerate(sequence):
        first_at.setdefault(i, j)
    if len(sequence) >= LONG:
        done = np.zeros(len(sequence), bool)
        done[list(first_at.values())] = True
        if not lifetimes(problem, sequence).unread(done):
            return array("i", sequence)
    for j in range(len(sequence) - 1, -1, -1):
        i = sequence[j]
        node = problem.nodes[i]
        if first_at[i] != j and not any(v in wanted for v in node.writes):
            continue
        kept.append(i)
        wanted.difference_update(node.writes)
        wanted.update(node.reads)
    return array("i", kept[::-1])


def sequence_of(problem: RematerialisationProblem, plan: RecomputePlan) -> list[int]:
    """The order of execution that a plan of this problem stands for."""
    before: dict[int, list[int]] = {}
    for r in plan.reruns:
        before.setdefault(r.before, []).append(r.operator)
    found: list[int] = []
    for i in range(len(problem)):
        found += before.get(i, ())
        found.append(i)
    return found


def plan_of(sequence: Iterable[int], checkpoints: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> RecomputePlan:
    """The plan that an order of execution stands for."""
    done = 0
    reruns = []
    for i in sequence:
        if i == done:
            done += 1
        else:
            reruns.append(Rerun(i, done))
    return RecomputePlan(tuple(reruns), checkpoints, notes)
