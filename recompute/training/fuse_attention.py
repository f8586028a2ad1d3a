"""Attention as one operator, for a program."""

from __future__ import annotations

from ..language.program import Program
from ..passes.attention.find_attention import FindAttention, find_attention
from ..passes.base import apply_passes
from .programs import must_be_untrained

__all__ = ["fuse_attention"]


def fuse_attention(program: Program, enabled: bool = True) -> list[str]:
    """Replaces attention in a program by one operator that keeps no scores; returns a note for each softmax.

    The scores of a tile of queries and keys exist at a time, so that memory grows with the sequence and not with its
    square; the gradient computes them again.  Results agree to rounding.  A known mask that hides what is outside of a
    band becomes a window, as its contents are now.  See `passes.attention.find_attention`.  `minimize` does this by
    itself; call it before for its notes, or with `enabled=False` so that `minimize` leaves attention as it is.
    """
    must_be_untrained(program)
    program.fuse_attention = enabled
    program.edited(program.again, "fuse-attention", lambda other: setattr(other, "fuse_attention", enabled))
    if not enabled:
        return []
    notes = find_attention(program.block, program.data)[1]
    apply_passes(program, [FindAttention()])
    return notes
