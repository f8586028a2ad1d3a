"""A channel: a thread that carries communications one after another, beside the step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from .engine import Transfer, now


class Channel:
    """`carry` is called for each transfer, in order, in the channel's own thread."""

    def __init__(self, name: str, carry: Callable[[Transfer], None]) -> None:
        self.name = name
        self.carry = carry
        self.current: Transfer | None = None
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"recompute channel {name}", daemon=True)
        self._thread.start()

    def put(self, transfer: Transfer) -> None:
        """Adds a transfer."""
        self._queue.put(transfer)

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            transfer.since = now()
            self.current = transfer
            error: BaseException | None = None
            try:
                self.carry(transfer)
            except BaseException as e:
                error = e
            self.current = None
            transfer.finish(error)

    def close(self) -> None:
        """Ends the thread behind what it carries."""
        self._queue.put(None)
        self._thread.join()
