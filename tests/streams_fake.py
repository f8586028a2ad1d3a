"""CUDA's streams, events and graphs as the documentation describes them, with communications in them (nccl_fake.py)."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Call:
    """One call: its member's communicator, name and arguments."""

    comm: Any
    name: str
    words: tuple[int, ...]
    captured: bool = False
    posted: bool = False
    done: bool = False


@dataclass(eq=False)
class Group:
    """Calls that begin together."""

    calls: list[Call]

    def again(self, captured: bool) -> Group:
        return Group([Call(c.comm, c.name, c.words, captured) for c in self.calls])

    @property
    def done(self) -> bool:
        return all(c.done for c in self.calls)


@dataclass(eq=False)
class Capture:
    """Work that is recorded: (stream, what, argument).  `last`, `joined`: by stream, the place of its last work, and up
    to where the first stream has waited for it."""

    origin: Stream
    nodes: list[tuple[Stream, str, Any]] = field(default_factory=list)
    last: dict[Stream, int] = field(default_factory=dict)
    joined: dict[Stream, int] = field(default_factory=dict)
    over: bool = False

    def add(self, stream: Stream, what: str, argument: Any) -> int:
        self.nodes.append((stream, what, argument))
        self.last[stream] = len(self.nodes) - 1
        return len(self.nodes) - 1


class Event:
    def __init__(self) -> None:
        self.at: tuple[Stream, int] | None = None
        self.captured: tuple[Capture, Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        if stream.capture is not None:
            self.captured = (stream.capture, stream, stream.capture.add(stream, "record", self))
        else:
            self.at, self.captured = (stream, stream.put), None

    @property
    def done(self) -> bool:
        assert self.at is not None, "an event that was not recorded is asked for"
        return self.at[0].run >= self.at[1]


class Stream:
    """A queue of functions and of communications; `put` and `run` count what was added and what is done."""

    _numbers = itertools.count(0x5000)

    def __init__(self, world: Any) -> None:
        self.world, self.ptr = world, next(self._numbers)
        self.capture: Capture | None = None
        self.put = self.run = 0
        self.advancing = False
        self.tasks: deque[Any] = deque()
        world.streams[self.ptr] = self

    def add(self, task: Any) -> None:
        """A function, or a `Group` of calls."""
        if self.capture is not None:
            self.capture.add(self, "task", task)
        else:
            self.start(task, captured=False)

    def start(self, task: Any, *, captured: bool) -> None:
        self.tasks.append(task.again(captured) if isinstance(task, Group) else task)
        self.put += 1
        self.advance()

    def advance(self) -> None:
        """Runs functions up to the first communication that is not done, which begins."""
        if self.advancing:
            return
        self.advancing = True
        try:
            while self.tasks and self._over(self.tasks[0]):
                self.tasks.popleft()
                self.run += 1
        finally:
            self.advancing = False

    def _over(self, head: Any) -> bool:
        if isinstance(head, Group):
            self.world.post(head)
            return head.done
        head()
        return True

    def wait_event(self, event: Event) -> None:
        captured = event.captured
        if captured is not None and not captured[0].over:
            capture, source, place = captured
            if self.capture is None:
                assert not self.tasks, "a stream with work of its own is forked into a capture"
                self.capture = capture
            assert self.capture is capture, "a wait for an event of another capture"
            if self is capture.origin:
                capture.joined[source] = max(place, capture.joined.get(source, -1))
            capture.add(self, "wait", event)
            return
        assert self.capture is None, "a capture waits for an event from outside of it"
        assert event.at is not None, "a wait for an event that was not recorded, or in a capture that has ended"
        self.wait(*event.at)

    def wait(self, source: Stream, place: int) -> None:
        """This stream is the step's, which runs at once, or has nothing to wait for."""
        if source.run < place:
            assert self.world.is_first(self), "only the step's stream waits for others' work here"
            self.world.until(lambda: source.run >= place, f"stream {source.ptr:#x}")

    def begin_capture(self) -> None:
        assert self.capture is None, "captured already"
        self.capture = Capture(self)

    def end_capture(self) -> Graph:
        capture = self.capture
        assert capture is not None and capture.origin is self
        for stream, last in capture.last.items():
            stream.capture = None
            assert stream is self or capture.joined.get(stream, -1) >= last, "work of a stream is not joined"
        capture.over = True
        return Graph(capture.nodes)

    def synchronize(self) -> None:
        self.world.until(lambda: not self.tasks, f"stream {self.ptr:#x}")


class Graph:
    def __init__(self, nodes: list[tuple[Stream, str, Any]]) -> None:
        self.nodes = nodes

    def launch(self) -> None:
        """In the order of the capture, with events of its own."""
        recorded: dict[Event, tuple[Stream, int]] = {}
        for stream, what, argument in self.nodes:
            assert stream.capture is None
            if what == "task":
                stream.start(argument, captured=True)
            elif what == "record":
                recorded[argument] = (stream, stream.put)
            else:
                stream.wait(*recorded[argument])
