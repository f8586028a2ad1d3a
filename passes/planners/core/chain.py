"""A step as a chain of stages: cuts of the forward pass, and schedules of whole stages."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

from .chain_model import Chain
from .problem import RematerialisationProblem
from .simulate import pruned

#: ('forward', stage, whether what the backward pass reads inside the stage is made too) or ('backward', stage, True)
Action = tuple[str, int, bool]

#: a value that crosses this share of the forward pass (and this many nodes) is kept rather than rebuilt, as long as
#: such values are not more than this share of all bytes
_LONG_SHARE, _LONG_NODES, _LONG_BYTES = 0.4, 12, 0.25
#: so is one this much smaller than a typical value that crosses a border
_SMALL = 64
#: borders may let so many values cross before they are taken to be where the fewest bytes cross
_WIDEST = 4


def cut_at(chain: Chain, borders: Iterable[int]) -> Chain:
    """The chain that is cut after these nodes only (some of its borders, or others)."""
    return _chain_at(chain.problem, sorted(set(borders)), chain.always)


def merged(chain: Chain, most: int) -> Chain:
    """A chain of at most about so many stages, of similar cost, cut where the fewest bytes cross nearby."""
    if len(chain) <= most:
        return chain
    reached = list(accumulate(a + b for a, b in zip(chain.forward_all_cost, chain.backward_cost, strict=True)))
    share = (reached[-1] or 1.0) / most
    best: dict[int, int] = {}
    for k in range(len(chain) - 1):
        part = int(reached[k] / share)
        if part not in best or chain.bytes.border[k] <= chain.bytes.border[best[part]]:
            best[part] = k
    return cut_at(chain, (chain.stages[k][-1] for k in best.values()))


def cut_further(chain: Chain, parts: int = 24) -> Chain:
    """The chain with stages that hold more than 1/parts of all bytes cut where fewer bytes cross than nearby.

    Blocks whose values are read by all later layers (DenseNet) have no narrow borders; schedules of whole blocks need
    far more memory than ones that keep many values at a border inside.
    """
    b, p = chain.bytes, chain.problem
    spans = {v: s for v, s in _spans(p).items() if v not in chain.always}
    total = dict(zip(p.forward, _sums(spans, len(p.forward), lambda v: p.sizes[v]), strict=True))
    most = max(1, (sum(b.saved) + sum(b.border)) // parts)
    cuts = list(chain.borders)
    for stage, saved in zip(chain.stages, b.saved, strict=True):
        n = min(saved // most * 2, len(stage) // 4)
        bounds = [len(stage) * i // n for i in range(n + 1)] if n > 1 else []
        cuts += [min(stage[x:y], key=lambda i: (total[i], -i)) for x, y in pairwise(bounds)]
    return cut_at(chain, cuts) if len(cuts) >= len(chain) else chain


def chain_of(problem: RematerialisationProblem, width: int | None = None) -> Chain:
    """Cuts the forward pass where at most `width` values cross.

    None: the smallest width that gives a fair number of cuts, and where none up to 4 does, cuts where fewer bytes
    cross than anywhere near.  About linear in the number of nodes.
    """
    spans = _spans(problem)
    always = _kept_anyway(problem, spans)
    spans = {v: s for v, s in spans.items() if v not in always}
    forward = problem.forward
    # after a node that may not run again (an update of running statistics) the same values cross as before it
    places = [k for k, i in enumerate(forward[:-1]) if problem.nodes[i].repeatable]
    count = _sums(spans, len(forward), lambda v: 1)
    enough = max(3.0, 0.5 * len(places) ** 0.5)
    for w in range(1, _WIDEST + 1) if width is None else (width,):
        cuts = [k for k in places if count[k] <= w]
        if width is not None or len(cuts) >= enough:
            return _chain_at(problem, [forward[k] for k in cuts], always)
    total = _sums(spans, len(forward), lambda v: problem.sizes[v])
    hollows = _hollows([total[k] for k in places])
    return _chain_at(problem, [forward[places[h]] for h in hollows], always)


def emit(chain: Chain, schedule: Iterable[Action]) -> list[int]:
    """The order of execution of a schedule of whole stages.

    The first 'forward' of a stage runs all of it, later ones run just those nodes again that its border, or with
    `keep` the backward pass, needs; they come right before the backward node that is next.  'backward' of a stage
    runs its interval.  What stays in memory follows from what is read later.  Where the backward of a stage follows
    at once, what crosses its border is not made again.
    """
    sequence: list[int] = []
    done = 0
    schedule = list(schedule)
    for (kind, k, keep), (following, _, _) in zip(schedule, [*schedule[1:], ("backward", 0, True)], strict=True):
        if kind == "backward":
            end = chain.interval(k).stop
        else:
            end = chain.stages[k][-1] + 1 if chain.stages[k] else done
            if end <= done:
                sequence += chain.reruns(k, keep, not keep or following == "forward")
        sequence += range(done, end)
        done = max(done, end)
    sequence += range(done, len(chain.problem))
    return pruned(chain.problem, sequence)


def _spans(problem: RematerialisationProblem) -> dict[int, tuple[int, int]]:
    """For each value that may be rebuilt: places, in the forward pass, of its writer and of its last reader.

    Readers that may not run again do not count: they have run when anything is rebuilt.
    """
    nodes = problem.nodes
    place = {i: k for k, i in enumerate(problem.forward)}
    found = {}
    for k, i in enumerate(problem.forward):
        if nodes[i].repeatable:
            for v in nodes[i].writes:
                last = [r for r in problem.readers[v] if not nodes[r].backward and nodes[r].repeatable]
                found[v] = (k, place[last[-1]] if last else k)
    return found


def _kept_anyway(problem: RematerialisationProblem, spans: dict[int, tuple[int, int]]) -> frozenset[int]:
    """Inputs, values that may not be rebuilt, and those that cross nearly everywhere or are too small to mind."""
    nodes, sizes = problem.nodes, problem.sizes
    kept = set(problem.inputs)
    kept.update(v for i in problem.forward if not nodes[i].repeatable for v in nodes[i].writes)
    read = [sizes[v] for v, (a, b) in spans.items() if b > a]
    small = statistics.median_low(read) // _SMALL if read else 0
    least = max(_LONG_SHARE * sum(nodes[i].repeatable for i in problem.forward), _LONG_NODES)
    long = [v for v, (a, b) in spans.items() if b - a >= least]
    if sum([sizes[v] for v in long]) <= _LONG_BYTES * sum(read):
        kept.update(long)
    kept.update(v for v, (a, b) in spans.items() if b - a > 1 and sizes[v] <= small)
    return frozenset(kept)


def _sums(spans: dict[int, tuple[int, int]], n: int, weight: Callable[[int], int]) -> list[int]:
    """Sum of the weights of what crosses after each place of the forward pass."""
    change = [0] * (n + 1)
    for v, (a, b) in spans.items():
        change[a] += weight(v)
        change[b] -= weight(v)
    return list(accumulate(change[:n]))


def _hollows(total: Sequence[int]) -> list[int]:
    """Places with the least sum in each part of about √n places."""
    part = max(2, round(len(total) ** 0.5))
    return [min(range(a, min(a + part, len(total))), key=lambda i: (total[i], -i)) for a in range(0, len(total), part)]


def _chain_at(problem: RematerialisationProblem, borders: Sequence[int], always: frozenset[int]) -> Chain:
    """The chain cut after these nodes: borders that bring nothing are left out, stages whose backward is not in
    reverse order are merged."""
    spans = {v: s for v, s in _spans(problem).items() if v not in always}
    forward = problem.forward
    place = {i: k for k, i in enumerate(forward)}
    cuts = [place[i] for i in borders if i in place and place[i] < len(forward) - 1]
    crossing = _crossing(problem, spans, cuts)
    keep = [j for j in range(len(cuts)) if j + 1 == len(cuts) or crossing[j] != crossing[j + 1]]
    cuts, crossing = [cuts[j] for j in keep], [crossing[j] for j in keep]
    needed = _needed(problem, spans, cuts)
    keep, starts = _in_reverse(needed, problem)
    ends = [cuts[j] for j in keep] + [len(forward) - 1]
    stages = [tuple(forward[a + 1 : b + 1]) for a, b in zip([-1, *ends], ends, strict=False)]
    return Chain(
        problem=problem,
        stages=tuple(stages),
        crossing=(*(crossing[j] for j in keep), frozenset()),
        always=always,
        starts=starts,
    )


def _crossing(
    problem: RematerialisationProblem, spans: dict[int, tuple[int, int]], cuts: Sequence[int]
) -> list[frozenset[int]]:
    """The values that cross each cut (places in the forward pass)."""
    found = []
    alive: dict[int, None] = {}
    ends: dict[int, list[int]] = {}
    wanted = set(cuts)
    for k, i in enumerate(problem.forward):
        for v in problem.nodes[i].writes:
            if v in spans and spans[v][1] > k:
                alive[v] = None
                ends.setdefault(spans[v][1], []).append(v)
        for v in ends.pop(k, ()):
            del alive[v]
        if k in wanted:
            found.append(frozenset(alive))
    return found


def _needed(problem: RematerialisationProblem, spans: dict[int, tuple[int, int]], cuts: Sequence[int]) -> list[int]:
    """For each stage: number of the first backward node that reads a value which is there with the stage.

    That is one which is written in it and does not cross its border, or one which the forward pass reads last in it.
    """
    nodes, n = problem.nodes, len(problem)
    stage: list[int] = []
    for k in range(len(problem.forward)):
        stage.append(stage[-1] + (stage[-1] < len(cuts) and cuts[stage[-1]] < k) if stage else 0)
    first = [n] * (len(cuts) + 1)
    for v, (_, b) in spans.items():
        backward = next((r for r in problem.readers[v] if nodes[r].backward), n)
        first[stage[b]] = min(first[stage[b]], backward)
    return first


def _in_reverse(needed: Sequence[int], problem: RematerialisationProblem) -> tuple[list[int], tuple[int, ...]]:
    """(borders to keep, starts): merges stages until each one's backward starts no later than the one's before it."""
    keep: list[int] = []
    starts: list[int] = []
    n = len(problem)
    for k, start in enumerate(needed):
        # a stage from which nothing is read has no backward of its own: its interval is empty
        start = starts[-1] if starts and start == n else start
        while starts and start > starts[-1]:
            start = min(start, starts.pop())
            if keep:
                keep.pop()
        starts.append(start)
        if k < len(needed) - 1:
            keep.append(k)
    starts[-1] = min(starts[-1], next((i for i, x in enumerate(problem.nodes) if x.backward), n))
    return keep, tuple(starts)
