"""Long sequences are simulated by arrays: the numbers are those of the loops."""

from __future__ import annotations

import random

import pytest

from recompute.passes.planners.core import simulate as module
from recompute.passes.planners.core.problem import Node, RematerialisationProblem
from recompute.passes.planners.core.simulate import profile, pruned, simulate


def drawn(seed: int) -> tuple[RematerialisationProblem, list[int]]:
    """A problem with scratch, inputs that nothing reads, and outputs in others' places; and a sequence with reruns."""
    draw = random.Random(seed)
    nodes, sizes = [], [draw.randrange(1, 9) for _ in range(3)]
    for i in range(40):
        reads = tuple(draw.sample(range(len(sizes)), min(len(sizes), draw.randrange(1, 4))))
        writes = tuple(range(len(sizes), len(sizes) + draw.randrange(1, 3)))
        sizes += [draw.randrange(1, 9) for _ in writes]
        over = tuple(v for v in reads if draw.random() < 0.6)
        nodes.append(Node(f"n{i}", draw.random(), reads, writes, draw.randrange(4), i > 20, i <= 20, over))
    names = tuple(f"v{i}" for i in range(len(sizes)))
    outputs = tuple(draw.sample(range(3, len(sizes)), 3))
    p = RematerialisationProblem(tuple(nodes), tuple(sizes), names, (0, 1, 2), outputs, 10)
    sequence: list[int] = []
    for i in range(len(p)):
        if i > 20:
            sequence += sorted(draw.sample(range(21), draw.randrange(4)))
        sequence.append(i)
    return p, sequence


@pytest.mark.parametrize("seed", range(20))
def test_arrays_find_what_loops_find(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for long in (1, 10**9):
        monkeypatch.setattr(module, "LONG", long)
        p, sequence = drawn(seed)
        kept = pruned(p, sequence)
        assert pruned(p, kept) == kept
        found.append((profile(p, sequence), simulate(p, sequence), kept, profile(p, kept)))
    assert found[0] == found[1]


def test_bytes_that_do_not_fit_a_word_are_counted_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG", 1)
    large = 1 << 61
    nodes = (Node("a", 1.0, (0,), (1,)), Node("b", 1.0, (0, 1), (2,), backward=True))
    p = RematerialisationProblem(nodes, (large, large, large), ("x", "y", "z"), (0,), (2,))
    assert profile(p, [0, 0, 0, 0, 0, 1]) == [2 * large] * 5 + [3 * large]
