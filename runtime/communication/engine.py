"""The interface between a session and an engine, which carries the communication of one rank."""

from __future__ import annotations

import threading
import time
from typing import Any

from ...communication.events import check_mesh, events
from ...communication.mesh import Mesh
from ...errors import JobError
from ...language.ir import Block, Operator
from ...ops.communication.base import Communication
from ...ops.communication.messages import Message


class Transfer:
    """A communication that one rank has begun, with its operator's arrays, until it is done."""

    def __init__(self, op: Communication, at: int, x: Any, out: Any, index: int) -> None:
        self.op, self.at, self.x, self.out = op, at, x, out
        #: how many communications on the same path were begun before
        self.index = index
        #: when it came to the head of its channel; 0: it has not
        self.since = 0.0
        #: whether the step waits for it
        self.wanted = False
        self.error: BaseException | None = None
        self.done = threading.Event()

    @property
    def path(self) -> tuple[str, int]:
        """The channel, and the peer of a message (-1: all members take part)."""
        return path_of(self.op)

    def __str__(self) -> str:
        return f"{self.op.name} number {self.op.number} on channel '{self.op.queue}' (operator {self.at})"

    def finish(self, error: BaseException | None = None) -> None:
        """Says that it is done, or has failed."""
        self.error, self.since = error, 0.0
        self.x = self.out = None
        self.done.set()

    def wait(self) -> None:
        """Waits until it is done.  JobError if it failed."""
        self.wanted = True
        self.done.wait()
        if self.error is not None:
            raise JobError(f"{self}: {self.error}") from self.error


def path_of(op: Communication) -> tuple[str, int]:
    """The channel of a communication, and the peer of a message (-1: all members take part)."""
    return op.queue, op.peer if isinstance(op, Message) else -1


class Engine:
    """Carries the communication of one rank.

    A session calls `compare` before its first run, `begin` and `wait` in each.  Communications of one channel are done
    in the order in which they were begun; those of different channels do not wait for each other.  Arrays belong to the
    engine from `begin` to the end of `wait`.
    """

    mesh: Mesh
    rank: int

    def accept(self, op: Operator) -> None:
        """UsageError for a communication that this engine cannot carry, before anything runs."""

    def compare(self, block: Block) -> None:
        """Compares the programs of all ranks: every rank calls it, with its own.  VerifyError if they do not fit."""
        raise NotImplementedError

    def collect(self, what: str, value: Any, root: int | None = None) -> list[Any]:
        """The values of all ranks, in their order: on all ranks, or on `root` alone (others get nothing).

        For a few small things between steps.  `what` says what it is for, where a rank does not come.
        """
        raise NotImplementedError

    def any(self, what: str, said: bool) -> bool:
        """Whether any rank says so; every rank calls it.  Quick enough for each step."""
        raise NotImplementedError

    def begin(self, op: Communication, at: int, x: Any, out: Any) -> Transfer:
        """Begins to communicate; `at`: the operator's place, for messages.  x is None for what receives only."""
        raise NotImplementedError

    def wait(self, transfer: Transfer) -> None:
        """Waits until it is done: the result may be read, x may be written.  JobError if it failed."""
        transfer.wait()

    def failed(self, why: str) -> None:
        """Says that a step of this rank has failed, which other ranks may wait for."""

    def expect(self, seconds: float) -> None:
        """Says how long a step takes, for deadlines."""

    def trouble(self) -> str:
        """A failure that the engine has met, asked by the watch's thread; "" for none."""
        return ""

    def abort(self) -> None:
        """Gives up what is under way, since this process ends; called from any thread."""

    def close(self) -> None:
        """Ends it, in the same order on all ranks."""


class Alone(Engine):
    """The only rank of a mesh: it has nobody to communicate with, and needs no library."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.rank = mesh, 0

    def compare(self, block: Block) -> None:
        """VerifyError for a program of several ranks."""
        check_mesh(events(block), self.mesh, 0)


def now() -> float:
    """Seconds, for deadlines."""
    return time.monotonic()
