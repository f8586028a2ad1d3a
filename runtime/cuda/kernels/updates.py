"""Updates that store in fewer bits than they compute in (ops/optimizer/storage.py), bit-identical to NumPy.

A block of threads has 256 elements, a block of 8-bit state; a thread has four of them, which are one block of the
random stream.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from ....language.element import argument
from ....language.ir import Operator
from ....language.types import TensorType, present
from ....ops.optimizer.base import Update
from ....ops.optimizer.storage import BLOCK, ROW, borders, code_book
from ...shared.stored_updates import NAMES, expressions, factors, rule_of
from ..code.expressions import code, literal
from ..code.philox import PHILOX_WORDS
from ..device.kernel import C_TYPES, Buffer, Call, Kernel
from ..families import Buffers, Family, family

#: elements of a thread, and threads
_EACH = 4
_THREADS = BLOCK // _EACH

_FUNCTIONS = """
DEVICE bf16 stochastic(float x, unsigned long long word, int state)
{
    const unsigned bits = __float_as_uint(x), noise = (unsigned)(word >> 16 * state) & 0xffffu;
    const unsigned up = (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : (bits + noise) >> 16;
    bf16 y;
    y.bits = (unsigned short)up;
    return y;
}
DEVICE int code_of(float x, const float* between)
{
    int found = 0;
    for (int half = 128; half; half >>= 1)
        if (!(x <= between[found + half - 1])) found += half;
    return found;
}
"""


def _table(name: str, values: Sequence[float]) -> str:
    return (
        f"    static const float {name}[{len(values)}] = {{{', '.join(literal(float(v), 'f32') for v in values)}}};\n"
    )


@functools.cache
def update(op: Update, types: tuple[TensorType | None, ...]) -> Kernel:
    """The kernel of an update with inputs of these types; `first` and `seed` are the stream's."""
    states = [i for i in op.updates[1:] if types[i] is not None]
    coded = states if op.eight_bits else []
    places = [i for i, t in enumerate(types) if t is not None]
    names = [
        f"s{i}" if i in coded else f"widen(x{i}[i])" if i < 2 or i in states else f"*x{i}" for i in range(len(types))
    ]
    scalars, values = code(factors(op, types), names, "f")
    roots = expressions(op, types, [argument(len(types) + k, "f32") for k in range(len(values))])
    lines, results = code([x for x in roots if x is not None], [*names, *values])
    outputs = dict(zip([0, *states], results, strict=True))
    body = _head(op, coded, types)
    body += "".join(f"    {line}\n" for line in scalars)
    body += f"    for (int j = 0; j < {_EACH}; j++) {{\n        const long long i = start + j;\n"
    body += "        if (i >= n) break;\n"
    for i in coded:
        body += f"        const float s{i} = book{i}[row{i}[4 * threadIdx.x + j]] * scale{i};\n"
    body += "".join(f"        {line}\n" for line in lines)
    for number, i in enumerate(op.updates):
        t = types[i]
        if t is None:
            continue
        if i in coded:
            body += f"        kept{i}[j] = {outputs[i]};\n"
            body += f"        most{i} = larger(most{i}, __float_as_uint({outputs[i]}) & 0x7fffffffu);\n"
        elif op.stochastic:
            body += f"        x{i}[i] = stochastic({outputs[i]}, words[shift + j], {number});\n"
        else:
            body += f"        x{i}[i] = narrow<{C_TYPES[t.dtype]}>({outputs[i]});\n"
    body += "    }\n" + "".join(map(_encode, coded))
    parameters = [f"{_c(types, i, op)} x{i}" for i in places]
    tail = "long long n, unsigned long long seed, long long first"
    before = (PHILOX_WORDS if op.stochastic else "") + _FUNCTIONS
    return Kernel(f"stored_{op.name}", ", ".join([*parameters, tail]), body, before, _THREADS)


def _c(types: tuple[TensorType | None, ...], i: int, op: Update) -> str:
    (t,) = present(types[i])
    return f"{'' if i in op.updates else 'const '}{C_TYPES[t.dtype]}*"


def _head(op: Update, coded: Sequence[int], types: tuple[TensorType | None, ...]) -> str:
    """The text before the elements: an early end, tables, rows of codes, words of the stream."""
    body = f"    const long long start = (long long)blockIdx.x * {BLOCK} + {_EACH} * threadIdx.x;\n"
    if op.unscale(types) is not None:
        body += f"    if (*x{op.unscale_at} == 0) return;\n"
    for i in coded:
        signed = op.signs[op.updates.index(i) - 1]
        body += _table(f"book{i}", code_book(signed=signed).tolist()) + _table(
            f"between{i}", borders(signed=signed).tolist()
        )
        body += f"    unsigned char* row{i} = x{i} + (long long)blockIdx.x * {ROW};\n"
        body += f"    const float scale{i} = *(const float*)(row{i} + {BLOCK});\n"
        body += f"    float kept{i}[{_EACH}] = {{}};\n    unsigned most{i} = 0;\n"
    if op.stochastic:
        body += f"""    unsigned long long words[8];
    const long long at = start + first;
    const int shift = (int)(at % 4);
    philox_words(at / 4, seed, *x{op.counter_at}, words);
    if (shift) philox_words(at / 4 + 1, seed, *x{op.counter_at}, words + 4);
"""
    return body


def _encode(i: int) -> str:
    """Codes and magnitude of state `i`."""
    return f"""    most{i} = block_reduce(most{i}, Larger());
    const float all{i} = __uint_as_float(most{i}), by{i} = all{i} != 0 ? all{i} : 1.0f;
    for (int j = 0; j < {_EACH}; j++)
        row{i}[4 * threadIdx.x + j] = (unsigned char)(start + j < n ? code_of(kept{i}[j] / by{i}, between{i}) : 0);
    if (threadIdx.x == 0) *(float*)(row{i} + {BLOCK}) = all{i};
"""


@family(*NAMES)
class StoredUpdates(Family):
    """(w, g, ...) → w, state ..., where they are rounded stochastically or have 8 bits."""

    def accepts(self, op: Operator) -> bool:
        """Updates with stored state, which no generated loop takes."""
        return rule_of(op)[0].stores

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule, types = rule_of(op)
        (w,) = present(ins[0])
        if not w.size:
            return []
        buffers = [x for x, t in zip(ins, types, strict=False) if t is not None]
        bare = tuple(None if t is None else t.with_shape(()) for t in types)
        args = (*buffers, w.size, rule.seed, rule.first)
        return [update(_same(rule), bare).blocks(-(-w.size // BLOCK), args=args)]


def _same(rule: Update) -> Update:
    """The update without what is a kernel's argument."""
    return dataclasses.replace(rule, seed=0, first=0)
