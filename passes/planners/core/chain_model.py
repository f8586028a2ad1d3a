"""A model of a chain of stages: their costs and memory, for methods that schedule whole stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from .problem import RematerialisationProblem


@dataclass(frozen=True)
class ChainBytes:
    """Bytes for each stage k of a chain; none counts `fixed` or what is in `always` (see `constant`).

    `border`: what crosses stage k's border; 0 for the last.  `held`: the part of it that the backward pass reads.
    `saved`: what is written in stage k, read by the backward pass and does not cross the border.
    `forward_peak`: most bytes of stage k's own values, and scratch, while it runs again for its border;
    `forward_all_peak`: the same where what the backward reads is made too; `forward_saved_peak`: where it is all.
    `backward_peak`: most bytes while the backward of stage k runs: gradients, scratch, the stage's own saved values
    and what crosses into it as far as they are read.
    `gradients`: bytes that wait right before the backward of stage k begins, while stages may run again.
    `constant`: most bytes of `always`.
    """

    border: tuple[int, ...]
    held: tuple[int, ...]
    saved: tuple[int, ...]
    forward_peak: tuple[int, ...]
    forward_all_peak: tuple[int, ...]
    forward_saved_peak: tuple[int, ...]
    backward_peak: tuple[int, ...]
    gradients: tuple[int, ...]
    constant: int


@dataclass(frozen=True)
class Chain:
    """The forward pass in stages, last to first in the backward pass.

    `stages`: numbers of forward nodes, in order.  `crossing[k]`: values that a node of stage k or an earlier one
    writes and a later stage reads when it runs again; the last stage's is empty.  `always`: values that stages read
    and that no schedule rebuilds: inputs, what may not be rebuilt, and what would cross nearly everywhere.
    `starts[k]`: number of the first backward node for which stage k's values must be there; the backward of stage k
    goes from there up to starts[k - 1] (stage 0: to the end), and reads nothing of stages before k but what crosses.
    """

    problem: RematerialisationProblem
    stages: tuple[tuple[int, ...], ...]
    crossing: tuple[frozenset[int], ...]
    always: frozenset[int]
    starts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def borders(self) -> tuple[int, ...]:
        """Number of the last node of each stage but the last."""
        return tuple(s[-1] for s in self.stages[:-1] if s)

    def interval(self, k: int) -> range:
        """Numbers of the backward nodes of stage k."""
        return range(self.starts[k], self.starts[k - 1] if k else len(self.problem))

    def reruns(self, k: int, keep: bool, border: bool = True) -> tuple[int, ...]:
        """Nodes of stage k that run again for what crosses its border, and with `keep` for what the backward reads."""
        return self._reruns[k][2 * keep + border]

    @cached_property
    def _reruns(self) -> list[tuple[tuple[int, ...], ...]]:
        modes = ((False, False), (False, True), (True, False), (True, True))
        return [tuple(self._ancestors(k, keep, border) for keep, border in modes) for k in range(len(self))]

    def _ancestors(self, k: int, keep: bool, border: bool) -> tuple[int, ...]:
        p, out = self.problem, self.crossing[k]
        wanted = set(out) if border else set()
        found = []
        for i in reversed(self.stages[k]):
            node = p.nodes[i]
            if node.repeatable and any(v in wanted or (keep and v not in out and self.saves(v)) for v in node.writes):
                found.append(i)
                wanted.update(node.reads)
        return tuple(reversed(found))

    def saves(self, v: int) -> bool:
        """Whether the backward pass reads a value."""
        readers = self.problem.readers[v]
        return bool(readers) and self.problem.nodes[readers[-1]].backward

    @cached_property
    def forward_cost(self) -> tuple[float, ...]:
        """Cost of running each stage again for its border."""
        return self._costs(False, True)

    @cached_property
    def forward_all_cost(self) -> tuple[float, ...]:
        """Cost of running each stage again for its border and for what the backward reads."""
        return self._costs(True, True)

    @cached_property
    def forward_saved_cost(self) -> tuple[float, ...]:
        """Cost of running each stage again for what the backward reads only."""
        return self._costs(True, False)

    def _costs(self, keep: bool, border: bool) -> tuple[float, ...]:
        nodes = self.problem.nodes
        return tuple(sum([nodes[i].cost for i in self.reruns(k, keep, border)]) for k in range(len(self)))

    @cached_property
    def backward_cost(self) -> tuple[float, ...]:
        """Cost of each stage's backward nodes."""
        nodes = self.problem.nodes
        return tuple(sum([nodes[i].cost for i in self.interval(k)]) for k in range(len(self)))

    @cached_property
    def bytes(self) -> ChainBytes:
        """Bytes of the stages in memory."""
        return _measured(self)


def _measured(chain: Chain) -> ChainBytes:
    """Measures the stages of a chain, in time linear in the number of nodes."""
    p = chain.problem
    sizes, stages = p.sizes, range(len(chain))
    running, waiting = _backward(chain)
    return ChainBytes(
        border=tuple(sum([sizes[v] for v in c]) for c in chain.crossing),
        held=tuple(sum([sizes[v] for v in c if chain.saves(v)]) for c in chain.crossing),
        saved=tuple(sum([sizes[v] for v in _saved(chain, k)]) for k in stages),
        forward_peak=tuple(_forward_peak(chain, k, False, True) for k in stages),
        forward_all_peak=tuple(_forward_peak(chain, k, True, True) for k in stages),
        forward_saved_peak=tuple(_forward_peak(chain, k, True, False) for k in stages),
        backward_peak=tuple(max([running[i] for i in chain.interval(k)], default=0) for k in stages),
        gradients=tuple(waiting[chain.starts[k]] for k in stages),
        constant=sum([sizes[v] for v in chain.always if p.readers[v]]),
    )


def _saved(chain: Chain, k: int) -> list[int]:
    """Values of stage k that the backward pass reads and that do not cross its border."""
    p, out = chain.problem, chain.crossing[k]
    return [
        v
        for i in chain.stages[k]
        for v in p.nodes[i].writes
        if v not in out and v not in chain.always and chain.saves(v)
    ]


def _forward_peak(chain: Chain, k: int, keep: bool, border: bool) -> int:
    """Most bytes of a stage's own values and scratch while it runs again; what is wanted stays to its end."""
    p = chain.problem
    run = chain.reruns(k, keep, border)
    last = {v: j for j, i in enumerate(run) for v in p.nodes[i].reads}
    stays = set(chain.crossing[k]) if border else set()
    if keep:
        stays.update(_saved(chain, k))
    own: set[int] = set()
    live = peak = 0
    for j, i in enumerate(run):
        node = p.nodes[i]
        own.update(node.writes)
        live += sum([p.sizes[v] for v in node.writes])
        dying = {v for v in node.reads if v in own and last[v] == j and v not in stays}
        peak = max(peak, live + node.scratch - _reused(chain, i, dying))
        dying.update(v for v in node.writes if v not in last and v not in stays)
        live -= sum([p.sizes[v] for v in dying])
    return peak


def _reused(chain: Chain, i: int, dying: Collection[int]) -> int:
    """Bytes that a node needs less because its output takes a dying input's place."""
    node, sizes = chain.problem.nodes[i], chain.problem.sizes
    for v in node.overwrites:
        if v in dying and any(sizes[w] == sizes[v] for w in node.writes):
            return sizes[v]
    return 0


def _backward(chain: Chain) -> tuple[list[int], list[int]]:
    """(bytes while each node runs, bytes right before it) of what backward nodes write, and of what they read of the
    forward pass from the moment on at which its stage must be there."""
    p = chain.problem
    n = len(p)
    change = [0] * (n + 1)
    last = [r[-1] if r else i for r, i in zip(p.readers, p.producer, strict=True)]
    for v in p.outputs:
        last[v] = n - 1
    for i, node in enumerate(p.nodes):
        if node.backward:
            for v in node.writes:
                change[i] += p.sizes[v]
                change[last[v] + 1] -= p.sizes[v]
    for v, start in _homes(chain).items():
        if start <= last[v]:
            change[start] += p.sizes[v]
            change[last[v] + 1] -= p.sizes[v]
    live = list(accumulate(change))
    running = [
        live[i] + x.scratch - _reused(chain, i, [v for v in x.overwrites if last[v] == i])
        for i, x in enumerate(p.nodes)
    ]
    return running, _waiting(chain, live)


def _waiting(chain: Chain, live: Sequence[int]) -> list[int]:
    """Bytes alive on both sides of the moment right before each node."""
    p = chain.problem
    new = [sum([p.sizes[v] for v in x.writes]) if x.backward else 0 for x in p.nodes]
    born = [*new, 0]
    for v, start in _homes(chain).items():
        if start <= p.readers[v][-1]:
            born[start] += p.sizes[v]
    return [live[i] - born[i] for i in range(len(p) + 1)]


def _homes(chain: Chain) -> dict[int, int]:
    """For each value of the forward pass that the backward reads and that may be rebuilt: number of the node from
    which on its stage must be there."""
    p = chain.problem
    stage = {i: k for k, s in enumerate(chain.stages) for i in s}
    found = {}
    for k, nodes in enumerate(chain.stages):
        for i in nodes:
            for v in p.nodes[i].writes:
                if v not in chain.always and chain.saves(v):
                    read = [r for r in p.readers[v] if not p.nodes[r].backward and p.nodes[r].repeatable]
                    found[v] = chain.starts[stage[read[-1]] if read else k]
    return found
