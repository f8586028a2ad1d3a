"""The optimal order of a few consecutive operators: a search over the sets of operators that have run.

Reordering operators within a window changes nothing outside of it: the buffers alive at its borders stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..memory.storage import ALIGNMENT
from .graph import Graph, Walk


class Window:
    """The operators `order[first:last]`, numbered by their place in the window; sets of them are bits of a number."""

    def __init__(self, graph: Graph, order: Sequence[int], first: int, last: int, walk: Walk) -> None:
        """`walk` has run `order[:first]`."""
        self.operators = list(order[first:last])
        place = {i: k for k, i in enumerate(self.operators)}
        self.n = len(place)
        self.full = (1 << self.n) - 1
        self.live = walk.live
        self.backward = graph.backward
        self.scratch = [graph.scratch[i] for i in self.operators]
        self.needs = [sum(1 << place[j] for j in graph.follows[i] if j in place) for i in self.operators]
        self.gives = [[place[j] for j in graph.leads[i] if j in place] for i in self.operators]
        #: buffer → (size, alive before the window, alive after it, bits of the operators that touch it)
        self.buffers: dict[int, tuple[int, bool, bool, int]] = {}
        for i in self.operators:
            for b in graph.touches[i]:
                if b not in self.buffers:
                    inside = [place[j] for j in graph.touched_by[b] if j in place]
                    after = walk.left[b] > len(inside)
                    self.buffers[b] = (graph.size[b], walk.seen[b] > 0, after, sum(1 << k for k in inside))
        # buffers that are alive throughout are part of `live` and need no look
        through = {b for b, (_, before, after, _) in self.buffers.items() if before and after}
        self.touches = [[self.buffers[b] for b in graph.touches[i] if b not in through] for i in self.operators]
        self.takes = [
            ([self.buffers[b] for b in graph.takes[i][0] if b not in through], graph.takes[i][1])
            for i in self.operators
        ]
        #: the others that touch an operator's buffers, on which its effect depends; and the effects computed so far
        self.sees = [
            _union(bits for _, _, _, bits in (*t, *p)) for t, (p, _) in zip(self.touches, self.takes, strict=True)
        ]
        self.known: list[dict[int, tuple[int, int]]] = [{} for _ in self.operators]

    @staticmethod
    def of_all(graph: Graph) -> Window:
        """The whole program, in the order given."""
        return Window(graph, range(len(graph)), 0, len(graph), Walk(graph))

    def effect(self, k: int, ran: int) -> tuple[int, int]:
        """(bytes while k runs, bytes after it), both more than before, when the operators `ran` have run."""
        key = ran & self.sees[k]
        result = self.known[k].get(key)
        if result is None:
            result = self.known[k][key] = self._effect(k, ran)
        return result

    def _effect(self, k: int, ran: int) -> tuple[int, int]:
        bit = 1 << k
        up = down = 0
        rest = ~ran
        for size, before, after, bits in self.touches[k]:
            if not before and not bits & ran:
                up += size
            if not after and bits & rest == bit:
                down += size
        during = up + self.scratch[k]
        places, saved = self.takes[k]
        for _, before, after, bits in places:
            if (not before and not bits & ran) if self.backward else (not after and bits & rest == bit):
                during -= saved
                break
        return during, up - down

    def peak(self, order: Sequence[int]) -> int:
        """The most live bytes while the window's operators run in this order."""
        live, ran, peak = self.live, 0, 0
        for k in order:
            during, change = self.effect(k, ran)
            peak = max(peak, live + during)
            live += change
            ran |= 1 << k
        return peak

    def bound(self) -> int:
        """No order has a lower peak: what must be alive while an operator runs, by what is before and after it."""
        before, after = [0] * self.n, [0] * self.n
        for k in range(self.n):
            for j in self.gives[k]:
                before[j] |= before[k] | 1 << k
        for k in reversed(range(self.n)):
            for j in self.gives[k]:
                after[k] |= after[j] | 1 << j
        through = self.live - sum(s for s, b, a, _ in self.buffers.values() if b and not a)
        some = [x for x in self.buffers.values() if not (x[1] and x[2])]
        best = 0
        for k in range(self.n):
            early, late = before[k] | 1 << k, after[k] | 1 << k
            forced = sum(s for s, b, a, bits in some if (b or bits & early) and (a or bits & late))
            best = max(best, through + forced + self.scratch[k] - (self.takes[k][1] if self.takes[k][0] else 0))
        return best

    def fits(self, limit: int, tries: int) -> tuple[list[int] | None, int]:
        """An order whose peak is at most `limit`, or None; and the tries left (0: it gave up, there may be one).

        Depth first.  An operator that leaves no more alive than before and fits now is run at once: whatever order
        follows can only get easier (live bytes are a submodular function of the set that has run).
        """
        first = [k for k in range(self.n) if not self.needs[k]]
        stack = [(0, self.live, first, -1, 0)]
        path: list[int] = []
        states = {0}
        while stack:
            ran, live, ready, k, depth = stack.pop()
            del path[depth:]
            if k >= 0:
                path.append(k)
                depth += 1
            if ran == self.full:
                return path, tries
            if tries <= 0:
                return None, 0
            tries -= len(ready)
            for change, k in reversed(self._choices(ran, live, ready, limit)):
                then = ran | 1 << k
                if then not in states:
                    states.add(then)
                    more = [j for j in self.gives[k] if not self.needs[j] & ~then]
                    stack.append((then, live + change, [j for j in ready if j != k] + more, k, depth))
        return None, tries

    def _choices(self, ran: int, live: int, ready: list[int], limit: int) -> list[tuple[int, int]]:
        """Candidates to run next: (change of live bytes, operator), the best first; one only where it cannot hurt."""
        choices, room = [], limit - live
        for k in ready:
            effect = self.known[k].get(ran & self.sees[k])
            during, change = effect if effect is not None else self.effect(k, ran)
            if during <= room:
                if change <= 0:
                    return [(change, k)]
                choices.append((change, k))
        choices.sort()
        return choices


def _union(sets: Iterable[int]) -> int:
    union = 0
    for bits in sets:
        union |= bits
    return union


def best_order(window: Window, tries: int, gap: int = 0) -> tuple[list[int] | None, bool, int]:
    """(an order of the window with a lower peak or None, whether no order is better, tries left).

    Halves the distance between a bound and the best order so far until it is at most `gap` bytes.
    """
    low, high = window.bound(), window.peak(range(window.n))
    best, sure, limit = None, True, low
    while low < high and high - low > gap and tries > 0:
        share = max(tries // 4, 1)
        order, left = window.fits(limit, share)
        tries -= share - max(left, 0)
        if order is not None:
            best, high = order, window.peak(order)
        else:
            sure = sure and left > 0
            low = limit + ALIGNMENT  # all sizes are multiples of it
        limit = low + (high - low) // (2 * ALIGNMENT) * ALIGNMENT
    return best, sure and low >= high, tries
