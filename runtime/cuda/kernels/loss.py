"""Cross entropy and negative log-likelihood on class labels, and their gradients: a warp or a block for each label.

Scores are seen as [N, C, D] (D: the axes behind the classes), element j of a label's row at base + j · D.  Losses and
weights are double, one a label, and one block adds them in a fixed order.  A label outside of the classes is reported
(see `kernel.STATUS`) and counts for nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import TensorType
from ...shared.trouble import LABEL_OUTSIDE
from ..code.rows import by_warp, head, kind, over_rows
from ..device.kernel import C_TYPES, COMPUTE, REPORT, STATUS, Buffer, Call, Kernel
from ..families import Buffers, Family, family
from .loops import converted

#: the weight of a label: 0 if it is ignored, or outside, which is reported
_WEIGHT = f"""{REPORT}
template <class T, class L> DEVICE double weight(const T* weights, L label, long long ignored, int ignore, int classes,
                                                 long long* status)
{{
    if (ignore && label == ignored) return 0;
    if (label < 0 || label >= classes) {{
        report(status, {LABEL_OUTSIDE}, label, classes);
        return 0;
    }}
    return weights ? (double)widen(weights[label]) : 1.0;
}}
"""
_RULE = "long long ignored, int ignore, int classes, long long inner, long long* status"


#: where a label's row begins
_BASE = "base = row / inner * inner * classes + row % inner"


@functools.cache
def cross_entropy(dtype: str, label: str, *, warp: bool, keeps: bool) -> Kernel:
    """Rows to their losses; `keeps`: their log-probabilities too."""
    c, reduce = C_TYPES[dtype], f"{kind(warp)}_reduce"
    body = (
        head(dtype, _BASE, warp=warp)
        + f"""    A m = -infinity<A>();
    for (int j = first; j < classes; j += by) m = larger(m, widen(x[base + j * inner]));
    m = {reduce}(m, Larger());
    A s = 0;
    for (int j = first; j < classes; j += by) s += exp_of(widen(x[base + j * inner]) - m);
    s = log_of({reduce}(s, Plus()));
    const {C_TYPES[label]} at = labels[row];
    const double w = weight(weights, at, ignored, ignore, classes, status);
    const bool counts = at >= 0 && at < classes && !(ignore && at == ignored);
    if (first == 0) {{
        label_weights[row] = w;
        if (!counts) losses[row] = 0;
    }}
    for (int j = first; j < classes; j += by) {{
        {"const A l = (widen(x[base + j * inner]) - m) - s;" if keeps else ""}
        {"log_prob[base + j * inner] = narrow<T>(l);" if keeps else ""}
        if (counts && j == at) losses[row] = -w * {"l" if keeps else "((widen(x[base + j * inner]) - m) - s)"};
    }}
"""
    )
    kept = f"{c}* log_prob, " if keeps else ""
    return Kernel(
        f"cross_entropy_{dtype}_{label}_{kind(warp)}{'_kept' if keeps else ''}",
        f"const {c}* x, const {C_TYPES[label]}* labels, const {c}* weights, {kept}double* losses, "
        f"double* label_weights, long long rows, {_RULE}",
        body,
        _WEIGHT,
    )


@functools.cache
def likelihood(dtype: str, label: str) -> Kernel:
    """Losses of log-probabilities, a thread for each label."""
    c = C_TYPES[dtype]
    body = f"""    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const {C_TYPES[label]} at = labels[row];
    const double w = weight(weights, at, ignored, ignore, classes, status);
    label_weights[row] = w;
    const bool counts = at >= 0 && at < classes && !(ignore && at == ignored);
    losses[row] = counts ? -w * widen(x[row / inner * inner * classes + row % inner + at * inner]) : 0;
"""
    return Kernel(
        f"likelihood_{dtype}_{label}",
        f"const {c}* x, const {C_TYPES[label]}* labels, const {c}* weights, double* losses, double* label_weights, "
        f"long long rows, {_RULE}",
        body,
        _WEIGHT,
    )


@functools.cache
def reduced(dtype: str, *, mean: bool) -> Kernel:
    """One number a label to their sum, or weighted mean; one block."""
    body = f"""    double s = 0, w = 0;
    for (long long i = threadIdx.x; i < rows; i += blockDim.x) {{
        s += losses[i];
        w += label_weights[i];
    }}
    s = block_reduce(s, Plus());
    w = block_reduce(w, Plus());
    if (threadIdx.x == 0) out[0] = narrow<{C_TYPES[dtype]}>({"s / w" if mean else "s"});
"""
    parameters = f"const double* losses, const double* label_weights, {C_TYPES[dtype]}* out, long long rows"
    return Kernel(f"{'mean' if mean else 'sum'}_loss_{dtype}", parameters, body, threads=1024)


@functools.cache
def scales(dtype: str, label: str) -> Kernel:
    """The gradient of each label's plain loss; `count`: they are divided by their weights' sum.  One block."""
    body = """    double s = 0;
    for (long long i = threadIdx.x; i < rows; i += blockDim.x) {
        const double w = weight(weights, labels[i], ignored, ignore, classes, status);
        out[i] = w;
        s += w;
    }
    s = block_reduce(s, Plus());
    for (long long i = threadIdx.x; i < rows; i += blockDim.x)
        if (out[i] != 0) out[i] = out[i] * widen(dloss[each ? i : 0]) / (count && s != 0 ? s : 1.0);
"""
    c = C_TYPES[dtype]
    return Kernel(
        f"label_scales_{dtype}_{label}",
        f"const {C_TYPES[label]}* labels, const {c}* weights, const {c}* dloss, double* out, long long rows, "
        f"int count, int each, {_RULE}",
        body,
        _WEIGHT,
        threads=1024,
    )


@functools.cache
def cross_entropy_gradient(dtype: str, label: str, *, warp: bool) -> Kernel:
    """scale · (exp(log_prob) - 1 at the label)."""
    body = (
        head(dtype, _BASE, warp=warp)
        + f"""    const A scale = (A)scales[row];
    const {C_TYPES[label]} at = labels[row];
    for (int j = first; j < classes; j += by) {{
        const A l = widen(log_prob[base + j * inner]);
        out[base + j * inner] = narrow<T>((j == at ? {"expm1f" if COMPUTE[dtype] == "float" else "expm1"}(l)
                                                   : exp_of(l)) * scale);
    }}
"""
    )
    c = C_TYPES[dtype]
    return Kernel(
        f"cross_entropy_gradient_{dtype}_{label}_{kind(warp)}",
        f"const {c}* log_prob, const {C_TYPES[label]}* labels, const double* scales, {c}* out, long long rows, "
        "int classes, long long inner",
        body,
    )


@functools.cache
def likelihood_gradient(dtype: str, label: str) -> Kernel:
    """-scale at the label, else 0: a thread for each element of [N, C, D]."""
    c = C_TYPES[dtype]
    body = f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * classes) return;
    const long long row = i / (classes * inner) * inner + i % inner;
    const long long j = i / inner % classes;
    out[i] = narrow<{c}>(({COMPUTE[dtype]})(j == labels[row] ? -scales[row] : 0.0));
"""
    return Kernel(
        f"likelihood_gradient_{dtype}_{label}",
        f"const {C_TYPES[label]}* labels, const double* scales, {c}* out, long long rows, int classes, long long inner",
        body,
    )


class LabelLosses(Family):
    """The base of the families of losses and their gradients."""

    def accepts(self, op: Operator) -> bool:
        kinds = {v.dtype for v in (*op.reads(), *op.writes()) if v.type.is_float}
        return len(kinds) == 1 and kinds <= {"f16", "bf16", "f32", "f64"}

    def form(self, op: Operator) -> tuple[int, int, int]:
        """N · D, C, D; where the classes come last, N counts all rows and D is 1."""
        scores = max((*op.reads(), *op.writes()), key=lambda v: (v.ndim, v.type.is_float))
        if op.op.name == "NegativeLogLikelihoodGrad":
            assert op.outputs[0] is not None
            scores = op.outputs[0]
        n, classes, *inner = scores.shape
        if op.op.name.startswith("ChannelsLast"):
            return math.prod(scores.shape[:-1]), scores.shape[-1], 1
        return n * math.prod(inner), classes, math.prod(inner)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        return (TensorType("f64", (2, self.form(op)[0])),)

    def rule(self, op: Operator) -> tuple[Any, ...]:
        """The arguments of `_RULE`."""
        rule: Any = op.op
        _, classes, inner = self.form(op)
        ignored = rule.ignore_index
        return 0 if ignored is None else ignored, int(ignored is not None), classes, max(inner, 1), STATUS


@family("SoftmaxCrossEntropyLoss", "ChannelsLastSoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
class Losses(LabelLosses):
    """(scores, labels, weights?) → the loss, log-probabilities."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """The labels' losses, then their sum."""
        rows, classes, _ = self.form(op)
        rule: Any = op.op
        x, labels, weights = ins[:3]
        out, kept = outs[:2]
        assert x is not None and labels is not None and out is not None
        losses, label_weights = scratch[0].at(0, [rows]), scratch[0].at(rows, [rows])
        tail = (losses, label_weights, rows, *self.rule(op))
        if "Softmax" not in op.op.name:
            first = likelihood(x.dtype, labels.dtype)(rows, x, labels, weights, *tail)
        else:
            warp = by_warp(classes)
            k = cross_entropy(x.dtype, labels.dtype, warp=warp, keeps=kept is not None)
            arguments = (x, labels, weights, *([kept] if kept is not None else []), *tail)
            first = over_rows(k, rows, arguments, warp=warp)
        if rule.reduction == "none":
            return [first, *converted(losses, out.reshape(-1))]
        last = reduced(out.dtype, mean=rule.reduction == "mean")
        return [first, last.blocks(1, args=(losses, label_weights, out, rows))]


@family("SoftmaxCrossEntropyGrad", "ChannelsLastSoftmaxCrossEntropyGrad", "NegativeLogLikelihoodGrad")
class LossGradients(LabelLosses):
    """(log_prob, labels, weights?, dloss), and the same without log_prob, → the gradient of the scores."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """The labels' scales, then their rows."""
        rows, classes, inner = self.form(op)
        rule: Any = op.op
        soft = "Softmax" in op.op.name
        labels, weights, dloss = ins[1:4] if soft else ins[:3]
        out = outs[0]
        assert labels is not None and out is not None
        if not out.size:
            return []
        scale = scratch[0].at(0, [rows])
        arguments = (labels, weights, dloss, scale, rows, int(rule.reduction == "mean"), int(rule.reduction == "none"))
        first = scales(out.dtype, labels.dtype).blocks(1, args=(*arguments, *self.rule(op)))
        if not soft:
            k = likelihood_gradient(out.dtype, labels.dtype)
            return [first, k(out.size, labels, scale, out, rows, classes, max(inner, 1))]
        warp = by_warp(classes)
        k = cross_entropy_gradient(out.dtype, labels.dtype, warp=warp)
        args = (ins[0], labels, scale, out, rows, classes, max(inner, 1))
        return [first, over_rows(k, rows, args, warp=warp)]
