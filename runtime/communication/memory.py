"""How much memory a process takes beside what is planned."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

from ...support.memory import resident_bytes


class ResidentGrowth:
    """`with ResidentGrowth() as growth: ...`: how many bytes the resident set has grown by at its highest (`peak`), and
    by at the end (`kept`).

    The arena is touched when it is allocated: what grows while steps run is the libraries', MPI's among them.
    """

    peak = 0
    kept = 0

    def __enter__(self) -> ResidentGrowth:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._before = resident_bytes()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.kept = resident_bytes() - self._before
        self.peak = max(resident_bytes("VmHWM") - self._before, self.kept)
