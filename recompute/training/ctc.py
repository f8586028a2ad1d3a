"""The loss of sequences whose labels are not aligned with their steps, and what it makes of scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import UsageError, expect
from ..language.ir import Value
from ..language.op import OperatorBuilder
from ..language.program import Program, Variable
from ..language.types import TensorType
from ..ops.loss.ctc import NO_LENGTH
from .loss_builder import LossBuilder
from .modes import at_other_batches


class _Settings(NamedTuple):
    """The arguments of `ctc` besides names and reduction; Variables by their names."""

    label: Any
    blank: int
    batch_first: bool
    label_size: int | None
    label_lengths: Any
    input_lengths: Any
    ignore_index: int
    zero_infinity: bool


def ctc(
    output: Variable | Program,
    label: Variable | str | None = None,
    *,
    blank: int = 0,
    batch_first: bool | None = None,
    label_size: int | None = None,
    label_lengths: Variable | str | None = None,
    input_lengths: Variable | str | None = None,
    ignore_index: int = -100,
    zero_infinity: bool = False,
    **options: Any,
) -> Variable:
    """-log p(label), summed over all alignments of a label with the steps (Graves et al. 2006): PyTorch's `ctc_loss`.

    `output`: scores or probabilities, [T, N, C], or with `batch_first` [N, T, C] (default: told from the model's
    batch).  If they are made by Softmax or LogSoftmax, its input is used.  `label`: classes, i64 [N, `label_size`]
    (default: T of them), ended by `ignore_index`; or with `label_lengths`, i64 [N], that many of each row.
    `input_lengths`, i64 [N]: how many steps of a sample count (default: all).  Both are Variables, or names of values
    or of new inputs.  `blank`: its class.  A label that fits no alignment has an infinite loss (0 with
    `zero_infinity`) and no gradient.  `options`: name, label_name, reduction; "mean" divides each loss by the length
    of its label (at least 1) and takes the mean of the samples, as in PyTorch.
    """
    first = _batch_first(output, batch_first)
    y, counts, steps = (_name(output, v) for v in (label, label_lengths, input_lengths))
    settings = _Settings(y, blank, first, label_size, counts, steps, ignore_index, zero_infinity)
    return _ctc(output, settings, **options)


def _name(output: Any, value: Any) -> Any:
    """The name of a Variable of the output's program; else what is given."""
    if not isinstance(value, Variable):
        return value
    if value.program is not (output.program if isinstance(output, Variable) else output):
        raise UsageError(f"ctc: '{value.name}' must be a Variable of the same program as the output")
    return value.name


def _batch_first(output: Variable | Program, option: bool | None) -> bool:
    """Whether the first axis is the batch.  UsageError where that cannot be told."""
    loss = LossBuilder(output, "", "mean")
    x, batch = loss.x, loss.program.block.batch
    if x.ndim != 3:
        raise UsageError(f"ctc needs scores [T, N, C] or [N, T, C], but '{x.name}' is {x.type}")
    if option is not None:
        return expect("batch_first", option, bool, "True or False")
    places = [i for i in (0, 1) if x.shape[i] == batch]
    if len(places) != 1:
        raise UsageError(
            f"ctc: which axis of '{x.name}' ({x.type}) is the batch cannot be told from the model's batch, {batch}: "
            "give batch_first=True for [N, T, C], False for [T, N, C]"
        )
    return places == [0]


@at_other_batches
def _ctc(
    output: Variable | Program, settings: _Settings, name: str = "loss", label_name: str = "label",
    reduction: str = "mean",
) -> Variable:  # fmt: skip
    loss = LossBuilder(output, name, reduction)
    axis = loss.take("Softmax", "LogSoftmax")
    b, x = loss.b, loss.wide()
    if axis not in (None, 2):
        raise UsageError(f"ctc: the classes of '{loss.output.name}' must be its last axis, but they are axis {axis}")
    x = b.LogSoftmax(x, axis=-1)
    label, blank, batch_first, label_size, label_lengths, input_lengths, ignore_index, zero_infinity = settings
    steps, n, classes = x.shape if not batch_first else (x.shape[1], x.shape[0], x.shape[2])
    for what, index in (("blank", blank), ("ignore_index", ignore_index)):
        expect(f"ctc: {what}", index, (int, np.integer), "a whole number")
    if not 0 <= blank < classes:
        raise UsageError(f"ctc: the blank must be one of the {classes} classes of '{loss.output.name}', not {blank}")
    if 0 <= ignore_index < classes:
        raise UsageError(f"ctc: ignore_index ends labels: it must not be a class (0 to {classes - 1}): {ignore_index}")
    size = expect("ctc: label_size", steps if label_size is None else label_size, (int, np.integer), "a whole number")
    if size < 1:
        raise UsageError(f"ctc: label_size must be at least 1, not {size}")
    y = loss.label(label, label_name, TensorType("i64", (n, _size_of(loss, label, size))))
    counts, input_counts = _counts(loss, label_lengths, n), _counts(loss, input_lengths, n)
    if counts is not None:
        y = _cut(b, y, counts, ignore_index)
    x = b.Transpose(x, perm=(1, 0, 2)) if batch_first else x
    expect("ctc: zero_infinity", zero_infinity, bool, "True or False")
    options = {"blank": int(blank), "ignore_index": int(ignore_index), "zero_infinity": zero_infinity}
    value = b.CTCLoss(x, y, *(() if input_counts is None else (input_counts,)), **options)
    if reduction == "mean":
        value = b.Div(value, _lengths(loss, y, ignore_index, value))
    return loss.reduce(value)


def _size_of(loss: LossBuilder, label: Any, size: int) -> int:
    """How many entries rows of labels have: as given."""
    v = loss.program[label] if isinstance(label, str) and label in loss.program else label
    return v.shape[1] if isinstance(v, Variable) and len(v.shape) == 2 else size


def _counts(loss: LossBuilder, counts: Any, n: int) -> Value | None:
    """One number a sample: a Variable, a value by its name, a new input."""
    if counts is None:
        return None
    new = isinstance(counts, str) and counts not in loss.program
    return loss.label(None if new else counts, counts if new else "", TensorType("i64", (n,)))


def _cut(b: OperatorBuilder, y: Value, counts: Value, ignore_index: int) -> Value:
    """Labels [N, S] of so many entries; NO_LENGTH where that is no number of entries, which CTCLoss refuses."""
    size, column = y.shape[1], b.Reshape(counts, shape=(*counts.shape, 1))
    places = b.Sub(b.CumSum(b.Fill(dtype="i64", shape=(size,), value=1), axis=0), b.constant(1, counts))
    wrong = b.Or(b.Less(column, b.constant(0, counts)), b.Less(b.constant(size, counts), column))
    cut = b.Where(b.Less(places, column), y, b.constant(ignore_index, y))
    return b.Where(wrong, b.constant(NO_LENGTH, y), cut)


def _lengths(loss: LossBuilder, y: Value, ignore_index: int, like: Value) -> Value:
    """How many entries each label has, at least 1."""
    b = loss.b
    ended = b.CumSum(b.Cast(b.Equal(y, b.constant(ignore_index, y)), to="i64"), axis=1)
    there = b.Cast(b.Equal(ended, b.constant(0, ended)), to=like.dtype)
    return b.Max(b.ReduceSum(there, axes=(1,), keepdims=0), b.constant(1, like))
