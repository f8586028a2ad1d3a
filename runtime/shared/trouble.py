"""Status reports of kernels about invalid operands: a code, the invalid number, and the limit that it violates.

A kernel skips such a number, writes [code, number, size] to the status of its session, and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import JobError, NotFiniteError
from ...ops.loss.ctc import NO_LENGTH

#: words of a status: its code (0: all is well), the number, the size of the axis
WORDS = 3
#: codes; from LIBRARY on it is the status of a library's function
LABEL_OUTSIDE, INDEX_OUTSIDE, NOT_FINITE, LABEL_IS_BLANK, LENGTH_OUTSIDE, LIBRARY = 1, 2, 3, 4, 5, 1000


class _Status:
    """The type of STATUS."""


#: stands for the address of the status of whoever runs a kernel
STATUS = _Status()


def failure(status: Sequence[int], where: str) -> JobError:
    """The error for a status other than zero; `where`: the operator, as text ("": nobody knows)."""
    kind = NotFiniteError if int(status[0]) == NOT_FINITE else JobError
    return kind(explained(status) + (f", in\n    {where}" if where else ""))


def explained(status: Sequence[int]) -> str:
    """The error text of a status other than zero."""
    code, number, size = (int(x) for x in status)
    if code == LABEL_OUTSIDE and number == NO_LENGTH:
        return "a length of labels is negative, or more than they have entries"
    if code == LABEL_OUTSIDE:
        return f"label {number} is outside the {size} classes (and is not ignore_index)"
    if code == INDEX_OUTSIDE:
        return f"index {number} is outside an axis of {size} rows"
    if code == NOT_FINITE:
        return f"the loss is {('nan', 'inf', '-inf')[number]}"
    if code == LABEL_IS_BLANK:
        return f"label {number} is the blank: labels end at ignore_index, {size}"
    if code == LENGTH_OUTSIDE:
        return f"length {number} is outside of the {size} steps"
    if code >= LIBRARY:
        return f"a library's function failed with status {code - LIBRARY}"
    return f"a kernel failed with status {code}"
