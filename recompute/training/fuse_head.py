"""The head of a language model as one operator, for a program."""

from __future__ import annotations

import functools

from ..boundary import as_loss
from ..language.program import Program, Variable
from ..language.verify import verify
from ..passes.loss.find_head import find_head
from .programs import must_be_untrained

__all__ = ["fuse_head"]


def fuse_head(program: Program, loss: str | Variable | None = None) -> list[str]:
    """Makes a product with the vocabulary's matrix and its cross entropy one operator, which never holds the logits.

    Returns a note for each cross entropy: what was found, or why it is no head.  Results agree to rounding.  The loss
    has to be there already, and `minimize` comes later; `loss`: the one that will be trained (None: any), as other
    values that read the logits count only if it needs them.  Outputs that are made from logits leave the outputs, but
    can be fetched.  `minimize` does this by itself for float32 and float64 logits of 512 rows and 2 MiB or more,
    unless `program.fuse_head` is False.
    """
    must_be_untrained(program)
    loss = None if loss is None else as_loss(program, loss).name
    block, notes = find_head(program.block, loss)
    program.block = verify(block)
    program.edited(program.again, "fuse-head", functools.partial(fuse_head, loss=loss))
    return notes
