"""Kernels between the products of the head's loss: rows of a tile of logits to what is known of them, and to gradients.

`t`: a logit as it comes from the product becomes cap · tanh(scale · (logit + bias) / cap).  A row's label is `at`, -1
where it counts for nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...shared.trouble import LABEL_OUTSIDE
from ..device.kernel import C_TYPES, REPORT, Kernel
from .rows import head, kind


@dataclass(frozen=True)
class Logits:
    """How logits are stored: elements of `dtype` (float or double), and the type of the bias; `warp`: rows are warps'.

    `bias`, `caps`, `scales`: what is done to them.
    """

    dtype: str
    word: str
    warp: bool
    bias: bool
    caps: bool
    scales: bool

    @property
    def value(self) -> str:
        """The expression of a logit `t` of word `first_word` + j."""
        logit = "(t + (A)widen(bias[first_word + j]))" if self.bias else "t"
        if self.caps:
            return f"tanh_of({logit} * (A)(scale / cap)) * (A)cap"
        return f"{logit} * (A)scale" if self.scales else logit

    @property
    def changes(self) -> bool:
        """Whether anything is."""
        return self.bias or self.caps or self.scales

    @property
    def name(self) -> str:
        """A part of kernels' names."""
        flags = (("bias", self.bias), ("cap", self.caps), ("scale", self.scales))
        return "_".join([self.dtype, self.word, kind(self.warp), *(n for n, x in flags if x)])


@functools.cache
def beginning(dtype: str, label: str) -> Kernel:
    """Labels to `at`, outside ones reported; of each row no logit was seen."""
    c = C_TYPES[dtype]
    body = f"""    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const long long label = labels[row];
    const bool counts = !(ignore && label == ignored), inside = label >= 0 && label < words;
    if (counts && !inside) report(status, {LABEL_OUTSIDE}, label, words);
    at[row] = counts && inside ? label : -1;
    if (!stats) return;
    stats[row] = -infinity<{c}>();
    for (int i = 1; i < 4; i++) stats[i * rows + row] = 0;
"""
    parameters = f"const {C_TYPES[label]}* labels, long long* at, {c}* stats, long long rows, long long words, "
    parameters += "long long ignored, int ignore, long long* status"
    return Kernel(f"head_begin_{dtype}_{label}", parameters, body, REPORT)


@functools.cache
def counting(dtype: str) -> Kernel:
    """How many labels count, by one block; 1 unless `mean`."""
    body = f"""    {C_TYPES[dtype]} found = 0;
    for (long long i = threadIdx.x; i < rows; i += blockDim.x) found += at[i] >= 0;
    found = block_reduce(found, Plus());
    if (threadIdx.x == 0) *norm = mean ? found : 1;
"""
    return Kernel(f"head_count_{dtype}", f"const long long* at, {C_TYPES[dtype]}* norm, long long rows, int mean", body)


@functools.cache
def seeing(logits: Logits) -> Kernel:
    """A slice of the vocabulary: the largest logit, the sum of exponentials, the label's logit, the sum of logits."""
    reduce = f"{kind(logits.warp)}_reduce"
    begin = head(logits.dtype, "base = row * width", warp=logits.warp)
    body = f"""{begin}    A m = -infinity<A>(), sum = 0;
    const long long here = at[row] - first_word;
    for (int j = first; j < width; j += by) {{
        A t = block[base + j];
        {f"block[base + j] = t = {logits.value};" if logits.changes else ""}
        m = larger(m, t);
        sum += t;
        if (j == here) stats[2 * all + row] = t;
    }}
    const A before = stats[row];
    m = larger(before, {reduce}(m, Larger()));
    A s = 0;
    for (int j = first; j < width; j += by) s += exp_of(block[base + j] - m);
    s = {reduce}(s, Plus());
    sum = {reduce}(sum, Plus());
    if (first == 0) {{
        stats[row] = m;
        stats[all + row] = stats[all + row] * exp_of(before - m) + s;
        stats[3 * all + row] += sum;
    }}
"""
    parameters = f"{C_TYPES[logits.dtype]}* block, const {C_TYPES[logits.word]}* bias, const long long* at, "
    parameters += f"{C_TYPES[logits.dtype]}* stats, long long rows, long long all, int width, long long first_word, "
    return Kernel(f"head_see_{logits.name}", f"{parameters}double scale, double cap", body)


@functools.cache
def finishing(dtype: str) -> Kernel:
    """Rows' log-sum-exps and losses, behind the other numbers of a row."""
    body = f"""    typedef {C_TYPES[dtype]} A;
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const A known = log_of(stats[all + row]) + stats[row];
    A loss = known - stats[2 * all + row] * (A)(1 - smoothing);
    if (smoothing) loss -= stats[3 * all + row] * (A)(smoothing / words);
    if (z_loss) loss += known * known * (A)z_loss;
    stats[4 * all + row] = known;
    stats[5 * all + row] = at[row] < 0 ? 0 : loss;
    if (lse) lse[row] = known;
    if (losses) losses[row] = stats[5 * all + row];
"""
    c = C_TYPES[dtype]
    parameters = f"{c}* stats, const long long* at, {c}* lse, {c}* losses, long long rows, long long all, "
    return Kernel(f"head_finish_{dtype}", f"{parameters}long long words, double smoothing, double z_loss", body)


@functools.cache
def adding(dtype: str) -> Kernel:
    """The sum of all losses, divided by their number, by one block."""
    c = C_TYPES[dtype]
    body = f"""    {c} sum = 0;
    for (long long i = threadIdx.x; i < rows; i += blockDim.x) sum += losses[i];
    sum = block_reduce(sum, Plus());
    if (threadIdx.x == 0) *out = sum / *norm;
"""
    return Kernel(f"head_add_{dtype}", f"const {c}* losses, const {c}* norm, {c}* out, long long rows", body)


@functools.cache
def differentiating(logits: Logits, out: str, *, ready: bool) -> Kernel:
    """share · (softmax · (1 + 2 z lse) - even - onehot) · slope; `ready`: the logits are what they are to be."""
    change = f"t = {logits.value};" if logits.changes and not ready else ""
    slope = "const A part = t / (A)cap;\n        g *= 1 - part * part;" if logits.caps else ""
    begin = head(logits.dtype, "base = row * width", warp=logits.warp)
    body = f"""{begin}    const long long here = at[row] - first_word;
    const A known = lse[row], factor = 1 + known * (A)(2 * z_loss), even = (A)(smoothing / words);
    const A share = at[row] < 0 ? 0 : (down ? down[single ? row : 0] : 1) / *norm;
    for (int j = first; j < width; j += by) {{
        A t = block[base + j];
        {change}
        A g = exp_of(t - known) * factor - even;
        if (j == here) g -= (A)(1 - smoothing);
        g *= share;
        {slope}
        {"g *= (A)scale;" if logits.scales else ""}
        out[base + j] = narrow<{C_TYPES[out]}>(g);
    }}
"""
    c = C_TYPES[logits.dtype]
    parameters = f"const {c}* block, const {C_TYPES[logits.word]}* bias, const long long* at, const {c}* lse, "
    parameters += f"const {c}* down, const {c}* norm, {C_TYPES[out]}* out, long long rows, int width, "
    parameters += "long long first_word, long long words, int single, double scale, double cap, double smoothing, "
    name = f"head_differentiate_{logits.name}_{out}{'_ready' if ready else ''}"
    return Kernel(name, f"{parameters}double z_loss", body)


@functools.cache
def column_sums(dtype: str, out: str) -> Kernel:
    """Adds the rows of [rows, width] to `out`, or begins there; a thread a column."""
    body = f"""    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= width) return;
    {C_TYPES[out]} sum = begins ? 0 : out[j];
    for (long long i = 0; i < rows; i++) sum += widen(x[i * width + j]);
    out[j] = sum;
"""
    parameters = f"const {C_TYPES[dtype]}* x, {C_TYPES[out]}* out, long long rows, int width, int begins"
    return Kernel(f"head_columns_{dtype}_{out}", parameters, body, threads=128)


@functools.cache
def narrowing(source: str, target: str) -> Kernel:
    """[size / width, width] to rows that are `lead` elements apart."""
    body = f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) y[i / width * lead + i % width] = narrow<{C_TYPES[target]}>(x[i]);
"""
    parameters = f"const {C_TYPES[source]}* x, {C_TYPES[target]}* y, long long size, long long width, long long lead"
    return Kernel(f"head_narrow_{source}_{target}", parameters, body)
