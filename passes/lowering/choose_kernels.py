"""Choice of kernels: the first kernel provider that accepts an operator."""

from __future__ import annotations

import dataclasses

from ...language.ir import Block, Free, Operator
from ...language.kernels import accepting, with_variants
from ..base import Pass


class ChooseKernels(Pass):
    """Set the kernel provider of each operator: the first of `providers` that accepts it, "" if none does.

    If the block permits rounded products (`products tf32`), a provider's variant NAME_tf32 is tried first.  The choice
    depends on the operator and its types only, so that a recomputed clone runs on the kernel of its original and is
    bit-identical.
    """

    providers: tuple[str, ...] = ()

    def run(self, block: Block) -> Block:
        """The same operators with their kernels; scratch buffers and addresses come later."""

        names = with_variants(self.providers, block.products)

        def chosen(op: Operator) -> Operator:
            name = "" if isinstance(op.op, Free) or op.op.copies else accepting(names, op)
            return op if name == op.kernel else dataclasses.replace(op, kernel=name, scratch=())

        return block.with_operators(map(chosen, block.operators))
