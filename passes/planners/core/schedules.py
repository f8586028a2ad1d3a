"""Schedules from sets of kept values, for planners that choose values rather than sequences."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...recomputation.recompute import RecomputePlan
from .problem import RematerialisationProblem
from .simulate import plan_of, pruned


def keep_schedule(problem: RematerialisationProblem, kept: Collection[int]) -> list[int]:
    """The order of execution in which `kept` values (numbers) stay and the backward pass rebuilds all others.

    A value that was dropped is rebuilt right before the first backward node that reads it, together with just those
    nodes that it depends on, from kept values; from then on it stays until its last use.  Inputs, what the
    backward pass makes, and values that may not be rebuilt are kept in any case.
    """
    nodes, producer = problem.nodes, problem.producer
    kept = set(kept)
    there = bytearray(len(problem.sizes))
    for v, p in enumerate(producer):
        there[v] = p < 0 or nodes[p].backward or not nodes[p].repeatable or v in kept
    sequence: list[int] = []
    for i, node in enumerate(nodes):
        if node.backward:
            for v in node.reads:
                if not there[v]:
                    sequence += rebuild(problem, v, there)
        sequence.append(i)
    return sequence


def kept_plan(problem: RematerialisationProblem, kept: Collection[int]) -> RecomputePlan:
    """The plan of `keep_schedule`; of `kept`, its checkpoints are what is read again as the forward pass made it."""
    sequence = pruned(problem, keep_schedule(problem, kept))
    values = sorted(read_as_kept(problem, sequence).intersection(kept), key=lambda v: (problem.producer[v], v))
    return plan_of(sequence, checkpoints=tuple(problem.values[v] for v in values))


def read_as_kept(problem: RematerialisationProblem, sequence: Sequence[int]) -> set[int]:
    """Values that are read after the forward pass of a sequence as it made them: what the sequence keeps."""
    made_again: set[int] = set()
    needed: set[int] = set()
    done, backward = 0, False
    for i in sequence:
        node = problem.nodes[i]
        again = i < done
        done += not again
        backward |= node.backward or again
        if backward:
            needed.update(v for v in node.reads if v not in made_again)
        if again:
            made_again.update(node.writes)
    return needed


def rebuild(problem: RematerialisationProblem, value: int, there: bytearray) -> list[int]:
    """Nodes, in order of execution, that must run again for `value`; marks what they write as `there`."""
    nodes, producer = problem.nodes, problem.producer
    wanted = {producer[value]}
    stack = [producer[value]]
    while stack:
        for v in nodes[stack.pop()].reads:
            p = producer[v]
            if not there[v] and p not in wanted:
                wanted.add(p)
                stack.append(p)
    for p in wanted:
        for v in nodes[p].writes:
            there[v] = 1
    return sorted(wanted)


def crossing(problem: RematerialisationProblem, borders: Collection[int]) -> set[int]:
    """Values that are read by a forward node beyond one of `borders` (node numbers; a border lies after its node)."""
    marks = sorted(borders)
    segment = [0] * len(problem)
    k = 0
    for i in range(len(problem)):
        while k < len(marks) and marks[k] < i:
            k += 1
        segment[i] = k
    found = set()
    for v, p in enumerate(problem.producer):
        if p >= 0 and not problem.nodes[p].backward:
            for r in problem.readers[v]:
                if not problem.nodes[r].backward and segment[r] != segment[p]:
                    found.add(v)
                    break
    return found


def after(problem: RematerialisationProblem, border: int) -> set[int]:
    """Values of the forward pass that are written after node number `border`."""
    return {v for i in problem.forward if i > border for v in problem.nodes[i].writes}
