"""Code fragments of kernels over broadcast operands: vectors, divisions by arguments, coordinates, names."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ....language.element import Expr, nodes
from ....language.types import DTYPES
from ..device.kernel import C_TYPES

#: bytes that a thread reads and writes at once, and elements at most
VECTOR_BYTES, MOST_LANES = 16, 16
#: elements from which on indices and sizes take 64 bits
WIDE = 1 << 31

STORE = """
// small elements as four words: the compiler would write them in pairs
template <class T, int N> DEVICE void store(T* p, const Pack<T, N>& x)
{
#ifndef EMULATED
    if constexpr (sizeof(T) < 4 && sizeof(T) * N == 16) {
        unsigned w[4];
        memcpy(w, &x, 16);
        asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};"
                     :: "l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
    } else
#endif
        *(Pack<T, N>*)p = x;
}
"""
VECTORS = (
    STORE
    + """
// elements e ... e + N - 1 of n
template <class T, int N> DEVICE Pack<T, N> fetch(const T* p, long long e, long long n)
{
    Pack<T, N> found = {};
    if (e + N <= n)
        found = *(const Pack<T, N>*)(p + e);
    else
        for (int k = 0; k < N; k++)
            if (e + k < n) found.of[k] = p[e + k];
    return found;
}
template <class T, int N> DEVICE void put(T* p, const Pack<T, N>& x, long long e, long long n)
{
    if (e + N <= n)
        store(p + e, x);
    else
        for (int k = 0; k < N; k++)
            if (e + k < n) p[e + k] = x.of[k];
}
"""
)

_SMALL = """
// n / d for n < 2^31, by a product (Granlund and Montgomery 1994)
typedef unsigned Index;
struct Divisor { unsigned by, times, shift; };
DEVICE Index over(Index n, Divisor d) { return (__umulhi(n, d.times) + n) >> d.shift; }
"""
_WIDE = """
typedef long long Index;
struct Divisor { long long by; };
DEVICE Index over(Index n, Divisor d) { return n / d.by; }
"""


class _Small(ctypes.Structure):
    _fields_ = (("by", ctypes.c_uint), ("times", ctypes.c_uint), ("shift", ctypes.c_uint))


class _Wide(ctypes.Structure):
    _fields_ = (("by", ctypes.c_longlong),)


def division(*, wide: bool) -> str:
    """The text of `Index`, `Divisor` and `over`."""
    return _WIDE if wide else _SMALL


def divisor(by: int, *, wide: bool) -> Any:
    """The argument of type Divisor; `by` is positive (0: nothing is divided)."""
    if wide:
        return _Wide(by)
    by = max(by, 1)
    shift = (by - 1).bit_length()
    return _Small(by, ((1 << 32) * ((1 << shift) - by) // by + 1) & 0xFFFFFFFF, shift)


@dataclass(frozen=True)
class Coordinates:
    """A flat index taken apart along `dims` dimensions; dimension i > 0 has the Divisor `d{i}` as its size."""

    dims: int

    @property
    def parameters(self) -> list[str]:
        """Parameters of a kernel that uses the coordinates."""
        return [f"Divisor d{i}" for i in range(1, self.dims)]

    def lines(self, index: str, wanted: Iterable[Sequence[int]]) -> list[str]:
        """Statements that make `c{i}`, the coordinates along the dimensions of some operands, from an index."""
        needed = {d for dims in wanted for d in dims}
        if not needed:
            return []
        result, last = [], min(needed)
        rest = f"(Index)({index})"
        for d in range(self.dims - 1, max(last, 1) - 1, -1):
            result.append(f"const Index q{d} = over({rest}, d{d});")
            if d in needed:
                result.append(f"const Index c{d} = {rest} - q{d} * (Index)d{d}.by;")
            rest = f"q{d}"
        if last == 0:
            result.append(f"const Index c0 = {rest};")
        return result

    def offset(self, dims: Sequence[int]) -> str:
        """Where an operand with these dimensions, row-major, has the element at `c{i}`."""
        text = ""
        for d in sorted(dims):
            text = f"({text}) * (Index)d{d}.by + c{d}" if text else f"c{d}"
        return text or "0"


def lanes(dtypes: Iterable[str]) -> int:
    """Elements that a thread works on at once, where these types are read and written in full."""
    largest = max((DTYPES[t].itemsize for t in dtypes), default=4)
    return min(VECTOR_BYTES // largest, MOST_LANES)


def aligned(addresses: Iterable[int]) -> bool:
    """Whether vectors may be read and written there."""
    return all(a % VECTOR_BYTES == 0 for a in addresses)


def indented(lines: Iterable[str], depth: int = 1) -> str:
    """Lines of a body."""
    return "".join(f"{'    ' * depth}{line}\n" if line else "\n" for line in lines)


def name_of(prefix: str, roots: Sequence[Expr]) -> str:
    """A kernel's name: what it computes."""
    seen = dict.fromkeys(x.fn for x in nodes(roots) if x.args)
    text = "_".join([prefix, *seen] if seen else [prefix, "copy"])
    return re.sub(r"\W", "", text[:48]).rstrip("_")


def pack(dtype: str, count: int) -> str:
    """The vector type."""
    return f"Pack<{C_TYPES[dtype]}, {count}>"
