"""Checkpoints of a program's plan in host memory."""

from __future__ import annotations

import dataclasses

from ...errors import UsageError
from ...language.ir import Block
from ...language.program import Program
from ..base import Pass
from .offload import Offload, offloaded


class OffloadCheckpoints(Pass):
    """Copy the checkpoints of a program's plan to host memory; those that nothing needs later stay, with a note."""

    def run(self, block: Block) -> Block:
        """The block itself: which values are checkpoints is known of a program."""
        return block

    def rewrite(self, program: Program) -> Block:
        """The block with copies; `program.plan` notes what moves."""
        plan = program.plan
        if plan is None:
            raise UsageError("offload needs checkpoints: the values to copy to host memory")
        block = Offload(plan.checkpoints, tight=True).run(program.block)
        moved = offloaded(block)
        notes = [
            f"checkpoint '{n}' is not offloaded: unused in the backward pass, or persistent"
            for n in plan.checkpoints
            if n not in moved
        ]
        useless = {f"checkpoint '{n}' saves nothing" for n in moved}  # moved, it does
        kept = [note for note in plan.notes if note.partition(":")[0] not in useless]
        program.plan = dataclasses.replace(plan, offloads=moved, notes=(*kept, *notes))
        return block
