"""The CTC loss and its gradient: a block for each sample, a thread for some of its label's states.

The recursion is that of recompute/ops/loss/ctc.py.  Rows of states have two more numbers: α two impossible ones before
them, β two after them.  Gradients of a step are added by one thread, in the states' order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ....language.ir import Operator
from ....language.types import TensorType, need
from ....ops.loss.ctc import IMPOSSIBLE, NEVER, CTCLoss, CTCLossGrad
from ...shared.trouble import LABEL_IS_BLANK, LABEL_OUTSIDE, LENGTH_OUTSIDE
from ..device.kernel import C_TYPES, REPORT, STATUS, Buffer, Call, Kernel
from ..families import Buffers, Family, family

_BEFORE = f"""{REPORT}
// how many entries a label has; -1 for one that cannot be
template <class L> DEVICE int entries_of(const L* labels, int most, long long classes, long long blank,
                                         long long ignored, long long* status)
{{
    for (int i = 0; i < most; i++) {{
        const long long label = labels[i];
        if (label == ignored) return i;
        if (label < 0 || label >= classes) {{
            report(status, {LABEL_OUTSIDE}, label, classes);
            return -1;
        }}
        if (label == blank) {{
            report(status, {LABEL_IS_BLANK}, label, ignored);
            return -1;
        }}
    }}
    return most;
}}

// how many steps of a sample count; -1 for what cannot be
DEVICE int steps_of(long long length, int steps, long long* status)
{{
    if (length >= 0 && length <= steps) return (int)length;
    report(status, {LENGTH_OUTSIDE}, length, steps);
    return -1;
}}

// what the transition to a state over the one before costs
template <class T, class L> DEVICE T cost(const L* labels, int s)
{{
    return s & 1 && (s == 1 || labels[s >> 1] != labels[(s >> 1) - 1]) ? (T)0 : (T){NEVER};
}}

// the log-probability of a state's class; `scores`: of a step
template <class T, class L> DEVICE T emission(const T* scores, const L* labels, long long blank, int s)
{{
    const T value = scores[s & 1 ? (long long)labels[s >> 1] : blank];
    return value < (T){NEVER} ? (T){NEVER} : value;
}}

template <class T> DEVICE T joined(T stay, T step, T jump)
{{
    T most = stay > step ? stay : step;
    most = jump > most ? jump : most;
    return log_of(exp_of(jump - most) + exp_of(stay - most) + exp_of(step - most)) + most;
}}

template <class T> DEVICE T total_of(const T* last, int width)
{{
    const T a = last[width + 1], b = last[width], most = a > b ? a : b;
    return log_of(exp_of(a - most) + exp_of(b - most)) + most;
}}
"""
#: the beginning of both texts; `rows` of α: RING (2, or one more than steps)
_BEGIN = """    __shared__ int counts[2];
    const long long n = blockIdx.x, apart = samples * classes;
    labels += n * entries_most;
    x += n * classes;
    alpha += n * RING * (2 * entries_most + 3);
    if (threadIdx.x == 0) {
        counts[0] = entries_of(labels, entries_most, classes, blank, ignored, status);
        counts[1] = lengths ? steps_of(lengths[n], steps_most, status) : steps_most;
    }
    __syncthreads();
    const int entries = counts[0], steps = counts[1], width = 2 * entries + 1, row = 2 * entries_most + 3;
"""
_ALPHA = f"""    for (int s = threadIdx.x; s < width + 2; s += blockDim.x) alpha[s] = s == 1 ? (T)0 : (T){NEVER};
    __syncthreads();
    for (int t = 0; t < steps; t++) {{
        const T* from = alpha + (long long)(t % RING) * row;
        T* to = alpha + (long long)((t + 1) % RING) * row;
        if (threadIdx.x < 2) to[threadIdx.x] = (T){NEVER};
        for (int s = threadIdx.x; s < width; s += blockDim.x)
            to[s + 2] = joined(from[s + 2], from[s + 1], from[s] + cost<T>(labels, s))
                      + emission(x + t * apart, labels, blank, s);
        __syncthreads();
    }}
    const T total = total_of(alpha + (long long)(steps % RING) * row, width);
"""
_LOSS = f"""    if (entries < 0 || steps < 0) {{
        if (threadIdx.x == 0) out[n] = 0;
        return;
    }}
{_ALPHA}    if (threadIdx.x == 0)
        out[n] = total < (T){IMPOSSIBLE} ? (zero_infinity ? (T)0 : infinity<T>()) : -total;
"""
_GRADIENT = f"""    dx += n * classes;
    for (int t = 0; t < steps_most; t++)
        for (long long c = threadIdx.x; c < classes; c += blockDim.x) dx[t * apart + c] = 0;
    if (entries < 0 || steps < 0) return;
{_ALPHA}    if (total < (T){IMPOSSIBLE}) return;
    beta += n * 2 * row;
    for (int s = threadIdx.x; s < row; s += blockDim.x)
        beta[s] = beta[row + s] = s == width - 1 || (s == width - 2 && entries) ? (T)0 : (T){NEVER};
    __syncthreads();
    for (int t = steps - 1; t >= 0; t--) {{
        T *after = beta + (t & 1) * row, *before = beta + ((t + 1) & 1) * row;
        if (t + 1 < steps) {{
            for (int s = threadIdx.x; s < width; s += blockDim.x)
                after[s] += emission(x + (t + 1) * apart, labels, blank, s);
            __syncthreads();
            for (int s = threadIdx.x; s < width; s += blockDim.x)
                before[s] = joined(after[s], after[s + 1], after[s + 2]
                                   + (s + 2 < width ? cost<T>(labels, s + 2) : (T){NEVER}));
        }}
        T* here = alpha + (long long)(t + 1) * row + 2;
        for (int s = threadIdx.x; s < width; s += blockDim.x) {{
            const T share = here[s] + before[s] - total;
            here[s] = exp_of(share > 0 ? (T)0 : share) * -dloss[n];
        }}
        __syncthreads();
    }}
    for (int t = threadIdx.x; t < steps; t += blockDim.x)
        for (int s = 0; s < width; s++)
            dx[t * apart + (s & 1 ? (long long)labels[s >> 1] : blank)] += alpha[(long long)(t + 1) * row + 2 + s];
"""
_SIZES = "int steps_most, long long samples, long long classes, int entries_most, long long blank, long long ignored"


@functools.cache
def _kernel(dtype: str, label: str, length: str, *, gradient: bool) -> Kernel:
    """The kernel for these element types."""
    t = C_TYPES[dtype]
    inputs = f"const {t}* x, const {C_TYPES[label]}* labels, const {C_TYPES[length]}* lengths, {t}* alpha"
    outputs = f"const {t}* dloss, {t}* dx, {t}* beta" if gradient else f"{t}* out, int zero_infinity"
    text = (_BEGIN + (_GRADIENT if gradient else _LOSS)).replace("RING", "(steps_most + 1)" if gradient else "2")
    name = f"ctc_{'gradient' if gradient else 'loss'}_{dtype}_{label}_{length}"
    return Kernel(
        name, f"{inputs}, {outputs}, {_SIZES}, long long* status", f"    using T = {t};\n{text}", _BEFORE, 128
    )


class Samples(Family):
    """The base of both families."""

    def accepts(self, op: Operator) -> bool:
        """All that the operators take."""
        return True

    def rows(self, op: Operator, count: int) -> TensorType:
        """Rows of states."""
        x, (n, s) = need(op.inputs[0]), need(op.inputs[1]).shape
        return TensorType(x.dtype, (n, count, 2 * s + 3))

    def launch(self, ins: Buffers, alpha: Buffer, own: Sequence[Buffer | int], rule: CTCLoss | CTCLossGrad) -> Call:
        """One launch of these operands: alpha, then what a loss or a gradient has beside it, then the options."""
        x, labels, lengths = need(ins[0]), need(ins[1]), ins[2]
        length = "i64" if lengths is None else lengths.dtype
        kernel = _kernel(x.dtype, labels.dtype, length, gradient=isinstance(rule, CTCLossGrad))
        sizes = (*x.shape, labels.shape[1], rule.blank, rule.ignore_index)
        return kernel.blocks(x.shape[1], args=(x, labels, lengths, alpha, *own, *sizes, STATUS))


@family("CTCLoss")
class Losses(Samples):
    """(log-probabilities, labels, lengths?) → losses."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """α of two steps."""
        return (self.rows(op, 2),)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule = op.of(CTCLoss)
        return [self.launch(ins, scratch[0], (need(outs[0]), int(rule.zero_infinity)), rule)]


@family("CTCLossGrad")
class Gradients(Samples):
    """(log-probabilities, labels, lengths?, dloss) → their gradient."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """α of all steps and before them; β of two."""
        return self.rows(op, need(op.inputs[0]).shape[0] + 1), self.rows(op, 2)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        return [self.launch(ins, scratch[0], (need(ins[3]), need(outs[0]), scratch[1]), op.of(CTCLossGrad))]
