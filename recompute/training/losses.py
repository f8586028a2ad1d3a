"""Losses: each appends its operators to the program of `output`, declares the label as a new input, and returns the
loss as a Variable, which becomes an output of the program.

Common arguments: `output`, a Variable (or a Program: its first floating-point output); `label`, a Variable of
the same program or the name of one (default: a new input called `label_name`); `name`, the name of the loss;
`reduction`, "mean", "sum" or "none".  Formulas are PyTorch's.  f16 and bf16 outputs are cast to f32 first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..boundary import as_program
from ..errors import UsageError, expect
from ..language.builder import Builder
from ..language.ir import Value
from ..language.program import Program, Variable
from ..language.scores import before_moves, main_outputs, scores_of, steps_of
from ..language.types import TensorType
from ..ops.shape.reshape import reshape
from .ctc import ctc as ctc
from .loss_builder import LossBuilder, first_float_output
from .modes import at_other_batches

#: losses that `--loss` accepts
NAMES = (
    "cross_entropy", "nll", "mse", "l1", "smooth_l1", "huber", "bce", "bce_with_logits", "kl_div", "hinge",
    "ctc",
)  # fmt: skip

__all__ = ["NAMES", "natural_loss", *NAMES]

#: the label that does not count by default: PyTorch's
IGNORED = -100


@at_other_batches
def cross_entropy(
    output: Variable | Program,
    label: Variable | str | None = None,
    *,
    name: str = "loss",
    label_name: str = "label",
    reduction: str = "mean",
    axis: int | None = None,
    ignore_index: int | None = IGNORED,
    soft_label: bool = False,
    weight: Any = None,
    label_smoothing: float = 0.0,
) -> Variable:
    """-log softmax(output)[label], in one stable operator (ONNX SoftmaxCrossEntropyLoss).

    `output`: scores of any shape with classes along `axis` (default: 1 for 2, 4 and 5 dimensions, else the last).
    If it is made by Softmax or LogSoftmax, also written out, and perhaps reshaped, transposed or cast since, that
    operator's input and axis are used: softmax is not applied twice.
    `label`: class indices, i64, of the shape without the class axis; with `soft_label`, probabilities in the shape
    of the scores.  Labels equal to `ignore_index` (default: -100, as in PyTorch; None: there are none) do not count;
    the mean of no labels is NaN.  `weight`: one number a class, as in PyTorch.  `label_smoothing`: the share of each
    label that is spread evenly over all classes, from 0 to 1 (Szegedy et al. 2016, arXiv 1512.00567).
    """
    smoothing = _share("label_smoothing", label_smoothing)
    loss = LossBuilder(output, name, reduction)
    scores = loss.take("Softmax", "LogSoftmax")
    axis = scores if axis is None else axis
    if soft_label:
        return _soft_cross_entropy(loss, label, label_name, axis, weight, ignore_index, smoothing)
    return _indexed(loss, "SoftmaxCrossEntropyLoss", label, label_name, axis, ignore_index, weight, smoothing)


@at_other_batches
def nll(
    output: Variable | Program,
    label: Variable | str | None = None,
    *,
    name: str = "loss",
    label_name: str = "label",
    reduction: str = "mean",
    axis: int | None = None,
    ignore_index: int | None = IGNORED,
    weight: Any = None,
) -> Variable:
    """-output[label] for log-probabilities (ONNX NegativeLogLikelihoodLoss); shapes as in `cross_entropy`."""
    loss = LossBuilder(output, name, reduction)
    return _indexed(loss, "NegativeLogLikelihoodLoss", label, label_name, axis, ignore_index, weight)


@at_other_batches
def mse(output: Variable | Program, label: Variable | str | None = None, **options: Any) -> Variable:
    """(output - label)².  `options`: name, label_name, reduction."""

    def formula(b: Builder, x: Value, y: Value) -> Value:
        d = b.Sub(x, y)
        return b.Mul(d, d)

    return _elementwise(formula, output, label, **options)


@at_other_batches
def l1(output: Variable | Program, label: Variable | str | None = None, **options: Any) -> Variable:
    """|output - label|.  `options`: name, label_name, reduction."""
    return _elementwise(lambda b, x, y: b.Abs(b.Sub(x, y)), output, label, **options)


@at_other_batches
def smooth_l1(
    output: Variable | Program, label: Variable | str | None = None, *, beta: float = 1.0, **options: Any
) -> Variable:
    """d²/(2 beta) where d = |output - label| < beta, else d - beta/2.  `options`: name, label_name, reduction."""
    if not 0 <= expect("smooth_l1: beta", beta, (int, float), "a number") < math.inf:
        raise UsageError(f"smooth_l1: beta must be finite and not negative, but it is {beta}")
    if beta == 0:
        return l1(output, label, **options)
    return _elementwise(lambda b, x, y: _huber(b, x, y, beta, 1 / beta), output, label, **options)


@at_other_batches
def huber(
    output: Variable | Program, label: Variable | str | None = None, *, delta: float = 1.0, **options: Any
) -> Variable:
    """d²/2 where d = |output - label| < delta, else delta·(d - delta/2).  `options`: name, label_name, reduction."""
    if not 0 < expect("huber: delta", delta, (int, float), "a number") < math.inf:
        raise UsageError(f"huber: delta must be finite and positive, but it is {delta}")
    return _elementwise(lambda b, x, y: _huber(b, x, y, delta, 1.0), output, label, **options)


@at_other_batches
def bce(output: Variable | Program, label: Variable | str | None = None, **options: Any) -> Variable:
    """-label·log p - (1 - label)·log(1 - p) for probabilities p = output.  `options`: name, label_name, reduction.

    If `output` is made by Sigmoid, `bce_with_logits` of that operator's input is used.  Otherwise p and 1 - p are
    at least e⁻¹⁰⁰ (or the type's smallest normal number, 1.2e-38 for f32), so that the loss stays finite.
    """
    loss = LossBuilder(output, options.get("name", "loss"), options.get("reduction", "mean"))
    before = loss.x
    loss.take("Sigmoid")
    if loss.x is not before:
        return _of(loss, _bce_with_logits, label, **options)

    def formula(b: Builder, x: Value, y: Value) -> Value:
        one = b.constant(1, x)
        least = b.constant(max(math.exp(-100), float(np.finfo(x.type.numpy).tiny)), x)
        log_p, log_q = b.Log(b.Max(x, least)), b.Log(b.Max(b.Sub(one, x), least))
        return b.Neg(b.Add(b.Mul(y, log_p), b.Mul(b.Sub(one, y), log_q)))

    return _elementwise(formula, output, label, **options)


@at_other_batches
def bce_with_logits(
    output: Variable | Program, label: Variable | str | None = None, *, pos_weight: Any = None, **options: Any
) -> Variable:
    """`bce` of sigmoid(output): (1 - label)·x + log(1 + e⁻ˣ), stable.  `options`: name, label_name, reduction.

    `pos_weight`: a number or an array that broadcasts to x; multiplies the loss of positive labels.
    """
    try:
        np.asarray(0 if pos_weight is None else pos_weight, np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"pos_weight must be a number or an array, not {pos_weight!r}") from None
    return _elementwise(functools.partial(_bce_with_logits, pos_weight=pos_weight), output, label, **options)


def _bce_with_logits(b: Builder, x: Value, y: Value, pos_weight: Any = None) -> Value:
    one = b.constant(1, x)
    soft = b.Softplus(b.Neg(x))
    if pos_weight is not None:
        more = b.constant(np.asarray(pos_weight, x.type.numpy) - 1, x)
        soft = b.Mul(soft, b.Add(b.Mul(y, more), one))
    return b.Add(b.Mul(b.Sub(one, y), x), soft)


@at_other_batches
def kl_div(
    output: Variable | Program, label: Variable | str | None = None, *, log_target: bool = False, **options: Any
) -> Variable:
    """label·(log label - output) for log-probabilities `output` and probabilities `label` (0·log 0 = 0).

    With `log_target` the label is given as log-probabilities too.  `options`: name, label_name, reduction, which may
    also be "batchmean": the sum over all elements divided by the size of the first axis.
    """

    def formula(b: Builder, x: Value, y: Value) -> Value:
        if log_target:
            return b.Mul(b.Exp(y), b.Sub(y, x))
        least = b.constant(float(np.finfo(y.type.numpy).tiny), y)
        return b.Mul(y, b.Sub(b.Log(b.Max(y, least)), x))

    return _elementwise(formula, output, label, extra=("batchmean",), **options)


@at_other_batches
def hinge(output: Variable | Program, label: Variable | str | None = None, **options: Any) -> Variable:
    """max(0, 1 - label·output), labels -1 and 1.  `options`: name, label_name, reduction."""
    return _elementwise(lambda b, x, y: b.Relu(b.Sub(b.constant(1, x), b.Mul(x, y))), output, label, **options)


def natural_loss(program: Program) -> tuple[str, str]:
    """The loss that fits the form of a program: (the name of an output or one of `NAMES`, the reason in one line).

    A scalar output is the loss itself; probabilities and scores of classes, also per pixel, get cross_entropy,
    sigmoids bce, others mse.  UsageError if there is no floating-point output, and where it would be a guess: several
    unlike outputs, or the rows of a detector.
    """
    floats = [v for v in as_program(program).outputs if v.value.type.is_float]
    for v in floats:
        if v.shape == () or ("loss" in v.name.lower() and v.value.size == 1):
            return v.name, f"'{v.name}', which the model computes itself"
    out = first_float_output(program)
    others = main_outputs(program)
    if len({(*_natural(program, v), v.value.type) for v in others}) > 1:
        raise UsageError(_unlike(program, others))
    kind, why = _natural(program, out)
    if not kind:
        raise UsageError(
            f"'{out.name}' ({out.value.type}) has rows made of an image, as a detector's are: which loss trains it "
            f"cannot be told. Name one (--loss {'|'.join(NAMES)}), or append the model's own to the program"
        )
    more = f" (the first of {len(others)} alike outputs)" if len(others) > 1 else ""
    return kind, f"{kind}, as '{out.name}' {why}{more}"


def _unlike(program: Program, outputs: Sequence[Variable]) -> str:
    kinds = [(v, _natural(program, v)[0] or "mse") for v in outputs]
    choices = ", ".join(f"'{v.name}' {v.value.type} ({kind})" for v, kind in kinds[:8])
    more = f" and {len(kinds) - 8} more" if len(kinds) > 8 else ""
    v, kind = kinds[0]
    return (
        f"the model has {len(outputs)} unlike outputs: {choices}{more}; which loss trains it cannot be told. Name one "
        f"and its output, such as --loss {kind}:{v.name} (rc.losses.{kind}(program['{v.name}'])), or append a sum of "
        "losses"
    )


def _natural(program: Program, out: Variable) -> tuple[str, str]:
    """The loss for an output by its form, and why; "" where it would be a guess."""
    step_of = steps_of(program.block)
    kind = scores_of(out.name, step_of).kind
    if kind in ("Softmax", "LogSoftmax"):
        return "cross_entropy", f"is made by {kind}"
    if kind == "Sigmoid":
        return "bce", f"is made by {kind}"
    if any(v.value.type == out.value.type for v in program.inputs):
        return "mse", "has the shape of an input"
    if out.value.ndim in (3, 5) and any(v.value.ndim == 4 and v.value.type.is_float for v in program.inputs):
        step = step_of(before_moves(out.name, step_of)[1])
        if step is not None and step.kind in ("Concat", "Conv"):  # boxes beside scores, or anchors of a map
            return "", ""
    if name := _open_last(program, out):
        return "mse", f"has the open dimension '{name}' last"
    if out.value.ndim in (2, 3) and out.shape[-1] > 1:
        return "cross_entropy", f"has {out.shape[-1]} scores in its last dimension"
    if _labels_pixels(program, out):
        return "cross_entropy", f"has {out.shape[1]} scores for every pixel of an image"
    return "mse", f"is {out.value.type} and not made by Softmax or Sigmoid"


def _open_last(program: Program, out: Variable) -> str:
    """The name of an output's last dimension, where an input has it too: no number of classes; "" elsewhere."""
    if program.source is None:
        return ""
    graph = program.source.graph
    there = {d.dim_param for i in graph.input for d in i.type.tensor_type.shape.dim}
    dims: Sequence[Any] = next((o.type.tensor_type.shape.dim for o in graph.output if o.name == out.name), [])
    return dims[-1].dim_param if len(dims) and dims[-1].dim_param in there - {"", "?"} else ""


def _labels_pixels(program: Program, out: Variable) -> bool:
    """Whether an output [N, C, H, W] has other channels than an input image, and more than half of its size."""
    if out.value.ndim != 4 or out.shape[1] < 2:
        return False
    images = [v.shape for v in program.inputs if v.value.ndim == 4 and v.value.type.is_float]
    channels, height, width = out.shape[1:]
    return any(c != channels and h < 2 * height and w < 2 * width for _, c, h, w in images)


def _elementwise(
    formula: Any,
    output: Variable | Program,
    label: Variable | str | None,
    *,
    name: str = "loss",
    label_name: str = "label",
    reduction: str = "mean",
    extra: Sequence[str] = (),
) -> Variable:
    """A loss whose label has the output's type, from a formula for each element."""
    return _of(LossBuilder(output, name, reduction, extra), formula, label, label_name=label_name)


def _of(
    loss: LossBuilder, formula: Any, label: Variable | str | None, *, label_name: str = "label", **_: Any
) -> Variable:
    x = loss.wide()
    y = loss.label(label, label_name, x.type)
    return loss.reduce(formula(loss.b, x, y))


def _huber(b: Builder, x: Value, y: Value, limit: float, factor: float) -> Value:
    """factor·m·(d - m/2) with d = |x - y|, m = min(d, limit): both cases without a branch."""
    d = b.Abs(b.Sub(x, y))
    m = b.Min(d, b.constant(limit, x))
    value = b.Mul(m, b.Sub(d, b.Mul(m, b.constant(0.5, x))))
    return value if factor == 1 else b.Mul(value, b.constant(factor, x))


def _class_axis(loss: LossBuilder, axis: int | None) -> int:
    x = loss.x
    if not x.ndim:
        raise UsageError(f"'{x.name}' is a scalar: it has no class axis")
    if axis is not None:
        expect("axis", axis, (int, np.integer), "a whole number")
    if axis is None:
        axis = 1 if x.ndim in (2, 4, 5) else -1
    if not -x.ndim <= axis < x.ndim:
        raise UsageError(f"axis {axis} is out of range: '{x.name}' is {x.type}")
    axis %= x.ndim
    if x.shape[axis] < 2:
        raise UsageError(f"'{x.name}' ({x.type}) has fewer than two classes along axis {axis}: use bce or mse")
    return axis


def _indexed(
    loss: LossBuilder,
    op: str,
    label: Any,
    label_name: str,
    axis: int | None,
    ignore_index: int | None,
    weight: Any,
    smoothing: float = 0.0,
) -> Variable:
    """A loss with class indices: the class axis is moved to axis 1, where ONNX expects it."""
    axis = _class_axis(loss, axis)
    b, x = loss.b, loss.wide()
    classes = x.shape[axis]
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    y = loss.label(label, label_name, TensorType("i64", shape))
    if axis != 1 and axis == x.ndim - 1:
        rows = math.prod(shape)
        x, y = reshape(b, x, (rows, classes)), reshape(b, y, (rows,))
    elif axis != 1:
        first, *others = (i for i in range(x.ndim) if i != axis)
        x = b.Transpose(x, perm=(first, axis, *others))
    attributes = {} if ignore_index is None else {"ignore_index": ignore_index}
    weights = [] if weight is None else [_class_weight(loss, weight, classes, x)]
    apply = functools.partial(getattr(b, op), x, y, *weights, reduction=loss.reduction, **attributes)
    value = _smoothed(loss, apply(want=2), y, weights, ignore_index, smoothing) if smoothing else apply()
    if loss.reduction == "none" and value.shape != shape:
        value = b.Reshape(value, shape=shape)
    return loss.finish(value)


def _smoothed(
    loss: LossBuilder, made: tuple[Value, Value], y: Value, weights: list[Value], ignore_index: int | None, share: float
) -> Value:
    """(1 - share)·loss + share·(the mean over the classes of what the loss would be with their label).

    As in PyTorch, a mean divides by the same number in both: the sum of the labels' weights.
    """
    (value, log_prob), b = made, loss.b
    classes = log_prob.shape[1]
    ones = (1,) * (log_prob.ndim - 2)
    weighted = log_prob if not weights else b.Mul(log_prob, reshape(b, weights[0], (classes, *ones)))
    even = b.Neg(b.ReduceSum(weighted, axes=(1,), keepdims=0))
    zero = b.constant(0, even)
    ignored = None if ignore_index is None else b.Equal(y, b.constant(ignore_index, y))
    if ignored is not None:
        even = b.Where(ignored, zero, even)
    if loss.reduction != "none":
        even = b.ReduceSum(even, keepdims=0)
    if loss.reduction == "mean":
        even = b.Div(even, _count(b, y, ignored, weights, even))
    return b.Add(b.Mul(value, b.constant(1 - share, value)), b.Mul(even, b.constant(share / classes, even)))


def _count(b: Builder, y: Value, ignored: Value | None, weights: list[Value], like: Value) -> Value:
    """The sum of the weights of the labels that count."""
    if ignored is None:
        return b.ReduceSum(b.Gather(weights[0], y, axis=0), keepdims=0) if weights else b.constant(y.size, like)
    each = b.constant(1, like)
    if weights:
        each = b.Gather(weights[0], b.Where(ignored, b.constant(0, y), y), axis=0)
    return b.ReduceSum(b.Where(ignored, b.constant(0, like), each), keepdims=0)


def _share(name: str, value: Any) -> float:
    """A number from 0 to 1.  UsageError for others."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)) or not 0 <= value <= 1:
        raise UsageError(f"{name} must be a number from 0 to 1, not {value!r}")
    return float(value)


def _class_weight(loss: LossBuilder, weight: Any, classes: int, x: Value) -> Value:
    if isinstance(weight, Variable):
        return weight.value
    array = np.asarray(weight)
    if array.shape != (classes,):
        raise UsageError(f"weight must have one number for each of the {classes} classes, not shape {array.shape}")
    return loss.buffer(f"{loss.name}.weight", array, x)


def _soft_cross_entropy(
    loss: LossBuilder,
    label: Any,
    label_name: str,
    axis: int | None,
    weight: Any,
    ignore_index: int | None,
    smoothing: float,
) -> Variable:
    """-Σ weight·label·log softmax(x) over the classes; a mean divides by the number of labels, as in PyTorch."""
    if ignore_index is not None and ignore_index >= 0:
        raise UsageError(
            f"cross_entropy: ignore_index {ignore_index} needs class indices as labels, but soft_label takes "
            "probabilities; leave one of them out"
        )
    axis = _class_axis(loss, axis)
    b, x = loss.b, loss.wide()
    classes = x.shape[axis]
    y = loss.label(label, label_name, x.type)
    if smoothing:
        y = b.Add(b.Mul(y, b.constant(1 - smoothing, y)), b.constant(smoothing / classes, y))
    terms = b.Mul(y, b.LogSoftmax(x, axis=axis))
    if weight is not None:
        ones = (1,) * (x.ndim - 1 - axis)
        terms = b.Mul(terms, reshape(b, _class_weight(loss, weight, classes, x), (classes, *ones)))
    each = b.Neg(b.ReduceSum(terms, axes=(axis,), keepdims=0))
    return loss.reduce(each)
