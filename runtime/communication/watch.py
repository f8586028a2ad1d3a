"""The watch over all ranks: a rank that dies, raises, leaves early or is late takes all ranks down, with a reason.

A thread on each rank looks after three things, a few times a second:

* processes on the same machine: the end of one wakes it at once (pidfd);
* ranks that have left: each says, when its program ends, how much it has communicated; who waits for more ends the job;
* deadlines: a communication that waits too long asks all ranks where they are.  One that does not answer is stopped or
  cut off, and ends the job; one that answers is busy, and gets ten deadlines.

A program that has ended waits for the others, as MPI's own end would, and keeps answering meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import select
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from .engine import now
from .started import given_deadline

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

#: seconds between two looks, for an answer, and the deadline where none is given; deadlines for one that answers
LOOK, ANSWER, DEADLINE, BUSY = 0.05, 3.0, 60.0, 10
_TAG = 7
#: the path under which comparisons of programs are counted
_COMPARISON = ("", -1)


class _Wait:
    """A comparison of programs that is under way; looks like a transfer."""

    def __init__(self, what: str, engine: str, index: int) -> None:
        self.what, self.engine, self.index, self.since = what, engine, index, now()

    def __str__(self) -> str:
        return self.what


class Watch:
    """The watch of this process.  `comm`: a communicator of all ranks that nothing else uses."""

    def __init__(self, mpi: ModuleType, comm: Comm) -> None:
        self._mpi, self.comm = mpi, comm
        self.rank, self.size = comm.rank, comm.size
        #: why a step of this rank failed, which it says when it leaves
        self.failure = ""
        self.left: dict[int, tuple[dict, str]] = {}
        self._engines: dict[str, Any] = {}
        self._made = 0
        self._waits: list[_Wait] = []
        self._compared: Counter[str] = Counter()
        self._deadline, self._given = DEADLINE, False
        self._asked: dict[int, float] = {}
        self._answers: dict[int, tuple[float, dict, str]] = {}
        #: a descriptor to write to when this rank's end was announced (-1: nobody asks)
        self.announce = -1
        self._told: set[str] = set()
        self._ending = False
        self._sent: list[Any] = []  # requests hold their messages
        self._over = threading.Event()
        self._ended = threading.Lock()
        #: descriptor of a process on this machine → its rank and number
        self._peers = _processes(comm.allgather((machine(), os.getpid())), self.rank)
        self._thread = threading.Thread(target=self._run, name="recompute watch", daemon=True)
        atexit.register(self.leave)
        if self.size > 1:
            self._thread.start()
            sys.excepthook = self.raised
            threading.excepthook = lambda a: self.raised(a.exc_type, a.exc_value, a.exc_traceback)

    # -- what engines say -----------------------------------------------------------------------------------------

    def add(self, engine: Any) -> str:
        """A name for an engine, the same on all ranks."""
        self._made += 1
        self._engines[str(self._made)] = engine
        return str(self._made)

    def set_deadline(self, seconds: float | None) -> None:
        """The deadline in seconds; None: that of the environment's RECOMPUTE_DEADLINE, or 60."""
        seconds = given_deadline() if seconds is None else seconds
        if seconds is not None:
            if not seconds > 0:
                raise UsageError(f"the deadline must be more than 0 seconds, not {seconds}")
            self._deadline, self._given = float(seconds), True

    def expect(self, seconds: float) -> None:
        """A step takes so long: the deadline is 100 of them, if that is more than the default and none was given."""
        if not self._given:
            self._deadline = max(self._deadline, 100 * seconds)

    @contextlib.contextmanager
    def waiting(self, what: str, engine: str) -> Iterator[None]:
        """Inside, the main thread waits for all ranks at a comparison."""
        wait = _Wait(what, engine, self._compared[engine])
        self._compared[engine] += 1
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    # -- the end --------------------------------------------------------------------------------------------------

    @property
    def because(self) -> str:
        """The error of this rank's last step that failed, as a part of a sentence."""
        return f" after an error ({self.failure})" if self.failure else ""

    def abort(self, why: str, code: int = 1, silent: Collection[int] = ()) -> None:
        """Ends all ranks.  `silent`: ranks that may be stopped, which MPI's own signal would not end."""
        if self._ending or not self._ended.acquire(blocking=False):
            time.sleep(5)  # another rank, or thread, is at it
            os._exit(code)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        _write(f"recompute: {why}; all ranks end\n")
        self._announced()
        for other in self._others():  # which stay silent then
            self._send(other, "end", None)
        for fd, (rank, _) in list(self._peers.items()):
            if rank in silent:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
        for engine in list(self._engines.values()):
            with contextlib.suppress(Exception):
                engine.abort()
        time.sleep(3 * LOOK)
        self.comm.Abort(code)
        os._exit(code)

    def _announced(self) -> None:
        if self.announce >= 0:
            os.write(self.announce, b".")

    def raised(self, kind: Any, error: Any, at: Any) -> None:
        """Takes the place of sys.excepthook: the traceback, with its rank, and the end of all."""
        text = "".join(traceback.format_exception(kind, error, at))
        _write("".join(f"rank {self.rank}: {line}\n" for line in text.splitlines()))
        first = str(error).partition("\n")[0][:300]
        self.abort(f"rank {self.rank} has raised {kind.__name__}{': ' * bool(first)}{first}")

    def ends_like_first(self, error: str) -> bool:
        """Whether rank 0 leaves with the same error as this one, within a short time."""
        self.failure = error
        until = now() + ANSWER
        while self.rank and 0 not in self.left and now() < until:
            time.sleep(LOOK / 5)
        return bool(self.rank) and self.left.get(0, ({}, ""))[1] == error

    def leave(self) -> None:
        """Waits until all ranks' programs have ended."""
        for other in self._others():
            self._send(other, "left", (self._counts(), self.failure))
        while len(self.left) < self.size - 1:
            time.sleep(LOOK / 5)
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._announced()
        for engine in list(self._engines.values()):
            engine.close()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        for fd in self._peers:
            poll.register(fd, select.POLLIN)
        while not self._over.is_set():
            if not self._peers:
                time.sleep(LOOK)
            for fd, _ in poll.poll(LOOK * 1000) if self._peers else ():
                # it may have said goodbye, or another rank ends all; its parent process knows better (rank.py)
                time.sleep(2 * LOOK if self.announce < 0 else ANSWER)
                self._look()
                rank, pid = self._peers.pop(fd)
                poll.unregister(fd)
                if rank not in self.left and not self._ending:
                    self.abort(f"rank {rank} (process {pid}) has died: it was killed, or ended without saying so")
            self._look()

    def _look(self) -> None:
        """Messages, then what follows from them."""
        status = self._mpi.Status()
        while self.comm.Iprobe(self._mpi.ANY_SOURCE, _TAG, status):
            rank = status.Get_source()
            kind, what = self.comm.recv(source=rank, tag=_TAG)
            if kind == "left":
                self.left[rank] = what
            elif kind == "end":
                self._ending = True
                self._announced()
            elif kind == "where":
                self._send(rank, "here", (self._counts(), self._where()))
            else:
                self._answers[rank] = (now(), *what)
        for engine in list(self._engines.values()):
            if why := engine.trouble():
                self.abort(f"rank {self.rank}: {why}")
        for wait, members in self._waiting():
            self._check_left(wait, members)
            self._check_deadline(wait, members)

    def _waiting(self) -> Iterator[tuple[Any, dict[int, tuple]]]:
        """The waits of this rank, each with the ranks that take part and the paths under which they count it."""
        for wait in list(self._waits):
            yield wait, dict.fromkeys(self._others(), (wait.engine, *_COMPARISON))
        for name, engine in list(self._engines.items()):
            for transfer in engine.current():
                yield transfer, {r: (name, *path) for r, path in engine.members(transfer).items()}

    def _check_left(self, wait: Any, members: dict[int, tuple]) -> None:
        for rank, path in members.items():
            if rank in self.left and self.left[rank][0].get(path, 0) <= wait.index:
                why = f" after an error ({self.left[rank][1]})" if self.left[rank][1] else ""
                self.abort(f"rank {rank} has ended its program{why}, and rank {self.rank} waits for it at {wait}")

    def _check_deadline(self, wait: Any, members: dict[int, tuple]) -> None:
        since = wait.since
        late = now() - since
        if not since or late < self._deadline:
            return
        asked = self._asked.get(id(wait), 0.0)
        if asked < since or now() - asked > self._deadline + ANSWER:  # the first time, or once more
            self._asked[id(wait)] = now()
            for rank in members:
                self._send(rank, "where", None)
        elif now() - asked > ANSWER and wait.since == since:
            self._judge(wait, members, late, asked)

    def _judge(self, wait: Any, members: dict[int, tuple], late: float, asked: float) -> None:
        """Warns about, or aborts for, ranks that have not begun what this rank waits for: stopped, or busy."""
        silent = [r for r in members if r not in self._answers or self._answers[r][0] < asked]
        busy = {r: self._answers[r][2] for r, p in members.items() if r not in silent and self._behind(r, p, wait)}
        reasons = [f"rank {r} gives no sign of life: it is stopped, or cut off" for r in silent]
        reasons += [f"rank {r} has not begun it: {where}" for r, where in busy.items()]
        text = f"rank {self.rank} has waited for {late:.0f} s at {wait}: {'; '.join(reasons) or 'all ranks are there'}"
        if silent or late > BUSY * self._deadline:
            self.abort(text, silent=silent)
        if str(wait) not in self._told:
            self._told.add(str(wait))
            _write(f"recompute: {text}; all end after {BUSY * self._deadline:.0f} s\n")

    def _behind(self, rank: int, path: tuple, wait: Any) -> bool:
        """Whether a rank had not begun it when it answered."""
        return bool(self._answers[rank][1].get(path, 0) <= wait.index)

    def _where(self) -> str:
        """This rank's activity in words: its waits, or that it computes."""
        waits = [str(wait) for wait, _ in self._waiting()]
        return f"it waits at {'; '.join(waits)}" if waits else "it computes, or is outside of a step"

    def _counts(self) -> dict[tuple, int]:
        """How much was begun, by engine and path."""
        counts = {(name, *_COMPARISON): n for name, n in self._compared.items()}
        for name, engine in list(self._engines.items()):
            counts.update({(name, *path): n for path, n in engine.begun().items()})
        return counts

    def _others(self) -> Iterator[int]:
        return (r for r in range(self.size) if r != self.rank)

    def _send(self, rank: int, kind: str, what: Any) -> None:
        self._sent = [r for r in self._sent if not r.Test()]
        self._sent.append(self.comm.isend((kind, what), rank, _TAG))


def _write(text: str) -> None:
    """Standard error in one piece, so that ranks' lines do not mix."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def machine() -> tuple[str, str]:
    """Names the machine, and the part of it whose process numbers this process sees."""
    try:
        return platform.node(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return platform.node(), ""


def _processes(entries: list[Any], number: int) -> dict[int, tuple[int, int]]:
    """A descriptor for each process on this machine, which is readable when it has ended: (rank, process)."""
    peers: dict[int, tuple[int, int]] = {}
    for rank, (machine, pid) in enumerate(entries):
        if rank != number and machine == entries[number][0] and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                peers[os.pidfd_open(pid)] = rank, pid
    return peers
