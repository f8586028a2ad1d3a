"""Kernels over rows: a warp for each short row, a block for each long one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..device.kernel import C_TYPES, COMPUTE, Kernel, Launch

#: rows up to this length are a warp's; warps of a block
_WARP, _WARPS = 1024, 8


def by_warp(length: int) -> bool:
    """Whether a row of that length is a warp's."""
    return length <= _WARP


def kind(warp: bool) -> str:
    """How names of kernels end."""
    return "warp" if warp else "block"


def thread(*, warp: bool) -> list[str]:
    """What each thread of `rows` rows begins with: its row's number, and which elements of the row are its own
    (`first`, and every `by`-th from there).  All threads of a row stay."""
    row, first, by = (
        (f"(long long)blockIdx.x * {_WARPS} + (threadIdx.x >> 5)", "threadIdx.x & 31", "32")
        if warp
        else ("blockIdx.x", "threadIdx.x", "blockDim.x")
    )
    return [f"const long long row = {row};", "if (row >= rows) return;", f"const int first = {first}, by = {by};"]


def head(dtype: str, base: str, *, warp: bool) -> str:
    """The same as text, with the types of an element and of what is computed with it, and declarations of `base`."""
    types = [f"typedef {C_TYPES[dtype]} T;", f"typedef {COMPUTE[dtype]} A;"]
    return "".join(f"    {s}\n" for s in (*types, *thread(warp=warp), f"const long long {base};"))


def over_rows(k: Kernel, rows: int, args: Sequence[Any], *, warp: bool) -> Launch:
    """The launch of a kernel that begins with `head`."""
    return k.blocks(-(-rows // _WARPS) if warp else rows, args=args)
