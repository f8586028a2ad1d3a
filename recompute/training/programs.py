"""Checks of programs that are to be trained, and of names in them."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError
from ..language.ir import Role
from ..language.program import Program, Variable


def program_of(v: Any) -> Program:
    """The program of a Variable.  UsageError for what is no Variable."""
    if not isinstance(v, Variable):
        raise UsageError(f"a Variable is needed (a loss function returns one; or program['name']), not {v!r}")
    return v.program


def must_be_untrained(program: Program) -> None:
    """UsageError where the program has updates already."""
    if any(o.role is Role.OPTIMIZE for o in program.operators):
        raise UsageError(
            f"program '{program.block.name}' is already a training step: its parameters are updated once per step; "
            "call minimize on a program without updates (clone() it before)"
        )


def names_of(program: Program, wanted: Any, what: str) -> list[str]:
    """Value names of names, aliases, globs and Variables.  UsageError for Variables of another program."""
    if isinstance(wanted, (str, Variable)):
        wanted = [wanted]
    names = []
    for w in wanted:
        if isinstance(w, Variable):
            if w.program is not program:
                raise UsageError(f"{what}: '{w.name}' belongs to another program")
            names.append(w.name)
        elif isinstance(w, str):
            names.append(program.aliases.get(w, w))
        else:
            raise UsageError(f"{what} takes names and Variables, not {w!r}")
    return names
