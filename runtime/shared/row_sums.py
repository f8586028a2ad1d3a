"""Sums over vectors, for kernels: blocks in the element type, which are added in float64.

These loops only read: one that also wrote would be compiled differently where its operands overlap, and its sum would
have other bits.
"""

from __future__ import annotations

import numpy as np

from .mathematics import exp, larger
from .texts import inline

#: LLVM's flags of a sum in any order, of vectors
ANY_ORDER = {"reassoc", "nsz", "contract"}
_BLOCK = 2048


@inline
def in_blocks(part, size, given):
    """The sum, in float64, of `part` of each block of the vectors."""
    s = 0.0
    for b in range(0, size, _BLOCK):
        s += part(*given, b, min(b + _BLOCK, size))
    return s


@inline(fastmath=ANY_ORDER)
def _sum(x, begin, end):
    s = x.dtype.type(0)
    for j in range(begin, end):
        s += x[j]
    return s


@inline
def total(x):
    """Σ x."""
    return in_blocks(_sum, x.size, (x,))


@inline(fastmath=ANY_ORDER)
def _dot(x, y, begin, end):
    s = x.dtype.type(0)
    for j in range(begin, end):
        s += x[j] * y[j]
    return s


@inline
def dot(x, y):
    """Σ x · y."""
    return in_blocks(_dot, x.size, (x, y))


@inline(fastmath=ANY_ORDER)
def _squares(x, centre, begin, end):
    s = x.dtype.type(0)
    for j in range(begin, end):
        d = x[j] - centre
        s += d * d
    return s


@inline
def squares(x, centre):
    """Σ (x - centre)²."""
    return in_blocks(_squares, x.size, (x, centre))


@inline(fastmath=ANY_ORDER)
def _against(g, x, centre, begin, end):
    s = x.dtype.type(0)
    for j in range(begin, end):
        s += g[j] * (x[j] - centre)
    return s


@inline
def against(g, x, centre):
    """Σ g · (x - centre)."""
    return in_blocks(_against, x.size, (g, x, centre))


@inline(fastmath=ANY_ORDER)
def _exponentials(x, most, begin, end):
    s = x.dtype.type(0)
    for j in range(begin, end):
        s += exp(x[j] - most)
    return s


@inline(
    c="""template <class X, class T> DEVICE T exponentials(X&& x, T most)
{
    T s = 0;
    for (long long j = threadIdx.x % LANES; j < (long long)x.size().v; j += LANES)
        s += exp_of(at_(x, Integer(j)) - most);
    return reduced_(s, Plus());
}
"""
)
def exponentials(x, most):
    """Σ exp(x - most)."""
    return in_blocks(_exponentials, x.size, (x, most))


@inline(
    c="""template <class X> DEVICE Element<X> largest(X&& x)
{
    Element<X> m = -infinity<Element<X>>();
    for (long long j = threadIdx.x % LANES; j < (long long)x.size().v; j += LANES) m = larger(m, at_(x, Integer(j)));
    return reduced_(m, Larger());
}
"""
)
def largest(x):
    """The largest element; NaN if there is one."""
    m = x.dtype.type(-np.inf)
    for j in range(x.size):
        m = larger(m, x[j])
    return m
