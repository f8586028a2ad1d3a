"""Errors that say what, where, why, and what to do.

`UsageError` is the caller's mistake (exit code 2 on the command line), `JobError` a job that failed (exit code 1).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RecomputeError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 1


class UsageError(RecomputeError, ValueError):
    """The request cannot be carried out as it was put: unknown name, wrong type, contradicting options."""

    exit_code = 2


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
