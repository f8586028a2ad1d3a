"""Errors that say what, where, why, and what to do.

`UsageError` is the caller's mistake (exit code 2 on the command line), `JobError` a job that failed (exit code 1).
Messages hold names from files, which may be long or hold anything: their text is made printable here, once for all.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

#: a name that is longer is cut in its middle, and a message is
_LONGEST_NAME, _LONGEST_MESSAGE = 240, 8000
#: what may be a name: a quoted part of a line, or what has neither spaces nor commas in it
_LONG = re.compile(rf"(?<![\w'])'[^'\n]*'(?!\w)|\"[^\"\n]*\"|[^\s,]{{{_LONGEST_NAME + 1},}}")


def printable(text: str, longest: int | None = None) -> str:
    """Text that may go to a terminal: what is no printable character but a line's end or a tab is written as in
    Python (`\\x1b`), very long names are cut in their middle, and so is the whole where it is longer than `longest`."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)
    text = _LONG.sub(lambda found: _cut(found[0], _LONGEST_NAME), text)
    return text if longest is None else _cut(text, longest)


def one_line(text: str) -> str:
    """The same for a cell of a table, a name, or a line of progress: no line ends in it."""
    return printable(text.replace("\n", "\\n").replace("\t", "\\t"), _LONGEST_NAME)


def _escaped(c: str) -> str:
    code = ord(c)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _cut(text: str, longest: int) -> str:
    """The text without its middle where it is too long: what helps stands at the beginning or at the end."""
    if len(text) <= longest:
        return text
    said = f"...({len(text):,} characters)..."
    kept = longest - len(said)
    return text[: kept - kept // 3] + said + text[len(text) - kept // 3 :]


class RecomputeError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__(), _LONGEST_MESSAGE)


class ModelWarning(UserWarning):
    """A model that can be trained, but not as its user may expect."""


class UsageError(RecomputeError, ValueError):
    """The request cannot be carried out as it was put: unknown name, wrong type, contradicting options."""

    exit_code = 2


class BudgetError(UsageError):
    """No plan that was found, or none that exists, fits a memory budget."""


class JobError(RecomputeError, RuntimeError):
    """The request was fine, the job failed: a broken file, an operator that is not supported."""


class ModelError(JobError):
    """The model file cannot be read, is not valid, or holds what cannot be trained or run."""


class OutOfMemoryError(JobError, MemoryError):
    """This machine cannot allocate what a program needs."""


class TypeRuleError(JobError):
    """An operator was applied to types that it does not accept."""


class VerifyError(JobError):
    """A program breaks a rule of the language."""


class MissingExtraError(JobError, ImportError):
    """An optional library is needed; the message names the extra that brings it."""


def nearest(name: str, known: Iterable[str], n: int = 3) -> str:
    """` (did you mean a, b?)`, or an empty string where nothing is near."""
    known = list(known)
    found = difflib.get_close_matches(name, known, n=n, cutoff=0.5)
    if not found:
        found = [k for k in known if name and name.lower() in k.lower()][:n]
    return f" (did you mean {', '.join(found)}?)" if found else ""


def need_extra(module: str, extra: str, why: str) -> MissingExtraError:
    """The error for an optional library that is not installed."""
    return MissingExtraError(
        f"{why} needs the package '{module}', which is not installed: pip install 'onnx-recompute[{extra}]'"
    )
