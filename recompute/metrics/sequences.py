"""Sequences that a network trained with the CTC loss reads, and their character error rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UsageError, expect
from ..language.program import Program
from ..language.scores import scores_of, steps_of
from ..ops.loss.ctc import CTCLoss
from .base import Metric, share


def ctc_decode(
    scores: Any, lengths: Any = None, *, blank: int = 0, width: int = 1, batch_first: bool = True
) -> list[list[int]]:
    """The classes that each sample reads: repetitions are one, blanks are none.

    `scores`: [N, T, C], or [T, N, C] without `batch_first`: scores or log-probabilities (or with `width` 1,
    probabilities).  `lengths` [N]: how many steps of a sample count (None: all).  `width`: 1 takes the best class of
    each step; more is a search over so many beginnings, whose alignments are summed (Hannun et al. 2014, arXiv
    1408.2873, without a language model).  UsageError for other shapes.
    """
    x = np.asarray(scores)
    if x.ndim != 3 or not x.shape[2]:
        raise UsageError(f"ctc_decode needs scores [N, T, C], not an array of shape {list(x.shape)}")
    x = x if batch_first else x.transpose(1, 0, 2)
    if not 0 <= expect("blank", blank, (int, np.integer), "a class") < x.shape[2]:
        raise UsageError(f"ctc_decode: the blank must be one of the {x.shape[2]} classes, not {blank}")
    if expect("width", width, (int, np.integer), "a whole number") < 1:
        raise UsageError(f"ctc_decode: width must be at least 1, not {width}")
    ends = np.full(len(x), x.shape[1]) if lengths is None else _lengths("ctc_decode: lengths", lengths, *x.shape[:2])
    if width == 1:
        return [_best(x[i, : int(n)].argmax(1), blank) for i, n in enumerate(ends)]
    return [_searched(_log_softmax(x[i, : int(n)].astype(np.float64)), blank, width) for i, n in enumerate(ends)]


def _lengths(what: str, given: Any, samples: int, most: int) -> np.ndarray:
    """One whole number a sample, from 0 to `most`.  UsageError for others."""
    array = np.asarray(given).reshape(-1)
    if len(array) != samples:
        raise UsageError(f"{what}: there are {len(array)} for {samples} samples")
    wrong = [n for n in array.tolist() if not 0 <= n <= most or n != int(n)]
    if wrong:
        raise UsageError(f"{what} must be whole numbers from 0 to {most}, not {wrong[0]}")
    return array


def _best(path: np.ndarray, blank: int) -> list[int]:
    first = np.concatenate([[True], path[1:] != path[:-1]]) if len(path) else np.zeros(0, bool)
    return path[first & (path != blank)].tolist()


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(1, keepdims=True, initial=-np.inf)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def _searched(x: np.ndarray, blank: int, width: int) -> list[int]:
    """Beginnings with the logarithms of their probability: those of paths that end in a blank, and in their last
    class."""
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -np.inf)}
    for row in x:
        extended: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [-np.inf, -np.inf])
        likely = np.argsort(-row, kind="stable")[
            : width + 1
        ].tolist()  # of one beginning, no more can be among the best
        for text, (empty, last) in beams.items():
            both = float(np.logaddexp(empty, last))
            same = extended[text]
            same[0] = float(np.logaddexp(same[0], both + row[blank]))
            if text:
                same[1] = float(np.logaddexp(same[1], last + row[text[-1]]))
            for c in sorted(likely):
                if c != blank:
                    longer = extended[(*text, c)]
                    longer[1] = float(np.logaddexp(longer[1], (empty if text and c == text[-1] else both) + row[c]))
        best = sorted(extended.items(), key=lambda item: (-float(np.logaddexp(item[1][0], item[1][1])), item[0]))[
            :width
        ]
        beams = {text: (empty, last) for text, (empty, last) in best}
    return list(next(iter(beams)))


class CharacterErrorRate(Metric):
    """Edits (insertions, deletions, substitutions) from what is read to the labels, divided by the labels' entries.

    `output`: scores [N, T, C] or [T, N, C]; `batch_first`: which (default: told from the number of labels).  `blank`,
    `ignore_index`: None takes those of the program's CTC loss, or 0 and -100.  `label_lengths`, `input_lengths`:
    columns of the batch, see `rc.losses.ctc`.  `width`: see `ctc_decode`.
    """

    def __init__(
        self,
        output: str | None = None,
        label: str | None = None,
        *,
        batch_first: bool | None = None,
        blank: int | None = None,
        ignore_index: int | None = None,
        label_lengths: str | None = None,
        input_lengths: str | None = None,
        width: int = 1,
        name: str = "cer",
    ) -> None:
        self.batch_first, self.blank, self.ignore_index, self.width = batch_first, blank, ignore_index, width
        self.label_lengths, self.input_lengths = label_lengths, input_lengths
        self.probabilities = False
        super().__init__(name, output, label)

    def bind(self, program: Program) -> Metric:
        """The metric of a program's outputs; options that are absent are those of the program's loss."""
        super().bind(program)
        loss = next((op.op for op in program.logical.operators if isinstance(op.op, CTCLoss)), CTCLoss())
        self.blank = loss.blank if self.blank is None else self.blank
        self.ignore_index = loss.ignore_index if self.ignore_index is None else self.ignore_index
        assert self.output is not None
        self.probabilities = scores_of(program[self.output].name, steps_of(program.forward_block)).kind == "Softmax"
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of lengths."""
        return tuple(c for c in (self.label_lengths, self.input_lengths) if c is not None)

    def reset(self) -> None:
        self._edits = self._entries = 0

    def update(self, outputs: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> None:
        x, labels = self.scores(outputs), self.labels(batch)
        first = self.batch_first
        if first is None:
            places = [i for i in (0, 1) if x.ndim == 3 and x.shape[i] == len(labels)]
            if len(places) != 1:
                raise UsageError(
                    f"metric '{self.name}': which axis of scores of shape {list(x.shape)} is the batch, of "
                    f"{len(labels)} labels, cannot be told: give batch_first=True or False"
                )
            first = places == [0]
        if self.probabilities:
            with np.errstate(divide="ignore"):
                x = np.log(x)
        steps = None if self.input_lengths is None else batch[self.input_lengths]
        decoded = ctc_decode(x, steps, blank=self.blank or 0, width=self.width, batch_first=first)
        ends_at = np.full(len(labels), labels.shape[1])
        if self.label_lengths is not None:
            ends_at = _lengths(f"metric '{self.name}': label_lengths", batch[self.label_lengths], *labels.shape)
        for read, label, size in zip(decoded, labels, ends_at.tolist(), strict=True):
            wanted = label[: int(size)].tolist()
            ends = -100 if self.ignore_index is None else self.ignore_index
            wanted = wanted[: wanted.index(ends)] if ends in wanted else wanted
            self._edits += edit_distance(read, wanted)
            self._entries += len(wanted)

    def result(self) -> float:
        """Edits a label's entry."""
        return share(self._edits, self._entries)


def edit_distance(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The fewest insertions, deletions and substitutions that make b from a (Levenshtein 1966)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]
