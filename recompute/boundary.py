"""Arguments of public functions: a kind of argument is taken, or refused with one sentence, in the same way everywhere.

Those with classes of their own are converted beside these: `places.as_place`, `budgets.as_budget`,
`communication.mesh.as_mesh`, `cost.as_cost`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from .errors import UsageError, expect
from .language.ir import Block
from .language.program import Program, Variable

__all__ = ["as_block", "as_function", "as_loss", "as_names", "as_path", "as_program", "as_texts"]

F = TypeVar("F")


def as_program(program: Program, what: str = "program") -> Program:
    """The program.  UsageError for what is none."""
    return expect(what, program, Program, "a Program, such as rc.load gives")


def as_block(block: Block) -> Block:
    """The block.  UsageError for what is none."""
    return expect("block", block, Block, "a Block, such as program.block")


def as_names(names: Any, what: str) -> list[str | Variable]:
    """A name or Variable, or several of them, as a list.  UsageError for all else."""
    listed = [names] if isinstance(names, (str, Variable)) else names
    wanted = "a name or Variable, or a list of such"
    return [expect(what, name, (str, Variable), wanted) for name in expect(what, listed, Iterable, wanted)]


def as_texts(names: Any, what: str, program: Program | None = None) -> list[str]:
    """A list of names, Variables by theirs; UsageError for those of another program than `program`, if it is given."""
    listed = as_names(names, what)
    for name in listed:
        if program is not None and isinstance(name, Variable) and name.program is not program:
            raise UsageError(f"{what}: '{name.name}' belongs to another program")
    return [name.name if isinstance(name, Variable) else name for name in listed]


def as_loss(program: Program, loss: Variable | str) -> Variable:
    """A value of the program: the Variable, or the one of this name.  UsageError for all else."""
    expect("loss", loss, (str, Variable), "a Variable or the name of a value")
    return program[as_texts(loss, "loss", program)[0]]


def as_path(path: str | os.PathLike[str], what: str = "path") -> Path:
    """The path.  UsageError for what is none."""
    return Path(expect(what, path, (str, os.PathLike), "a path"))


def as_function(function: F, what: str, takes: str) -> F:
    """The function, which takes `takes`.  UsageError for what cannot be called."""
    if not callable(function):
        raise UsageError(f"{what} must be a function that takes {takes}, not {function!r}")
    return function
