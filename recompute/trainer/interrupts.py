"""Ctrl-C and SIGTERM end a run after its step; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

#: the reasons for which a signal ends a run
SIGNALLED = ("interrupted", "ended by SIGTERM")


class Interrupts:
    """Inside the `with` statement, in the main thread, a first signal calls `stop` with a reason."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self._before: dict[int, Any] = {}
        #: the signal that was received; 0 if none was
        self.received = 0

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and the like
                    self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.received:  # the second one: as it would be without us
            before = self._before[number]
            if callable(before):
                before(number, frame)
            raise KeyboardInterrupt
        self.received = number
        self._stop(SIGNALLED[number != signal.SIGINT])
