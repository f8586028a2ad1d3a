"""Random problems for tests of planners, and the best of all their schedules, found by brute force."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import replace

from recompute.passes.planners import Node, RematerialisationProblem


def random_problem(
    seed: int,
    forward: int = 12,
    *,
    sizes: tuple[int, ...] = (0, 1, 2, 2, 3, 5, 9, 40),
    shared: bool = False,
    scale: int = 1,
) -> RematerialisationProblem:
    """A step with all that a problem may have.

    Skips, several outputs, shared inputs, overwriting, scratch, nodes that are free or may not run again, values of no
    size or that nobody reads, outputs of every kind, inputs that die, forward nodes between the backward ones.
    """
    draw = random.Random(seed)
    width: list[int] = []
    nodes: list[Node] = []

    def value() -> int:
        width.append(draw.choice(sizes) * scale)
        return len(width) - 1

    inputs = tuple(value() for _ in range(draw.randint(1, 2)))
    made = list(inputs)

    def node(reads: set[int], backward: bool, repeatable: bool) -> int:
        writes = tuple(value() for _ in range(draw.choice((1, 1, 1, 2))))
        if reads and draw.random() < 0.4:  # outputs of the same size can take an input's place
            width[writes[0]] = width[min(reads)]
        over = tuple(v for v in sorted(reads) if draw.random() < 0.5 and any(width[v] == width[w] for w in writes))
        scratch = draw.choice((0, 0, 0, 4)) * scale
        cost = draw.choice((0.0, 1.0, 1.0, 2.0, 5.0, 0.5))
        name = f"n{len(nodes)}"
        nodes.append(Node(name, cost, tuple(sorted(reads)), writes, scratch, backward, repeatable, over))
        made.extend(writes)
        return writes[0]

    outs: list[int] = []
    for _ in range(forward):
        near = made[-4:]
        reads = {draw.choice(near) for _ in range(draw.choice((1, 1, 2)))}
        reads.update(draw.sample(made, 1) if draw.random() < 0.2 else ())
        outs.append(node(reads, False, draw.random() > 0.12))
    gradient = node({outs[-1]}, True, False)
    for i in reversed(range(forward)):
        if draw.random() < 0.15:
            continue
        reads = {gradient, *(v for v in (*nodes[i].reads, *nodes[i].writes) if draw.random() < 0.6)}
        gradient = node(reads, True, draw.random() < 0.05)
        if draw.random() < 0.06:  # a forward node that comes late
            node({draw.choice(made)}, False, True)
    outputs = {gradient} if draw.random() < 0.7 else set()
    outputs.update(v for v in made if draw.random() < 0.04)
    return RematerialisationProblem(
        tuple(nodes),
        tuple(width),
        tuple(f"v{v}" for v in range(len(width))),
        inputs,
        tuple(sorted(outputs)),
        fixed=draw.choice((0, 100)) * scale,
        name=f"random_{seed}",
        shared=tuple(v for v in made if shared and draw.random() < 0.15),
    )


def tiny_problem(seed: int, *, shared: bool = False) -> RematerialisationProblem:
    """A few nodes that all may read from each other, in ways that no training step has."""
    draw = random.Random(seed)
    n = draw.randint(2, 7)
    sizes = [draw.randint(0, 6) for _ in range(draw.randint(0, 2))]
    inputs = tuple(range(len(sizes)))
    nodes: list[Node] = []
    begin = draw.randint(0, n)
    for i in range(n):
        reads = tuple(sorted(draw.sample(range(len(sizes)), min(len(sizes), draw.choice((1, 1, 2, 2, 3))))))
        size = draw.choice(sizes) if sizes and draw.random() < 0.5 else draw.choice((0, 1, 2, 3, 8, 30))
        writes = tuple(range(len(sizes), len(sizes) + draw.choice((1, 1, 1, 2))))
        sizes += [size, draw.randint(0, 6)][: len(writes)]
        over = tuple(v for v in reads if any(sizes[v] == sizes[w] for w in writes) and draw.random() < 0.7)
        backward = i >= begin and draw.random() < 0.9
        again = draw.random() < (0.1 if backward else 0.8)
        cost = draw.choice((0.0, 1.0, 2.0, 3.0, 7.0))
        nodes.append(Node(f"n{i}", cost, reads, writes, draw.choice((0, 0, 3)), backward, again, over))
    outputs = tuple(v for v in range(len(sizes)) if draw.random() < 0.12)
    part = tuple(v for v in range(len(sizes)) if shared and draw.random() < 0.2)
    names = tuple(f"v{v}" for v in range(len(sizes)))
    return RematerialisationProblem(
        tuple(nodes), tuple(sizes), names, inputs, outputs, fixed=draw.choice((0, 7)), shared=part
    )


class BruteForce:
    """All schedules of a problem: any topological order, any number of repeats (shortest paths over states).

    A state is what ran once and what is alive, as bits.  Values in `shared` take no bytes, as if all lay in places
    that others hold anyway.  Of several values that may be overwritten the best one is.
    """

    def __init__(self, problem: RematerialisationProblem, *, ordered: bool = False) -> None:
        self.problem, self.ordered = problem, ordered
        self.bytes = [0 if v in problem.shared else s for v, s in enumerate(problem.sizes)]
        self.reads = [_bits(n.reads) for n in problem.nodes]
        self.writes = [_bits(n.writes) for n in problem.nodes]
        self.preds = [_bits(p) for p in problem.preds]
        self.lends = [
            [(v, self._saves(v, n)) for v in n.overwrites if v not in problem.outputs and self._saves(v, n)]
            for n in problem.nodes
        ]
        self.known: dict[int, int] = {}

    def _saves(self, v: int, node: Node) -> int:
        """Bytes that an output need not take anew because it has v's place."""
        sizes = self.problem.sizes
        return max((self.bytes[w] for w in node.writes if sizes[w] == sizes[v]), default=0)

    def size(self, alive: int) -> int:
        if alive not in self.known:
            self.known[alive] = sum(s for v, s in enumerate(self.bytes) if alive >> v & 1)
        return self.known[alive]

    def runs(self, done: int, alive: int) -> list[tuple[int, float, int, int]]:
        """(bytes, cost, done, alive) after each node that may run now."""
        found = []
        for i, node in enumerate(self.problem.nodes):
            first = not done >> i & 1
            if alive & self.reads[i] != self.reads[i] or not (first or node.repeatable):
                continue
            if first and self.ordered and done != (1 << i) - 1:
                continue
            after = alive & ~self.writes[i] | self.writes[i]
            running = self.size(after) + node.scratch + self.problem.fixed
            found.append((running, node.cost, done | 1 << i, after))
            for v, saved in self.lends[i]:
                found.append((running - saved, node.cost, done | 1 << i, after & ~(1 << v)))
        return found

    def _search(self, budget: float, by_peak: bool) -> float:
        everything, outputs = (1 << len(self.problem)) - 1, _bits(self.problem.outputs)
        start = (0, _bits(self.problem.inputs))
        queue = [(0.0, *start)]
        seen: set[tuple[int, int]] = set()
        while queue:
            so_far, done, alive = heapq.heappop(queue)
            if (done, alive) in seen:
                continue
            seen.add((done, alive))
            if done == everything and alive & outputs == outputs:
                return so_far
            left = alive
            while left:
                bit = left & -left
                left ^= bit
                if (done, alive ^ bit) not in seen:
                    heapq.heappush(queue, (so_far, done, alive ^ bit))
            for running, cost, new, after in self.runs(done, alive):
                if running <= budget and (new, after) not in seen:
                    heapq.heappush(queue, (max(so_far, running) if by_peak else so_far + cost, new, after))
        return math.inf

    def cost(self, budget: int) -> float:
        """The least cost within a budget; infinite where no schedule fits."""
        return self._search(budget, by_peak=False)

    def least_peak(self) -> float:
        """The smallest budget that holds a schedule."""
        return self._search(math.inf, by_peak=True)


def _bits(values: tuple[int, ...] | list[int]) -> int:
    return sum({1 << v for v in values})


def reordered(problem: RematerialisationProblem, seed: int) -> RematerialisationProblem:
    """The same problem with its nodes in another topological order."""
    draw, left, order = random.Random(seed), set(range(len(problem))), []
    while left:
        ready = sorted(i for i in left if not left.intersection(problem.preds[i]))
        order.append(draw.choice(ready))
        left.discard(order[-1])
    return replace(problem, nodes=tuple(problem.nodes[i] for i in order))


Moving = tuple[int, int, int, tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]


class MovingBruteForce(BruteForce):
    """All schedules of a problem with copies to the host and back (shortest paths in time over states).

    A state is what ran once, what is alive, what the host has, and the copies under way in each queue: (value, seconds
    to its end).  A copy begins when it is asked for and the one before it in its queue is done.
    """

    def __init__(self, problem: RematerialisationProblem, out: dict[int, float], back: dict[int, float]) -> None:
        """`out`, `back`: seconds of the copies of each value that may move."""
        super().__init__(problem)
        self.out, self.back = out, back

    def _after(self, seconds: float, state: Moving) -> Moving:
        """The state when time has passed: what is done by then needs no wait."""
        done, alive, host, *queues = state
        host |= _bits([v for v, end in queues[0] if end <= seconds])
        leaving, coming = (tuple((v, end - seconds) for v, end in q if end > seconds) for q in queues)
        return done, alive, host, leaving, coming

    def _next(self, budget: float, state: Moving) -> Iterator[tuple[float, Moving]]:
        """(seconds, state) after each thing that may be done."""
        done, alive, host, leaving, coming = state
        held, arriving = _bits([v for v, _ in leaving]), _bits([v for v, _ in coming])
        for v in range(len(self.bytes)):
            if alive & ~held & ~arriving & 1 << v:
                yield 0.0, (done, alive ^ 1 << v, host, leaving, coming)
        for v in self.out:
            if alive & ~arriving & ~held & ~host & 1 << v:
                begin = leaving[-1][1] if leaving else 0.0
                yield 0.0, self._after(0.0, (done, alive, host, (*leaving, (v, begin + self.out[v])), coming))
            if host & ~alive & 1 << v:
                begin = coming[-1][1] if coming else 0.0
                yield 0.0, self._after(0.0, (done, alive | 1 << v, host, leaving, (*coming, (v, begin + self.back[v]))))
        for queue in (leaving, coming):
            if queue:
                yield queue[0][1], self._after(queue[0][1], state)
        for running, cost, new, after in self.runs(done, alive & ~arriving):
            if running + self.size(arriving) <= budget and not (alive & ~after & held) and not after & arriving:
                yield cost, self._after(cost, (new, after | arriving, host, leaving, coming))

    def faster(self, budget: int, seconds: float) -> float | None:
        """The time of the fastest schedule within a budget that takes less than so many seconds; None if none does."""
        everything, outputs = (1 << len(self.problem)) - 1, _bits(self.problem.outputs)
        start: Moving = (0, _bits(self.problem.inputs), 0, (), ())
        costs = [n.cost for n in self.problem.nodes]
        left = [sum(c for i, c in enumerate(costs) if not done >> i & 1) for done in range(everything + 1)]
        queue, best = [(left[0], 0.0, start)], {start: 0.0}
        while queue:
            _, now, state = heapq.heappop(queue)
            now = -now
            if best[state] < now:
                continue
            if state[0] == everything and state[1] & ~_bits([v for v, _ in state[4]]) & outputs == outputs:
                return now
            for spent, after in self._next(budget, state):
                then = now + spent
                if then + left[after[0]] < seconds and then < best.get(after, math.inf):
                    best[after] = then
                    heapq.heappush(queue, (then + left[after[0]], -then, after))
        return None


def small_step(seed: int, forward: int = 3, unit: int = 64) -> RematerialisationProblem:
    """A step of few nodes whose gradients are small, so that what the forward pass has made decides what fits."""
    draw = random.Random(seed)
    sizes = [draw.randint(0, 2)]
    nodes: list[Node] = []

    def node(reads: set[int], size: int, backward: bool, again: bool) -> int:
        cost = draw.choice((0.0, 1.0, 2.0, 3.0, 0.5))
        scratch = draw.choice((0, 0, 0, unit))
        sizes.append(size)
        written = (len(sizes) - 1,)
        nodes.append(Node(f"n{len(nodes)}", cost, tuple(sorted(reads)), written, scratch, backward, again))
        return len(sizes) - 1

    for _ in range(forward):
        reads = {len(sizes) - 1, draw.randrange(len(sizes))} if draw.random() < 0.4 else {len(sizes) - 1}
        node(reads, draw.choice((1, 2, 3, 4, 6)), False, draw.random() < 0.7)
    gradient = node({forward}, draw.randint(0, 1), True, False)
    for i in reversed(range(forward)):
        if draw.random() < 0.5:  # a weight's gradient, which may wait
            node({gradient, i}, 0, True, False)
        gradient = node({gradient, *(v for v in (i, i + 1) if draw.random() < 0.6)}, draw.randint(0, 1), True, False)
    names = tuple(f"v{v}" for v in range(len(sizes)))
    return RematerialisationProblem(tuple(nodes), tuple(s * unit for s in sizes), names, (0,), (gradient,))
