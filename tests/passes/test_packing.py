"""The packers against slow ones that are plain to see, and what the search makes of a few programs."""

from __future__ import annotations

import numpy as np
import pytest

from recompute.passes.memory import packing
from recompute.passes.memory.packing import Lifetime, best_fit_in_time, first_fit, height, lower_bound, pack
from recompute.passes.memory.packing_exact import check_plan
from recompute.runtime.cpu import packing_moves
from recompute.runtime.cpu.device import jit

needs_numba = pytest.mark.skipif(bool(jit.unavailable()), reason="first fit is compiled by numba (extra `cpu`)")


def lifetimes(seed: int, n: int, sizes: int = 30) -> list[Lifetime]:
    """Short and long lives, many that begin or end at once, some empty; sizes in units of 64."""
    g = np.random.default_rng(seed)
    starts = np.sort(g.integers(-1, 2 * n, n))
    lengths = np.where(g.random(n) < 0.3, g.integers(0, 2 * n, n), g.integers(0, 5, n))
    bytes_ = 64 * g.integers(0, sizes, n)
    found = zip(bytes_, starts, lengths, strict=True)
    return [Lifetime(f"v{i}", int(s), int(a), int(a + d)) for i, (s, a, d) in enumerate(found)]


def together(a: Lifetime, b: Lifetime) -> bool:
    return a.start <= b.end and b.start <= a.end


def free_at(at: int, x: Lifetime, placed: list[tuple[int, Lifetime]]) -> bool:
    return all(at + x.size <= low or low + y.size <= at for low, y in placed if y.size and together(x, y))


def slow_first_fit(order: list[Lifetime], known: list[int]) -> dict[str, int]:
    placed = list(zip(known, order, strict=False))
    for x in order[len(known) :]:
        ends = [low + y.size for low, y in placed if together(x, y)]
        at = next(at for at in sorted({0, *ends}) if not x.size or free_at(at, x, placed))
        placed.append((0 if not x.size else at, x))
    return {x.name: at for at, x in placed}


def slow_best_fit(items: list[Lifetime]) -> dict[str, int]:
    """An allocator: what is dead is given back before a new one comes, which takes the smallest hole."""
    plan: dict[str, int] = {}
    for x in sorted(items, key=lambda x: x.start):
        alive = [y for y in items if y.name in plan and y.size and y.end >= x.start]
        edges = sorted((plan[y.name], plan[y.name] + y.size) for y in alive)
        holes = zip([0, *(b for _, b in edges)], [*(a for a, _ in edges), 1 << 62], strict=True)
        plan[x.name] = min((b - a, a) for a, b in holes if b - a >= x.size and b > a)[1] if x.size else 0
    return plan


@pytest.mark.parametrize("seed", range(12))
def test_first_fit_takes_the_lowest_gap(seed: int) -> None:
    items = lifetimes(seed, 25)
    order = [items[int(i)] for i in np.random.default_rng(seed).permutation(len(items))]
    expected = slow_first_fit(order, [])
    some = [x for x in order if x.size]
    addresses = [expected[x.name] for x in some]
    top = height(order, expected)
    assert first_fit(order) == expected
    assert packing._first_fit_of_few(some) == packing._first_fit_of_few(some, addresses[:9], top) == addresses
    assert packing._first_fit_of_few(some, addresses[:9], top - 1) is None
    known = [expected[x.name] for x in order[:10]]
    assert first_fit(order, known) == expected
    shifted = [64 * 1000 + at for at in known]
    assert first_fit(order, shifted) == slow_first_fit(order, shifted)


@needs_numba
@pytest.mark.parametrize("seed", range(6))
def test_compiled_first_fit_is_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_placer", None)
    items = lifetimes(seed, 40 * 4**seed // 8 + 20)
    order = [items[int(i)] for i in np.random.default_rng(seed).permutation(len(items))]
    expected = first_fit(order)
    assert packing_moves.placed(order) == [expected[x.name] for x in order]
    known = [64 * 1000 + expected[x.name] for x in order[:10] if x.size]
    first = [x for x in order[:10] if x.size]
    rest = [x for x in order if x not in first]
    fixed = first_fit([*first, *rest], known)
    assert packing_moves.placed([*first, *rest], known) == [fixed[x.name] for x in [*first, *rest]]


@pytest.mark.parametrize("seed", range(30))
def test_moves_place_again_what_first_fit_would(seed: int) -> None:
    """Whatever moves were made: the addresses are those of first fit in the order reached, which never grows."""
    g, items = np.random.default_rng(seed), lifetimes(seed, 30 + seed, sizes=4 + seed)
    order = [items[int(i)] for i in g.permutation(len(items))]
    reached, plan, moves = order, first_fit(order), list[tuple[int, int]]()

    def draw(other: np.random.Generator, highest: list[int]) -> tuple[int, int]:
        """The next move; before it, the last one is made by first fit of all."""
        nonlocal reached, plan
        for i, j in moves[-1:]:
            changed = [*reached[:i], *reached[i + 1 :]]
            changed.insert(j, reached[i])
            if height(changed, first_fit(changed)) <= height(reached, plan):
                reached, plan = changed, first_fit(changed)
        top = height(reached, plan)
        assert highest == [p for p, x in enumerate(reached) if plan[x.name] + x.size == top]
        moves.append((int(g.integers(len(order))), int(g.integers(len(order)))))
        return moves[-1]

    assert packing._moved(order, 0, 60, draw) == plan
    assert len(moves) == 61 and reached != order


@pytest.mark.parametrize("seed", range(4))
def test_what_is_above_the_bound_comes_earlier(seed: int) -> None:
    """Raising gives plans of first fit that never grow, and lower ones in most orders; without allocations nothing."""
    items, lower = lifetimes(seed, 200), 0
    bound = lower_bound(items)
    for order in packing._orders(items):
        plan = first_fit(order)
        raised, top = packing._raised(order, plan, height(items, plan), bound)
        assert top == height(items, raised)
        check_plan(items, raised)
        assert height(items, raised) <= height(items, plan)
        lower += height(items, raised) < height(items, plan)
    assert lower > 1
    assert pack([]) == {}


@pytest.mark.parametrize("seed", range(12))
def test_best_fit_takes_the_smallest_hole(seed: int) -> None:
    items = lifetimes(seed, 60)
    assert best_fit_in_time(items) == slow_best_fit(items)


def test_holes_merge_with_both_neighbours() -> None:
    holes = packing._Holes()
    assert [holes.take(10) for _ in range(5)] == [0, 10, 20, 30, 40]
    holes.release(10, 10)
    holes.release(30, 10)
    assert (holes.ends, holes.starts, holes.top) == ({10: 20, 30: 40}, {20: 10, 40: 30}, 50)
    assert holes.take(4) == 10 and holes.ends == {14: 20, 30: 40}
    holes.release(20, 10)
    assert holes.ends == {14: 40} and holes.starts == {40: 14}
    assert holes.take(30) == 50 and holes.take(26) == 14 and not holes.ends
    holes.release(14, 26)
    holes.release(50, 30)
    assert (holes.ends, holes.top) == ({14: 40}, 50)
    holes.release(40, 10)
    assert (holes.ends, holes.starts, holes.top) == ({}, {}, 14)
    assert holes.take(1) == 14


@pytest.mark.parametrize("seed", range(6))
def test_bounds_count_what_is_alive_at_once(seed: int) -> None:
    items = lifetimes(seed, 40)
    at = {t: sum(x.size for x in items if x.start <= t <= x.end) for t in range(-1, 200)}
    assert lower_bound(items) == max(at.values())
    assert packing._breadth(items) == {x.name: max(at[t] for t in range(x.start, x.end + 1)) for x in items}
    assert packing._breadth(items[:1]) == {items[0].name: items[0].size}


def test_nothing_and_one_allocation() -> None:
    one = Lifetime("a", 64, 3, 3)
    assert pack([]) == {} and height([], {}) == 0 and lower_bound([]) == 0 and packing._breadth([]) == {}
    assert pack([one]) == {"a": 0} and lower_bound([one]) == height([one], {"a": 0}) == 64


def test_orders() -> None:
    """Fullest moment first (the longest, then the largest of them), largest, longest, largest area."""
    items = [
        Lifetime("long", 1, 0, 9), Lifetime("large", 50, 8, 9), Lifetime("early", 40, 0, 0), Lifetime("late", 40, 4, 4),
        Lifetime("both", 5, 2, 7), Lifetime("wide", 6, 2, 6), Lifetime("last", 6, 9, 9), Lifetime("twin", 6, 3, 7),
    ]  # fmt: skip
    assert [[x.name for x in order] for order in packing._orders(items)] == [
        ["long", "both", "wide", "twin", "late", "large", "last", "early"],
        ["late", "wide", "twin", "both", "long", "large", "last", "early"],
        ["large", "early", "late", "wide", "twin", "last", "both", "long"],
        ["long", "both", "wide", "twin", "large", "early", "late", "last"],
        ["large", "early", "late", "both", "wide", "twin", "long", "last"],
    ]


@pytest.mark.parametrize(
    ("n", "sizes", "seed", "repaired"),
    [
        (14, 40, 0, [91, 91, 93, 95, 94]),
        (60, 30, 4, [185, 185, 185, 203, 200]),
        (120, 30, 7, [298, 300, 295, 307, 298]),
        (120, 5000, 1, [48629, 50541, 50541, 47739, 50202]),
    ],
)
def test_repairs_are_the_same_everywhere(n: int, sizes: int, seed: int, repaired: list[int]) -> None:
    """The numbers are what the search found once: the same program gets the same plan on every machine.

    Who makes it better writes the better ones here.
    """
    items = lifetimes(seed, n, sizes)
    bound = lower_bound(items)
    plans = [(order, packing._repaired(list(order), bound)) for order in packing._orders(items)]
    for order, plan in plans:
        assert height(items, plan) <= height(items, first_fit(order))
        assert all(free_at(plan[x.name], x, [(plan[y.name], y) for y in items if y is not x]) for x in items if x.size)
    assert [height(items, plan) // 64 for _, plan in plans] == repaired


@pytest.mark.parametrize(
    ("n", "sizes", "seed", "found"),
    [
        (14, 40, 3, 109), (40, 9, 3, 38), (60, 30, 4, 185), (60, 30, 7, 241), (90, 4000, 5, 39695),
        (97, 4000, 5, 45509), (120, 5000, 5, 34205),
    ],
)  # fmt: skip
def test_plans_are_the_same_everywhere(n: int, sizes: int, seed: int, found: int) -> None:
    items = lifetimes(seed, n, sizes)
    plan = pack(items)
    assert all(free_at(plan[x.name], x, [(plan[y.name], y) for y in items if y is not x]) for x in items if x.size)
    assert height(items, plan) // 64 == found


@pytest.mark.parametrize(("n", "seed", "found"), [(40, 3, 39), (60, 3, 162), (60, 7, 248), (50, 1, 21095)])
def test_searches_are_the_same_everywhere(n: int, seed: int, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_TRIES", 400)
    items = lifetimes(seed, n, {40: 9, 50: 4000, 60: 30}[n])
    plan = packing._searched(items, lower_bound(items))
    assert all(free_at(plan[x.name], x, [(plan[y.name], y) for y in items if y is not x]) for x in items if x.size)
    assert height(items, plan) // 64 == found


def test_small_ones_with_long_lives_go_into_the_gaps() -> None:
    """Large ones are placed as if they were alone; small ones do not move them."""
    large = lifetimes(6, 30, 4000)
    small = [Lifetime(f"s{i}", 64 * (i % 3), i, 60 - i) for i in range(20)]
    items = [*small, *large]
    bound = lower_bound(items)
    plan = packing._large_first(items, bound)
    kept = [x for x in large if x.size * 512 >= bound]
    assert {x.name: plan[x.name] for x in kept} == pack(kept)
    assert all(free_at(plan[x.name], x, [(plan[y.name], y) for y in items if y is not x]) for x in items if x.size)
    for alone in (kept, small):
        assert packing._large_first(alone, lower_bound(alone) if alone is kept else bound) == first_fit(alone)


def test_a_thousandth_above_the_bound_is_near_enough() -> None:
    items = lifetimes(1, 60)
    huge = [*items, Lifetime("huge", 1 << 30, -1, 1000)]
    bound = lower_bound(huge)
    for order in packing._orders(huge):
        plan = packing._repaired(order, bound)
        assert plan == first_fit(order)
    assert packing._searched(huge, bound) == first_fit(sorted(huge, key=lambda x: (-x.size, x.start)))
    assert bound < height(huge, pack(huge)) and pack(huge) == best_fit_in_time(huge)


def test_many_are_packed_by_best_fit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    items = lifetimes(3, 25)
    assert pack(items) != best_fit_in_time(items)
    monkeypatch.setattr(packing, "_QUADRATIC", 25)
    assert pack(items) != best_fit_in_time(items)
    monkeypatch.setattr(packing, "_QUADRATIC", 24)
    assert pack(items) == best_fit_in_time(items)


def test_large_programs_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves of single allocations take time by the square of their number."""
    items = lifetimes(1, 200)
    monkeypatch.setattr(packing, "_REPAIRED", 59)
    monkeypatch.setattr(packing, "_FEW", 0)
    monkeypatch.setattr(packing, "_repaired", None)
    plan, before = pack(items), min(height(items, first_fit(order)) for order in packing._orders(items))
    check_plan(items, plan)
    assert height(items, plan) < before
