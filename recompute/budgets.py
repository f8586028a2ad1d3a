"""Memory budgets and amounts: `16GiB`, `500MB`, `60%`, `40% of activations`, `8GiB of process`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .errors import UsageError

_UNITS = {"": 1, "b": 1}
_UNITS |= {p + s: 1024**i for i, p in enumerate("kmgt", 1) for s in ("", "ib")}
_UNITS |= {p + "b": 1000**i for i, p in enumerate("kmgt", 1)}
_EXPECTED = "expected e.g. 16GiB, 500MB, 1.5G"
#: bytes that a budget of a process sets aside for Python, libraries and kernels (docs/planning.md)
BESIDE = 320 << 20


@dataclass(frozen=True)
class Budget:
    """The memory that a step may take: bytes, or a share of the plain step's peak.

    `of_activations`: a share of what that peak has beyond what every plan holds (parameters, optimizer state, buffers).
    `of_process`: bytes of the whole process, as the operating system counts them, in place of bytes of the step.
    """

    text: str
    bytes: int | None = None
    share: float | None = None
    of_activations: bool = False
    of_process: int | None = None

    def within(self, plain: int, held: int) -> int:
        """The budget in bytes, if the plain step takes `plain` bytes, of which every plan holds `held`."""
        if self.bytes is not None:
            return self.bytes
        if self.of_process is not None:
            return self.of_process - BESIDE
        assert self.share is not None
        if self.of_activations:
            return held + max(1, math.floor((plain - held) * self.share))
        return max(1, math.floor(plain * self.share))

    def __str__(self) -> str:
        return self.text


def as_budget(amount: str | int | Budget) -> Budget:
    """A budget: `16GiB`, `16GB`, `500MB`, `1.5G` (= 1.5GiB), a number of bytes, or `60%` of the plain step's peak.

    `40% of activations` is that share of what the plain step takes beyond parameters, optimizer state and buffers;
    `8GiB of process` is what the operating system may count for the process that trains.  UsageError for anything else.
    """
    if isinstance(amount, Budget):
        return amount
    if isinstance(amount, int) and not isinstance(amount, bool):
        if amount < 1:
            raise UsageError(f"a memory budget must be more than 0 bytes, not {amount}")
        return Budget(f"{amount:,} bytes", bytes=amount)
    if isinstance(amount, float):
        hint = f"; a share of the plain peak is written '{amount:.0%}'" if 0 < amount <= 1 else ""
        raise UsageError(f"a memory budget must be a whole number of bytes or a string, not {amount}{hint}")
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%|[a-zA-Z]*)(?:\s+of\s+(activations|process))?\s*", str(amount))
    wrong = match is None or match[2].lower() not in (*_UNITS, "%")
    if match is None or wrong or (match[3] and (match[3] == "activations") != (match[2] == "%")):
        raise UsageError(
            f"cannot read '{amount}' as an amount of memory ({_EXPECTED}, 60% of the plain step's peak, "
            "'40% of activations' or '8GiB of process')"
        )
    text, number = str(amount).strip(), float(match[1])
    if match[2] == "%":
        if not 0 < number < math.inf:
            raise UsageError(f"a memory budget must be more than 0 %, not {amount}")
        return Budget(text, share=number / 100, of_activations=bool(match[3]))
    number *= _UNITS[match[2].lower()]
    if not 1 <= number < math.inf:
        raise UsageError(f"a memory budget must be more than 0 bytes, not {amount}")
    if match[3]:
        if number <= BESIDE:
            raise UsageError(f"'{text}': Python, libraries and kernels may take {BESIDE:,} bytes, without any step")
        return Budget(text, of_process=int(number))
    return Budget(text, bytes=int(number))


def as_bytes(text: str | int) -> int:
    """Bytes from an amount as in `as_budget`; UsageError for a share, and for the budget of a process."""
    budget = as_budget(text)
    if budget.of_process is not None:
        raise UsageError(f"'{text}' is of a process, but an amount for a step is needed here ({_EXPECTED})")
    if budget.bytes is None:
        raise UsageError(f"'{text}' is a share of the plain step's peak, but an amount is needed here ({_EXPECTED})")
    return budget.bytes
