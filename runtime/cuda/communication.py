"""Communication with other ranks in a step on a device: what a session prepares, whatever carries it.

A communication begins behind what the step has launched before and runs beside what it launches next; the step waits
for it where its result is read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import JobError
from ...language.ir import Block, Operator
from ..communication.engine import Engine
from .device.emulator import view
from .device.kernel import Arrive, Begin


class Links:
    """Communication of one session.  `flying`: what was begun and not awaited, by the name of its target."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.flying: dict[str, Any] = {}
        self._compared = False

    def accept(self, op: Operator) -> None:
        """UsageError for a communication that cannot be carried, before anything runs."""
        self.engine.accept(op)

    def prepare(self, call: Begin | Arrive) -> Callable[[], None]:
        """A function that runs a call, any number of times."""
        raise NotImplementedError

    def join(self) -> None:
        """Orders all later launches behind all communication begun so far: a graph takes nothing from outside."""

    @contextlib.contextmanager
    def step(self, block: Block) -> Iterator[None]:
        """One run of a session; the first one compares the programs of all ranks.

        JobError where an earlier step has left others waiting.
        """
        if self.flying:
            raise JobError("a step failed while it communicated with other ranks: start all ranks again")
        if not self._compared:
            self.engine.compare(block)
            self._compared = True
        start = time.perf_counter()
        try:
            yield
        except BaseException as e:
            self.engine.failed(str(e).partition("\n")[0])
            raise
        self.engine.expect(time.perf_counter() - start)


class HostLinks(Links):
    """On the emulated device, whose memory is the host's: any engine carries it, MPI's among them."""

    def prepare(self, call: Begin | Arrive) -> Callable[[], None]:
        """Calls of the engine, with buffers as arrays."""
        if isinstance(call, Arrive):
            return lambda: self.engine.wait(self.flying.pop(call.name))
        x, out = None if call.x is None else view(call.x), view(call.out)

        def begin() -> None:
            self.flying[call.name] = self.engine.begin(call.op, call.at, x, out)

        return begin
