"""Decoding of CTC scores, beside all paths; edit distances; the character error rate."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import UsageError
from recompute.metrics import ctc_decode, edit_distance


def read(path: tuple[int, ...], blank: int) -> tuple[int, ...]:
    return tuple(c for c, _ in itertools.groupby(path) if c != blank)


@pytest.mark.parametrize("blank", [0, 2])
def test_a_wide_search_finds_the_most_likely_label(blank: int) -> None:
    """Where all paths of 5 steps and 3 classes are summed."""
    x = np.random.default_rng(3).standard_normal((40, 5, 3))
    log_prob = x - np.log(np.exp(x).sum(2, keepdims=True))
    found, differ = ctc_decode(x, blank=blank, width=64), 0
    for row, mine in zip(log_prob, found, strict=True):
        sums: dict[tuple[int, ...], float] = defaultdict(float)
        for path in itertools.product(range(3), repeat=5):
            sums[read(path, blank)] += np.exp(row[np.arange(5), path].sum())
        assert tuple(mine) == max(sums, key=sums.__getitem__)
        differ += tuple(mine) != read(tuple(row.argmax(1)), blank)
    assert differ  # from the best path


def test_the_best_path() -> None:
    classes = np.array([[1, 1, 0, 1, 2, 2], [0, 0, 0, 0, 0, 0], [2, 1, 1, 0, 0, 1]])
    x = np.eye(3)[classes]
    assert ctc_decode(x) == [[1, 1, 2], [], [2, 1, 1]]
    assert ctc_decode(x, [2, 0, 3]) == [[1], [], [2, 1]]
    assert ctc_decode(x.transpose(1, 0, 2), batch_first=False) == ctc_decode(x)
    assert ctc_decode(9 * x, [6, 0, 6], width=3) == [[1, 1, 2], [], [2, 1, 1]]


def test_edit_distances() -> None:
    """Of all words of up to three letters of two: the fewest edits, found by trying."""
    words = [w for n in range(4) for w in itertools.product("ab", repeat=n)]

    def edits(word: tuple[str, ...]) -> set[tuple[str, ...]]:
        cut = {word[:i] + word[i + 1 :] for i in range(len(word))}
        put = {(*word[:i], c, *word[i:]) for i in range(len(word) + 1) for c in "ab"}
        return cut | put | {(*word[:i], c, *word[i + 1 :]) for i in range(len(word)) for c in "ab"}

    for first in words:
        reached, distance = {first: 0}, 0
        while len(set(words) - set(reached)):
            distance += 1
            for word in list(reached):
                for other in edits(word):
                    reached.setdefault(other, distance)
        assert all(edit_distance(first, second) == reached[second] for second in words)
    assert edit_distance("kitten", "sitting") == 3


def test_the_error_rate_does_not_depend_on_batches() -> None:
    r = np.random.default_rng(0)
    x, labels = r.standard_normal((12, 6, 4)), r.integers(1, 4, (12, 5))
    sizes = r.integers(0, 6, 12)
    metric = rc.metrics.CharacterErrorRate(label_lengths="sizes")
    wanted = [row[:n].tolist() for row, n in zip(labels, sizes, strict=True)]
    pairs = list(zip(ctc_decode(x), wanted, strict=True))
    expected = sum(edit_distance(a, b) for a, b in pairs) / sum(map(len, wanted))
    for parts in ([12], [5, 7], [1] * 12):
        metric.reset()
        for rows in np.split(np.arange(12), np.cumsum(parts)[:-1]):
            metric.update({"scores": x[rows]}, {"label": labels[rows], "sizes": sizes[rows]})
        assert metric.result() == expected
    ended = np.where(np.arange(5) < sizes[:, None], labels, -100)
    metric = rc.metrics.named("cer")
    metric.update({"scores": x}, {"label": ended})
    assert metric.result() == expected and Counter(map(len, wanted))[0]


def test_what_is_not_given_is_taken_from_the_loss() -> None:
    program = rc.Program(rc.Block("net", inputs=(rc.Value("x", rc.TensorType("f32", (2, 6, 4))),)))
    b = program.builder()
    program.append(b, outputs=[b.Softmax(program["x"].value, axis=2).name])
    rc.losses.ctc(program, blank=3, ignore_index=-1)
    metric = rc.metrics.CharacterErrorRate(width=2).bind(program)
    assert (metric.blank, metric.ignore_index, metric.probabilities) == (3, -1, True)
    metric.update({metric.output: np.eye(4)[[[3, 0, 0, 3, 1, 1]] * 2]}, {"label": np.array([[0, 1], [0, -1]])})
    assert metric.result() == 1 / 3


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"scores": np.zeros((2, 3))}, "needs scores"),
        ({"blank": 4}, "one of the 4 classes"),
        ({"width": 0}, "at least 1"),
        ({"lengths": [1]}, "there are 1 for 2 samples"),
        ({"lengths": [3, 4]}, "from 0 to 3, not 4"),
        ({"lengths": [-1, 3]}, "from 0 to 3, not -1"),
        ({"lengths": [2.5, 3]}, "from 0 to 3, not 2.5"),
    ],
)
def test_errors(given: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        ctc_decode(**{"scores": np.zeros((2, 3, 4)), **given})
    with pytest.raises(UsageError, match="batch_first"):
        rc.metrics.CharacterErrorRate().update({"s": np.zeros((2, 2, 4))}, {"label": np.zeros((2, 1))})


@pytest.mark.parametrize("size", [-1, 6])
def test_lengths_of_labels_that_cannot_be(size: int) -> None:
    metric = rc.metrics.CharacterErrorRate(label_lengths="sizes")
    with pytest.raises(UsageError, match=f"'cer': label_lengths must be .* from 0 to 5, not {size}"):
        metric.update({"scores": np.zeros((2, 6, 4))}, {"label": np.ones((2, 5), int), "sizes": np.array([5, size])})
