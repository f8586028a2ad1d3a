"""Checks of programs that are to be trained, and of names in them."""

from __future__ import annotations

from typing import Any

from ..boundary import as_program, as_texts
from ..errors import UsageError, expect
from ..language.ir import Role
from ..language.program import Program, Variable


def program_of(v: Any) -> Program:
    """The program of a Variable.  UsageError for what is no Variable."""
    return expect("loss", v, Variable, "a Variable, such as a loss function returns, or program['loss']").program


def must_be_untrained(program: Program) -> None:
    """UsageError where the program has updates already."""
    if any(o.role is Role.OPTIMIZE for o in as_program(program).operators):
        raise UsageError(
            f"program '{program.block.name}' is already a training step: its parameters are updated once per step; "
            "call minimize on a program without updates (clone() it before)"
        )


def names_of(program: Program, wanted: Any, what: str) -> list[str]:
    """Value names of names, aliases, globs and Variables.  UsageError for Variables of another program."""
    return [program.aliases.get(name, name) for name in as_texts(wanted, what, program)]
