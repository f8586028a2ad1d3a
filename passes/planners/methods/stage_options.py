"""Alternative schedules of one stage of a chain: which inner values are kept, and the cost of recomputing others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..core.bound import Cut, hull
from ..core.chain_model import Chain
from ..core.problem import Node, RematerialisationProblem
from ..core.schedules import keep_schedule
from ..core.simulate import last_uses, profile, pruned
from ..core.watch import current
from .local_search import Schedule, Search
from .retention_intervals import improve

#: cuts tried for one stage; moves of local search, and CP-SAT's effort, on all stages that differ together
_CUTS, _MOVES, _EFFORT = 12, 60_000, 2.5
#: CP-SAT's effort for one schedule of a stage, at most
_ENOUGH = 0.3
#: stages of up to so many nodes are solved rather than searched
_SOLVED = 60


@dataclass(frozen=True)
class StageOption:
    """A way through a stage, forward and later backward.

    `kept`: values that stay from the one to the other, `saved` their bytes, what crosses the border not counted.
    `backward`: the nodes of the backward part in order, reruns included; `cost`: of the forward run and the reruns.
    `forward_peak`, `backward_peak`: most bytes of the stage's own values, gradients and scratch meanwhile.
    """

    kept: frozenset[int]
    saved: int
    backward: tuple[int, ...]
    cost: float
    forward_peak: int
    backward_peak: int


@dataclass(frozen=True)
class _Stage:
    """A stage by itself as a problem, and the chain's numbers of its values and nodes."""

    problem: RematerialisationProblem
    values: list[int]
    nodes: list[int]
    border: frozenset[int]

    def key(self) -> tuple:
        """Equal for stages that are alike in costs, sizes and wiring."""
        p = self.problem
        wiring = tuple((n.cost, n.reads, n.writes, n.scratch, n.backward, n.repeatable, n.overwrites) for n in p.nodes)
        return wiring, p.sizes, p.inputs, self.border


def options_of(chain: Chain, most: int = 8) -> list[list[StageOption]]:
    """For every stage up to `most` options that nothing beats; stages that are alike are looked at once."""
    stages = [_stage(chain, k) for k in range(len(chain))]
    different = {s.key(): s for s in stages}
    part = 1 / max(1, 4 * len(different))
    known = {key: _spread(_options(s, part), most) for key, s in different.items()}
    found = []
    for s in stages:
        found.append(
            [
                replace(o, kept=frozenset(s.values[v] for v in o.kept), backward=tuple(s.nodes[i] for i in o.backward))
                for o in known[s.key()]
            ]
        )
    return found


def _options(stage: _Stage, part: float) -> list[StageOption]:
    """Options with a stage's own numbers: what cuts keep, and schedules that need less at the peak.

    `part`: the share of all efforts that one schedule of the stage gets.
    """
    sub = stage.problem
    first = next((i for i, n in enumerate(sub.nodes) if n.backward), len(sub))
    sets = [frozenset(sub.saved)]
    if first < len(sub):
        sets += [line.kept for line in hull(Cut(sub, first), _CUTS)]
    sequences = [keep_schedule(sub, kept | stage.border) for kept in dict.fromkeys(sets)]
    sequences += _searched(sub, sequences, part)
    return [_measured(stage, s, first) for s in sequences]


def _searched(sub: RematerialisationProblem, sequences: list[list[int]], part: float) -> Iterator[list[int]]:
    """Schedules with lower peaks: by constraint programming where the stage is small, else by local search."""
    if len(sub) < 6 or len(sequences) < 2 or current().over:
        return
    peaks = [max(profile(sub, s)) for s in sequences]
    low, start = min(peaks), sequences[peaks.index(min(peaks))]
    least = max((sum(sub.sizes[v] for v in {*n.reads, *n.writes}) + n.scratch for n in sub.nodes), default=0)
    find = _solved if len(sub) <= _SOLVED else _annealed
    lowest = find(sub, start, least, part)
    yield lowest
    floor = max(profile(sub, lowest))
    known: dict[int, tuple[list[int], float]] = {}  # budget → what was found, and the work that it took
    for share in (0.0, 0.33, 0.66):
        current().check()
        budget, begun = floor + int(share * max(0, low - floor)), current().work
        if budget in known:
            current().spend(known[budget][1])
        else:
            known[budget] = find(sub, lowest, budget, part), current().work - begun
        yield known[budget][0]


def _solved(sub: RematerialisationProblem, start: list[int], budget: int, part: float) -> list[int]:
    return improve(sub, budget, start, effort=min(_ENOUGH, part * _EFFORT), copies=3)[0]


def _annealed(sub: RematerialisationProblem, start: list[int], budget: int, part: float) -> list[int]:
    search = Search(Schedule(sub, start), budget)
    search.run(int(part * _MOVES))
    return pruned(sub, search.best if search.best is not None else search.schedule.sequence())


def _measured(stage: _Stage, sequence: Sequence[int], first: int) -> StageOption:
    """An option's figures: from the first node on that is no plain forward run, it is the backward part."""
    sub = stage.problem
    begin = next((j for j, i in enumerate(sequence) if i != j), len(sequence))
    begin = min(begin, first)
    live = profile(sub, sequence)
    last, made = last_uses(sub, sequence)
    count = len(sub.inputs) + sum(len(sub.nodes[i].writes) for i in sequence[:begin])
    kept = [made[o] for o in range(len(sub.inputs), count) if last[o] >= begin and made[o] not in stage.border]
    return StageOption(
        kept=frozenset(kept),
        saved=sum(sub.sizes[v] for v in kept),
        backward=tuple(i for i in sequence[begin:] if sub.nodes[i].backward or sub.nodes[i].repeatable),
        cost=sum(sub.nodes[i].cost for i in sequence if not sub.nodes[i].backward),
        forward_peak=max(live[:begin], default=0),
        backward_peak=max(live[begin:], default=0),
    )


def _spread(options: list[StageOption], most: int) -> list[StageOption]:
    """The options that no other beats in bytes kept, backward peak and cost; at most `most`, with the extremes."""
    chosen: list[StageOption] = []
    for o in sorted(options, key=lambda o: (o.cost, o.saved, o.backward_peak)):
        if not any(c.saved <= o.saved and c.backward_peak <= o.backward_peak for c in chosen):
            chosen.append(o)
    chosen.sort(key=lambda o: (o.saved, o.cost))
    if len(chosen) > most:
        lowest = min(chosen, key=lambda o: (o.backward_peak, o.cost))
        chosen = [chosen[round(j * (len(chosen) - 1) / (most - 1))] for j in range(most)]
        chosen += [] if lowest in chosen else [lowest]
    return chosen


def _stage(chain: Chain, k: int) -> _Stage:
    """The stage by itself: its forward nodes, then its backward ones.

    What comes from outside is there from the start: values of the forward pass without a size (the chain counts
    them), gradients with theirs.  What crosses the border has a size if the backward pass reads it.
    """
    p, border = chain.problem, chain.crossing[k]
    numbers: dict[int, int] = {}
    sizes: list[int] = []
    inputs: list[int] = []
    nodes: list[Node] = []
    members = [*chain.stages[k], *chain.interval(k)]
    for i in members:
        node = p.nodes[i]
        for v in node.reads:
            if v not in numbers:
                gradient = p.producer[v] >= 0 and p.nodes[p.producer[v]].backward
                numbers[v] = len(sizes)
                inputs.append(numbers[v])
                sizes.append(p.sizes[v] if gradient else 0)
        for v in node.writes:
            numbers[v] = len(sizes)
            sizes.append(0 if v in border and not chain.saves(v) else p.sizes[v])
        nodes.append(
            replace(
                node,
                reads=tuple(numbers[v] for v in node.reads),
                writes=tuple(numbers[v] for v in node.writes),
                overwrites=tuple(numbers[v] for v in node.overwrites),
                remade=tuple(numbers[v] for v in node.remade),
            )
        )
    names = tuple(p.values[v] for v in numbers)
    sub = RematerialisationProblem(tuple(nodes), tuple(sizes), names, tuple(inputs), name=f"stage {k}")
    return _Stage(sub, list(numbers), members, frozenset(numbers[v] for v in border if v in numbers))
