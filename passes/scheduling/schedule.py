"""Reordering of independent operators to lower the peak; no operator is added."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import ClassVar

from ...errors import UsageError
from ...language.ir import Block, Free
from ..base import Pass, run_passes
from ..memory.liveness import Liveness
from ..memory.memory_plan import MemoryPlan, memory_report
from ..memory.storage import unfreed_storages
from .graph import Graph, Walk, aligned, graph_of
from .window import Window, best_order

#: operators that are moved up together, at most
_GROUP = 5
#: buffers and followers of an operator that joins a group, at most: trying it takes as long as it has
_WIDE = 256
#: readers of one buffer that are looked at, at most, when a cluster grows
_FAN = 12
#: operators that are looked at, about, while a limit is sought; where there are more, they are looked at once
_LOOKS = 300_000
#: moments of an order of which it is asked what must be alive, at most; and of how many these are chosen, for each
_MOMENTS, _NEAREST = 4, 64
#: sets of operators that the search of one window may look at
_TRIES = 40_000


class Schedule(Pass):
    """Reorder independent operators so that fewer bytes are alive at the peak; never worse than the given order.

    `window`: how many operators around the peak are ordered together.  `exact`: programs of up to this many operators
    get an optimal order.  `tries`: how many sets of operators the searches may examine.
    """

    window: int = 128
    exact: int = 16
    tries: int = 400_000

    def run(self, block: Block) -> Block:
        """The block itself where no better order was found."""
        return self.reorder(block, live_peak)

    def reorder(self, block: Block, measure: Callable[[Block], int]) -> Block:
        """The block in the best order found, by a measure of blocks without frees (the smaller the better)."""
        if any(isinstance(op.op, Free) for op in block.operators):
            raise UsageError("'schedule' comes before 'liveness': it moves operators, and frees must follow")
        orders = [] if _is_chain(block) else self.orders(graph_of(block))
        if len(block.operators) > _LOOKS and orders:  # what the graph tells will do
            return block.with_operators([block.operators[i] for i in orders[0]], addresses={})
        least = measure(block) if orders else 0
        for order in orders:
            candidate = block.with_operators([block.operators[i] for i in order], addresses={})
            if measure(candidate) < least:
                return candidate
        return block

    def orders(self, graph: Graph) -> list[list[int]]:
        """Orders with a lower peak than the one given, as far as the graph tells; the best first."""
        n = len(graph)
        given = list(range(n))
        if n <= self.exact:
            order, _, _ = best_order(Window.of_all(graph), 1 << 60)
            return [] if order is None else [order]
        profile = graph.profile(given)
        peak = max(profile, default=0)
        least = graph.bound(_moments(profile))
        if least >= peak:
            return []
        if n > _LOOKS:  # one look is what there is time for
            found = [fit(graph, given, peak) or given]
        else:
            squeezed = squeeze(graph, settle(graph, given, peak), least)
            refined = refine(graph, squeezed, self.window, self.tries)
            found = [squeezed] if refined == squeezed else [refined, squeezed]
        peaks = [(max(graph.profile(order)), order) for order in found]
        return [order for p, order in peaks if p < peak]


class InBestOrder(Pass):
    """Run `schedule`, then the passes `then`; keep the given order if its arena is smaller.

    The order is chosen by live bytes, but the size of the arena decides: if the packer leaves holes, the given order is
    planned as well.
    """

    verifies: ClassVar[bool] = True
    then: tuple[Pass, ...] = (Liveness(), MemoryPlan())

    def run(self, block: Block) -> Block:
        return self.plan(block, run_passes(block, [Schedule()]))

    def plan(self, block: Block, ordered: Block) -> Block:
        """The planned block in the given best order, or in its own order if that arena is smaller."""
        planned = run_passes(ordered, self.then)
        if ordered is not block and memory_report(planned).arena > live_peak(block):
            planned = min(run_passes(block, self.then), planned, key=lambda b: memory_report(b).arena)
        return planned

    def __str__(self) -> str:
        return f"{self.name}{{schedule,{','.join(map(str, self.then))}}}"


def in_order_of(others: Iterable[Block], block: Block) -> Block | None:
    """A block in the order of the first that has the same operators, at other sizes; None where none has.

    The same are operators of one kind that read and write values of the same names.  Tables, which depend on sizes, may
    have other names.
    """
    left = {key: op for op, key in zip(block.operators, _keys(block), strict=True)}
    for other in others:
        wanted = _keys(other)
        if len(left) == len(block.operators) == len(wanted) and left.keys() == set(wanted):
            return block.with_operators([left[key] for key in wanted], addresses={})
    return None


def _keys(block: Block) -> list[tuple[str, ...]]:
    """The kind of each operator but frees, and what it writes and reads besides tables."""
    tables = {v.name for v in block.buffers}.union(c.value.name for c in block.constants)
    found = []
    for op in block.operators:
        if not isinstance(op.op, Free):
            reads = ("" if v is None or v.name in tables else v.name for v in op.inputs)
            found.append((op.op.name, *(v.name for v in op.writes()), *reads))
    return found


def _is_chain(block: Block) -> bool:
    """Whether each operator reads what the one before it writes: there is one order then."""
    before: set[str] | None = None
    for op in block.operators:
        if before is not None and not any(v.name in before for v in op.reads()):
            return False
        before = {v.name for v in op.writes()}
    return True


def live_peak(block: Block) -> int:
    """The most bytes alive at once in a block without frees, as the memory plan will count them."""
    if "live peak" not in block.facts:
        joins = any(op.joins() for op in block.operators)
        block.facts["live peak"] = min(_peak(block, join) for join in ((False, True) if joins else (False,)))
    return block.facts["live peak"]


def quick_live_peak(block: Block, limit: int) -> int:
    """Live bytes of a block in an order that keeps a limit, if a quick search finds one.

    Else the fewest that it found, or a bound above the limit that no order is below.
    """
    least = live_peak(block)
    if least <= limit or _is_chain(block):
        return least
    graph = graph_of(block)
    given = list(range(len(graph)))
    if graph.bound() > limit:
        return graph.bound()
    order = settle(graph, given, max(graph.profile(given)))
    least = min(least, max(graph.profile(order)))
    if least > limit:
        order = fit(graph, order, limit) or _fit_backwards(graph.reversed(), order, limit) or order
    return min(least, max(graph.profile(order)))


def _peak(block: Block, join: bool) -> int:
    change = [0] * (len(block.operators) + 3)
    for s in unfreed_storages(block, join=join):
        if not s.host:
            change[s.start + 1] += aligned(s.nbytes)
            change[s.end + 2] -= aligned(s.nbytes)
    most, live = 0, change[0]
    for now, op in zip(islice(change, 1, None), block.operators, strict=False):
        live += now
        most = max(most, live + sum(aligned(t.nbytes) for t in op.workspace() if not t.host))
    return most


def settle(graph: Graph, order: list[int], limit: int) -> list[int]:
    """Operators that free more than they allocate move up, those that allocate more than they free move down."""
    up = fit(graph, order, limit) or order
    return _fit_backwards(graph.reversed(), up, limit) or up


def _moments(profile: list[int]) -> list[int]:
    """The fullest moments of an order, some operators apart: what is alive there may have to be in any order."""
    apart, found = len(profile) // (2 * _MOMENTS), list[int]()
    for i in sorted(range(len(profile)), key=profile.__getitem__, reverse=True)[: _NEAREST * _MOMENTS]:
        if len(found) < _MOMENTS and all(abs(i - j) > apart for j in found):
            found.append(i)
    return found


def squeeze(graph: Graph, order: list[int], least: int, steps: int = 6) -> list[int]:
    """The lowest limit for which `fit` finds an order, forwards or backwards; bisection, coarse for large blocks.

    `least`: no order has a lower peak.
    """
    steps = min(steps, _LOOKS // max(len(order), 1))
    back = graph.reversed()
    high = max(graph.profile(order), default=0)
    low = graph.bound()
    for _ in range(steps):
        if high - low <= high >> 9:
            break
        limit = (low + high) // 2
        found = None if limit < least else fit(graph, order, limit) or _fit_backwards(back, order, limit)
        if found is None:
            low = limit + 1
        else:
            order, high = found, max(graph.profile(found))
    return order


def _fit_backwards(back: Graph, order: list[int], limit: int) -> list[int] | None:
    """`fit` from the end: `back` is the reversed graph, the orders are the graph's own."""
    last = len(order) - 1
    found = fit(back, [last - i for i in reversed(order)], limit)
    return None if found is None else [last - i for i in reversed(found)]


def fit(graph: Graph, order: list[int], limit: int) -> list[int] | None:
    """An order with at most `limit` bytes alive; None if this heuristic finds none.

    Operators run in the order given, but those that do not fit yet are put off, and small groups that leave less
    alive than before run as soon as they fit: with live bytes a submodular function of what has run, that can only
    make room.
    """
    return _Fit(graph, order, limit).run()


class _Fit:
    def __init__(self, graph: Graph, order: list[int], limit: int) -> None:
        self.walk = Walk(graph)
        self.order, self.limit = order, limit
        self.place = [0] * len(order)
        for k, i in enumerate(order):
            self.place[i] = k
        self.result: list[int] = []
        #: heaps: places in the order of operators that may run; (bytes wanted, place) of those that did not fit
        self.ready = [self.place[i] for i in order if not self.walk.waits[i]]
        self.put_off: list[tuple[int, int]] = []
        self.fresh = [order[k] for k in reversed(self.ready)]
        self.wide = {
            i for i, (t, f) in enumerate(zip(graph.touches, graph.leads, strict=True)) if len(t) + len(f) > _WIDE
        }
        heapify(self.ready)

    def run(self) -> list[int] | None:
        walk, ready, put_off = self.walk, self.ready, self.put_off
        while len(self.result) < len(self.order):
            if self.fresh:
                self.look_ahead()
            if put_off and walk.live + put_off[0][0] <= self.limit:
                heappush(ready, heappop(put_off)[1])
            if not ready:
                return None
            at = heappop(ready)
            i = self.order[at]
            if walk.done[i]:
                continue
            wanted = walk.running(i)
            if wanted <= self.limit:
                walk.step(i)
                self.ran(i)
            else:
                heappush(put_off, (wanted - walk.live, at))
        return self.result

    def look_ahead(self) -> None:
        """Runs groups that begin with operators for which something has changed."""
        while self.fresh:
            i = self.fresh.pop()
            if self.walk.done[i]:
                continue
            at = self.place[i]
            heappush(self.ready, at)
            if self.ready[0] != at:  # else it is the next one anyway
                for j in self.group(i):
                    self.ran(j)

    def ran(self, i: int) -> None:
        """Notes that operator i has run, and for which others that has made a difference."""
        self.result.append(i)
        walk, done, waits = self.walk, self.walk.done, self.walk.waits
        fresh = [j for j in walk.graph.leads[i] if not waits[j]]
        for b in walk.graph.touches[i]:
            if walk.left[b] == 1 or walk.seen[b] == 1:
                fresh += [j for j in walk.graph.touched_by[b] if not waits[j] and not done[j]]
        self.fresh += fresh if len(fresh) < 2 else sorted(set(fresh), key=self.place.__getitem__, reverse=True)

    def group(self, i: int) -> list[int]:
        """Runs operator i, and up to a few that follow, if that leaves less alive than before; else nothing."""
        walk, graph, place = self.walk, self.walk.graph, self.place
        done, waits = walk.done, walk.waits
        before = walk.live
        group: list[int] = []
        near: set[int] = set()
        while walk.running(i) <= self.limit:
            walk.step(i)
            group.append(i)
            if walk.live < before:
                return group
            if len(group) == _GROUP or i in self.wide:
                break
            near.discard(i)
            near.update([j for j in graph.leads[i] if not waits[j]])
            for b in graph.touches[i]:
                row = graph.touched_by[b]
                if len(row) <= _FAN:
                    near.update([j for j in row if not waits[j] and not done[j]])
            near -= near & self.wide
            if not near:
                break
            i = min([(walk.change(j), place[j], j) for j in near])[2]
        for j in reversed(group):
            walk.undo(j)
        return []


def refine(graph: Graph, order: list[int], width: int, tries: int) -> list[int]:
    """Finds better orders of the operators around the peak until there is none, or the tries are used up."""
    order = list(order)
    profile = graph.profile(order)
    while tries > 0:
        peak = max(profile, default=0)
        at = profile.index(peak)
        for w in _widths(width, len(order)):
            first = max(0, min(at - w // 2, len(order) - w))
            walk = Walk(graph)
            for i in order[:first]:
                walk.step(i)
            window = Window(graph, order, first, first + w, walk)
            allowed = min(tries, _TRIES)
            found, _, left = best_order(window, allowed, peak >> 10) if window.bound() < peak else (None, True, allowed)
            tries -= allowed - left + first // 8
            if found is not None:
                order[first : first + w] = [window.operators[k] for k in found]
                profile[first : first + w] = graph.profile(order[first : first + w], walk)
                break
        else:
            return order
    return order


def _widths(width: int, n: int) -> list[int]:
    width = min(width, n)
    return [w for w in (16, 32, 64) if w < width] + [width]
