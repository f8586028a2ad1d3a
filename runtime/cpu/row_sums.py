"""Sums over vectors, for kernels: in blocks of the element type, which are added up in float64.

These loops only read: one that also wrote would be compiled differently where its operands overlap, and its sum would
have other bits.
"""

from __future__ import annotations

import numpy as np

from .jit import inline
from .mathematics import exp, larger

#: a sum in any order, of vectors
_ANY_ORDER = {"reassoc", "nsz", "contract"}
_BLOCK = 2048


@inline(fastmath=_ANY_ORDER)
def _sum(x, begin, end):
    s = x.dtype.type(0)
    for j in range(begin, end):
        s += x[j]
    return s


@inline
def total(x):
    """Σ x."""
    s = 0.0
    for b in range(0, x.size, _BLOCK):
        s += _sum(x, b, min(b + _BLOCK, x.size))
    return s


@inline(fastmath=_ANY_ORDER)
def _dot(x, y, begin, end):
    s = x.dtype.type(0)
    for j in range(begin, end):
        s += x[j] * y[j]
    return s


@inline
def dot(x, y):
    """Σ x · y."""
    s = 0.0
    for b in range(0, x.size, _BLOCK):
        s += _dot(x, y, b, min(b + _BLOCK, x.size))
    return s


@inline(fastmath=_ANY_ORDER)
def _dot3(x, y, z, begin, end):
    s = x.dtype.type(0)
    for j in range(begin, end):
        s += x[j] * y[j] * z[j]
    return s


@inline
def dot3(x, y, z):
    """Σ x · y · z."""
    s = 0.0
    for b in range(0, x.size, _BLOCK):
        s += _dot3(x, y, z, b, min(b + _BLOCK, x.size))
    return s


@inline(fastmath=_ANY_ORDER)
def _squares(x, centre, begin, end):
    s = x.dtype.type(0)
    for j in range(begin, end):
        d = x[j] - centre
        s += d * d
    return s


@inline
def squares(x, centre):
    """Σ (x - centre)²."""
    s = 0.0
    for b in range(0, x.size, _BLOCK):
        s += _squares(x, centre, b, min(b + _BLOCK, x.size))
    return s


@inline(fastmath=_ANY_ORDER)
def _against(g, x, centre, begin, end):
    s = x.dtype.type(0)
    for j in range(begin, end):
        s += g[j] * (x[j] - centre)
    return s


@inline
def against(g, x, centre):
    """Σ g · (x - centre)."""
    s = 0.0
    for b in range(0, x.size, _BLOCK):
        s += _against(g, x, centre, b, min(b + _BLOCK, x.size))
    return s


@inline(fastmath=_ANY_ORDER)
def _against3(g, w, x, centre, begin, end):
    s = x.dtype.type(0)
    for j in range(begin, end):
        s += g[j] * w[j] * (x[j] - centre)
    return s


@inline
def against3(g, w, x, centre):
    """Σ g · w · (x - centre)."""
    s = 0.0
    for b in range(0, x.size, _BLOCK):
        s += _against3(g, w, x, centre, b, min(b + _BLOCK, x.size))
    return s


@inline(fastmath=_ANY_ORDER)
def _exponentials(x, most, begin, end):
    s = x.dtype.type(0)
    for j in range(begin, end):
        s += exp(x[j] - most)
    return s


@inline
def exponentials(x, most):
    """Σ exp(x - most)."""
    s = 0.0
    for b in range(0, x.size, _BLOCK):
        s += _exponentials(x, most, b, min(b + _BLOCK, x.size))
    return s


@inline
def largest(x):
    """The largest element; NaN if there is one."""
    m = x.dtype.type(-np.inf)
    for j in range(x.size):
        m = larger(m, x[j])
    return m
