"""Removal of frees, kernels and addresses from a block."""

from __future__ import annotations

from dataclasses import replace

from ...language.ir import Block, Free
from ..base import Pass


class Unplan(Pass):
    """Remove frees, chosen kernels and addresses."""

    refuses = ()
    takes = ("frees", "addresses")

    def run(self, block: Block) -> Block:
        operators = [op for op in block.operators if not isinstance(op.op, Free)]
        return block.with_operators([replace(op, kernel="") if op.kernel else op for op in operators], addresses={})
