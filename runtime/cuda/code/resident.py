"""The kernel of all steps of a recurrent operator, or of its gradient: blocks stay, and their weights in registers.

A block has UNITS of the hidden units and, one after the other, parts of the batch of ROWS rows; UNITS · ROWS = 128.
Before a step it waits for the blocks of all other units to have written this part's step before (a counter for each
part, which is 0 at first); while it does, it has other parts to compute.  No part waits for another one.

A lane multiplies a share of the terms by 8 results of rows and units (for each gate), which the lanes of a warp then
add up in halves: after `fold`, every second lane has the sums of one row and unit, and computes that element.  The
order of sums depends on the sizes of the network only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....language.types import TensorType
from ..device.kernel import C_TYPES, Buffer, Kernel
from . import recurrent

if TYPE_CHECKING:
    from ....ops.recurrent.shared import Recurrent

THREADS = 256
#: multiplications and additions of a step's product, up to which one kernel has all steps: about what a device
#: multiplies while it begins two kernels
_SMALL = 1 << 27
#: weights in registers of a thread, at most
_HELD = 128
#: numbers between counters: a line of the cache each
APART = 32
_BEFORE = """
#ifndef EMULATED
#define SHARED(type, name, size) __shared__ type name[size]
DEVICE void await_count(const unsigned* p, unsigned n) { while (*(const volatile unsigned*)p < n); }
#endif
// row number `row` of `size` elements each
template <class T> DEVICE T* at(T* x, int row, int size) { return x + (long long)row * size; }
// COUNT values of each of 2 * MASK lanes become the sums of COUNT / MASK of them: those that the lane's number says
template <int COUNT, int MASK, class A> DEVICE void fold(A* v)
{
    const bool upper = threadIdx.x & MASK;
    if constexpr (MASK > 1) {
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            const A mine = upper ? v[i + COUNT / 2] : v[i], other = upper ? v[i] : v[i + COUNT / 2];
            v[i] = mine + __shfl_xor_sync(0xffffffffu, other, MASK);
        }
        fold<COUNT / 2, MASK / 2>(v);
    } else
#pragma unroll
        for (int i = 0; i < COUNT; i++) v[i] += __shfl_xor_sync(0xffffffffu, v[i], 1);
}
"""
_BODY = """    typedef @T T;
    typedef @A A;
    // a lane's units, its results of each, and vectors of four terms of each; lanes that share the terms
    constexpr int UNITS = @LANES * @UNITS / @THREADS, RESULTS = @RESULTS, TURNS = @TURNS, LANES = @LANES, ROWS = @ROWS;
    typedef Pack<A, 4> Four;
    SHARED(Four, tile, 4 * TURNS * LANES);
    constexpr int n = @SIZE, TERMS = @TERMS;
    const int lane = threadIdx.x & 31, share = lane % LANES, own = (threadIdx.x / LANES) * UNITS;
    const int j = blockIdx.x * @UNITS + threadIdx.x / 32 * (@UNITS / 8) + lane / 2 / ROWS;
    A w[UNITS * RESULTS][TURNS][4];
#pragma unroll
    for (int c = 0; c < UNITS * RESULTS; c++)
#pragma unroll
        for (int q = 0; q < TURNS * 4; q++) {
            const int unit = blockIdx.x * @UNITS + own + c / RESULTS, term = (q / 4 * LANES + share) * 4 + q % 4;
            w[c][q / 4][q % 4] = unit < n && term < TERMS ? (A)widen(weights[@WEIGHT]) : 0;
        }
@OF_A_UNIT
    for (int k = begin; k < end; k++)
        for (int part = blockIdx.y; part * ROWS < rows; part += gridDim.y) {
            const int t = falling ? steps - 1 - k : k, last = falling ? t + 1 : t - 1;
            const int row = part * ROWS + lane / 2 % ROWS;
            const int i = row * n + j;
            const bool live = row < rows && j < n && lane % 2 == 0, active = live && (!lengths || lengths[row] > t);
@STEP
@DECLARED
            if (live) {
@READ
            }
            A sums[UNITS * ROWS * RESULTS] = {};
            if (met) {
                if (k) {
                    if (threadIdx.x == 0) {
                        await_count(counters + part * @LINE, (unsigned)k * gridDim.x);
                        __threadfence();
                    }
                    __syncthreads();
                }
#pragma unroll
                for (int first = 0; first < ROWS; first += 4) {
                    if (first) __syncthreads();
#pragma unroll
                    for (int some = 0; some < 4 * TURNS * LANES; some += @THREADS) {
                        const int e = some + threadIdx.x;
                        if (e >= 4 * TURNS * LANES) break;
                        const int r = part * ROWS + first + e / (TURNS * LANES), term = e % (TURNS * LANES) * 4;
                        const T* from = met + (long long)r * @APART + term;
                        Four to;
                        for (int p = 0; p < 4; p += @PACK) {
                            Pack<T, @PACK> of = {};
                            if (r < rows && term + p < TERMS) of = *(const Pack<T, @PACK>*)(from + p);
                            for (int o = 0; o < @PACK; o++) to.of[p + o] = widen(of.of[o]);
                        }
                        tile[e] = to;
                    }
                    __syncthreads();
#pragma unroll
                    for (int q = 0; q < TURNS; q++)
#pragma unroll
                        for (int r = 0; r < 4; r++) {
                            const Four left = tile[(r * TURNS + q) * LANES + share];
#pragma unroll
                            for (int c = 0; c < UNITS * RESULTS; c++)
#pragma unroll
                                for (int p = 0; p < 4; p++) {
                                    A& sum = sums[(c / RESULTS * ROWS + first + r) * RESULTS + c % RESULTS];
                                    sum = fma_of(w[c][q][p], left.of[p], sum);
                                }
                        }
                }
                fold<UNITS * ROWS * RESULTS, LANES / 2>(sums);
            }
            const A* acc = sums;
            auto element = [&]() {
                if (!live) return;
@MEET
            };
            element();
            __syncthreads();
            if (threadIdx.x == 0) {
                __threadfence();
                atomicAdd(counters + part * @LINE, 1u);
            }
        }
"""
#: where a step's numbers are, of those of all steps, by the names that the texts of recurrent.py have for them; `met`:
#: the factor of the weights
_FORWARD = """            T *const gates = at(all_gates, t * rows, @RESULTS * n), *const y = at(all_y, t * apart, n);
            T* const h = nullptr;
            const T *const before = k ? at(all_y, last * apart, n) : first_state, *const met = before;"""
_BACKWARD = """            const int later = falling ? t - 1 : t + 1;
            T* const dg = at(all_dg, t * rows, @COLUMNS * n);
            const T* const dy = all_dy ? at(all_dy, t * apart, n) : nullptr;
            const T* const met = k ? at(all_dg, last * rows, @COLUMNS * n) + @FIRST : nullptr;"""
_STEP = {
    "lstm": """            T* const new_cell = at(all_kept, t * kept_apart, n);
            const T* const cell = k ? at(all_kept, last * kept_apart, n) : first_cell;""",
    "rnn": "",
    "gru": """            T* const kept = all_kept ? at(all_kept, t * rows, 4 * n) : nullptr;
            constexpr int linear = 1;""",
    "lstm_back": """            const T* const kept = at(all_kept, t * rows, 4 * n);
            const T* const cell = at(states, t * rows, n);
            const T* const before = k + 1 < steps ? at(states, later * rows, n) : first_state;""",
    "rnn_back": "            const T* const y = at(states, t * apart, n);",
    "gru_back": """            const T* const kept = at(all_kept, t * rows, 4 * n);
            const T* const before = k + 1 < steps ? at(states, later * apart, n) : first_state;""",
}  # fmt: skip
_PARAMETERS = (
    "unsigned* counters, const @L* lengths, const T* weights, T* all_gates, const T* bias, const T* peepholes, "
    "const T* first_cell, T* all_kept, const T* first_state, T* all_y, int kept_apart",
    "unsigned* counters, const @L* lengths, const T* weights, const T* all_kept, const T* peepholes, "
    "const T* first_state, const T* states, const T* all_dy, A* dh, A* dc, T* all_dg",
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a kernel: `gates` results of `n` hidden units forward; back `gates` · n terms, rows of `columns` · n."""

    gates: int
    columns: int
    n: int

    @property
    def units(self) -> int:
        """Hidden units of a block: as many as registers hold the weights of; 0: too few."""
        for units in (32, 16):
            forward = self.gates * -(-self.n * units // (4 * THREADS)) * 4
            if max(forward, units // 8 * -(-self.gates * self.n // 128) * 4) <= _HELD:
                return units
        return 0

    @property
    def rows(self) -> int:
        """Rows of the batch in a part."""
        return 128 // (self.units or 16)

    def grid(self, batch: int) -> tuple[int, int]:
        """Blocks that wait for each other, and parts of the batch."""
        return -(-self.n // self.units), -(-batch // self.rows)

    def counters(self, batch: int) -> TensorType:
        """One for each part of the batch, in a line of its own; zero at first."""
        return TensorType("i32", (self.grid(batch)[1], APART))

    def kernel(self, name: str, dtype: str, lengths: str, activation: str, args: Sequence[Any]) -> Kernel:
        """`all_steps` for these arguments; it reads vectors of 4 if all rows begin at multiples of 4 elements."""
        item = TensorType(dtype, ()).numpy.itemsize
        even = self.n % 4 == 0 and all(b.address % (4 * item) == 0 for b in args if isinstance(b, Buffer))
        absent = tuple(i for i, a in enumerate(args) if a is None)
        return all_steps(name, dtype, lengths, activation, self, 4 if even else 1, absent)


def sizes(forward: Recurrent, x: TensorType, *, masked: bool) -> Sizes | None:
    """The sizes of a kernel for all steps; None if there is none, as for states that change in place (`masked`)."""
    n, linear = forward.hidden_size, getattr(forward, "linear_before_reset", 1)
    small = 2 * x.shape[1] * forward.gates * n * n <= _SMALL
    form = Sizes(forward.gates, 4 if forward.name == "GRU" else forward.gates, n)
    return form if x.dtype != "f64" and linear and not masked and small and form.units else None


@functools.cache
def all_steps(
    name: str, dtype: str, lengths: str, activation: str, of: Sizes, pack: int, absent: tuple[int, ...] = ()
) -> Kernel:
    """All steps: _PARAMETERS forward or back, then (rows, steps, falling, apart, begin, end).

    `apart`: rows between those of two steps.  `lengths`: their element type.  `pack`: 4, or 1 where sizes are no
    multiples of 4 or operands begin elsewhere.  `absent`: which of the parameters have no address: they are constants.
    """
    back = name.endswith("_back")
    terms, lanes = (of.gates * of.n, 32) if back else (of.n, THREADS // of.units)
    unit, declared, read, meet = recurrent.parts(name)
    fill = {
        "@OF_A_UNIT": unit.replace("j]", "min(j, n - 1)]"), "@DECLARED": declared, "@READ": read,
        "@STEP": (_BACKWARD if back else _FORWARD) + "\n" + _STEP[name],
        "@MEET": meet, "@ADD[k]": "+ acc[k]", "@ADD[0]": "+ acc[0]", "@Q": "acc[k]",
        "@KEEP": "if (!active) dh[i] = down;", "@UNITS": str(of.units), "@ROWS": str(of.rows),
        "@LANES": str(lanes), "@RESULTS": "1" if back else str(of.gates), "@TERMS": str(terms),
        "@TURNS": str(-(-terms // (4 * lanes))), "@COLUMNS": str(of.columns),
        "@FIRST": str((of.columns - of.gates) * of.n), "@SIZE": str(of.n),
        "@WEIGHT": "term * n + unit" if back else "(c % RESULTS * n + unit) * n + term",
        "@APART": str(of.columns * of.n) if back else "n", "@LINE": str(APART), "@THREADS": str(THREADS),
        "@PACK": str(pack),
    }  # fmt: skip
    text = _BODY
    for mark in ("@OF_A_UNIT", "@STEP", "@DECLARED", "@READ", "@MEET"):
        text = text.replace(mark, fill.pop(mark))
    types_of = recurrent.typed(_PARAMETERS[back], dtype).replace("@L", C_TYPES[lengths]).split(", ")
    for i in absent:
        kind, star, called = types_of[i].rpartition("*")
        types_of[i] = f"{kind}{star} no_{called[1:]}"
        text = f"    constexpr {kind}{star}{called} = nullptr;\n{text}"
    parameters = ", ".join([*types_of, *(f"int {p}" for p in ("rows", "steps", "falling", "apart", "begin", "end"))])
    title = f"{name}_{of.n}_steps{activation.lower()}_{dtype}"
    return Kernel(title, parameters, recurrent.filled_in(text, dtype, activation, fill),
                  _BEFORE + recurrent.LOGISTIC, THREADS, resident=True)  # fmt: skip
