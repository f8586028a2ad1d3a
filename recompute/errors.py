"""Exception classes: each message states what is wrong, where, why, and what to do.

`UsageError` is a mistake of the caller (exit code 2 on the command line), `JobError` a failed job (exit code 1).
Messages contain names from files, which may be long and contain any characters: the text is made printable here.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")

#: the middle of longer names, and of longer messages, is left out
_LONGEST_NAME, _LONGEST_MESSAGE = 240, 8000
#: a possible name: a quoted part of a line, or a part without spaces and commas
_LONG = re.compile(rf"(?<![\w'])'[^'\n]*'(?!\w)|\"[^\"\n]*\"|[^\s,]{{{_LONGEST_NAME + 1},}}")


def printable(text: str, longest: int | None = None) -> str:
    """Text that is safe for a terminal: non-printable characters except line ends and tabs are escaped as in Python
    (`\\x1b`), and the middle is left out of very long names, and of text longer than `longest`."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)
    text = _LONG.sub(lambda found: _cut(found[0], _LONGEST_NAME), text)
    return text if longest is None else _cut(text, longest)


def one_line(text: str) -> str:
    """`printable` without line ends, for a cell of a table, a name, or a status line."""
    return printable(text.replace("\n", "\\n").replace("\t", "\\t"), _LONGEST_NAME)


def _escaped(c: str) -> str:
    code = ord(c)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _cut(text: str, longest: int) -> str:
    """The text without its middle if it is too long: the beginning and the end are the most useful."""
    if len(text) <= longest:
        return text
    said = f"...({len(text):,} characters)..."
    kept = longest - len(said)
    return text[: kept - kept // 3] + said + text[len(text) - kept // 3 :]


class RecomputeError(Exception):
    """Base class of all errors that this package raises on purpose."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__(), _LONGEST_MESSAGE)


class ModelWarning(UserWarning):
    """A model that can be trained, but not as its user may expect."""


class UsageError(RecomputeError, ValueError):
    """The request is invalid: an unknown name, a wrong type, contradictory options."""

    exit_code = 2


class OpenDimensionsError(UsageError):
    """Dimensions of a model's inputs are open, and no sizes were given."""


class BudgetError(UsageError):
    """No plan was found that fits a memory budget, or none exists.

    `lowest`: the step with the lowest peak that was found (`passes.planners.fit.problem.Fitted`), if one was made;
    `sure`: that with the lowest peak that is found for any budget that it fits.
    """

    lowest: Any = None
    sure: Any = None


class JobError(RecomputeError, RuntimeError):
    """The request is valid, but the job failed: a broken file, an unsupported operator."""


class ModelError(JobError):
    """The model file cannot be read, is invalid, or contains operators that cannot be trained or run."""


class OutOfMemoryError(JobError, MemoryError):
    """This machine cannot allocate what a program needs."""


class NotFiniteError(JobError):
    """A loss is infinite or NaN, and `stop_on_nan` was asked for; the step has updated nothing."""


class TypeRuleError(JobError):
    """An operator was applied to types that it does not accept."""


class VerifyError(JobError):
    """A program breaks a rule of the language."""


class MissingExtraError(JobError, ImportError):
    """An optional library is missing; the message names the extra that installs it."""


def expect(what: str, value: T, kinds: type | tuple[type, ...], wanted: str) -> T:
    """The argument `what`, if it is of one of the kinds; else UsageError: "`what` must be `wanted`, not ..."."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
        raise UsageError(f"{what} must be {wanted}, not {printable(repr(value), _LONGEST_NAME)}")
    return value


def nearest(name: object, names: Iterable[str], n: int = 3, *, close: bool = False) -> str:
    """` (did you mean a, b?)` with the most similar names, or "" if there are none; `close`: misspellings only."""
    name, names = str(name), list(names)
    matches = difflib.get_close_matches(name, names, n=n, cutoff=0.85 if close else 0.5)
    if not matches and not close:
        matches = [k for k in names if name and name.lower() in k.lower()][:n]
    return f" (did you mean {', '.join(matches)}?)" if matches else ""


def need_extra(package: str, extra: str, why: str) -> MissingExtraError:
    """The error for an optional library that is not installed."""
    return MissingExtraError(
        f"{why} needs the package '{package}', which is not installed: pip install 'onnx-recompute[{extra}]'"
    )


def load_extra(module: str, extra: str, why: str, package: str = "") -> Any:
    """A module of an optional library, of the package of that name unless given.  MissingExtraError without it."""
    top = module.partition(".")[0]
    try:
        importlib.import_module(top)
        return importlib.import_module(module)
    except ImportError:
        raise need_extra(package or top, extra, why) from None
