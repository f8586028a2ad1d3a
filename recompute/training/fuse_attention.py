"""Attention as one operator, for a program."""

from __future__ import annotations

from ..language.program import Program
from ..language.verify import verify
from ..passes.attention.find_attention import find_attention
from .base import must_be_untrained

__all__ = ["fuse_attention"]


def fuse_attention(program: Program) -> list[str]:
    """Replaces attention in a program by one operator that keeps no scores; returns a note for each softmax.

    The scores of a tile of queries and keys exist at a time, so that memory grows with the sequence and not with its
    square; the gradient computes them again.  Results agree to rounding.  Before `minimize`.  A known mask that hides
    what is outside of a band becomes a window, as its contents are now.  See `passes.attention.find_attention`.
    """
    must_be_untrained(program)
    block, notes = find_attention(program.block, program.data)
    program.block = verify(block)
    program.also_at_other_batches(program.again, fuse_attention)
    return notes
