"""Matching: which communications of different ranks belong together, when they are done, and why they never are.

`Matcher` knows the queues of all actors and nothing of what a communication does, so that the verifier, whose actors
stand for many ranks each, and the interpreter, whose actors are ranks, find the same faults in the same words.
`run_together` advances the actors: what one of them waits for is done when all members have begun it.  No actor's
result depends on the order in which they advance: queues are in order, nothing but a wait blocks, and what is done
stays done.  So a deadlock of one order is one of every order.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import VerifyError
from ..ops.communication.base import Communication
from ..ops.communication.messages import Message, Send


@dataclass(eq=False)
class Begun:
    """A communication that an actor has begun: the operator, its place in the program, the types of input and output.

    `payload`: whatever the actor needs when it is done.
    """

    actor: int
    op: Communication
    at: int
    types: tuple[str, str]
    payload: Any = None
    done: bool = field(default=False)

    def __str__(self) -> str:
        return f"{self.op.name} number {self.op.number} on channel '{self.op.queue}' (operator {self.at})"


@dataclass(frozen=True)
class Places:
    """Where actors are: for each axis the members of an actor's group in order, and the actor's coordinate.

    `rank`: the rank that an actor is, or stands for.
    """

    group: Callable[[int, str], Sequence[int]]
    coordinate: Callable[[int, str], int]
    rank: Callable[[int], int]


class Matcher:
    """The queues of all actors.  `done` is called with the members of each communication, in order (a message's sender
    is first), when all of them have begun it."""

    def __init__(self, places: Places, done: Callable[[list[Begun]], None] | None = None) -> None:
        self.places = places
        self.done = done
        self.queues: dict[tuple[int, str], deque[Begun]] = {}

    def begin(self, begun: Begun) -> None:
        """Adds a communication to its actor's queue.  VerifyError if it does not fit what others have begun."""
        self.queues.setdefault((begun.actor, begun.op.queue), deque()).append(begun)
        todo = [begun]
        while todo:
            head = todo.pop()
            members = self._members(head)
            if members is None:
                continue
            if self.done is not None:
                self.done(members)
            for one in dict.fromkeys(members):
                one.done = True
                queue = self.queues[one.actor, one.op.queue]
                queue.popleft()
                if queue:
                    todo.append(queue[0])

    def head(self, actor: int, channel: str) -> Begun | None:
        """The first communication of an actor's queue that is not done."""
        queue = self.queues.get((actor, channel))
        return queue[0] if queue else None

    def _members(self, begun: Begun) -> list[Begun] | None:
        """All members of a communication that can be done now."""
        if begun.done or self.head(begun.actor, begun.op.queue) is not begun:
            return None
        if isinstance(begun.op, Message):
            other = self._other_end(begun, begun.op)
            if other is None:
                return None
            return [begun, other] if isinstance(begun.op, Send) else [other, begun]
        heads = [self.head(a, begun.op.queue) for a in self.places.group(begun.actor, begun.op.axis)]
        for h in dict.fromkeys(heads):
            if h is not None and h is not begun:
                self._agree(begun, h)
        return None if None in heads else heads  # type: ignore[return-value]

    def _other_end(self, begun: Begun, op: Message) -> Begun | None:
        """The first message of the other rank, if it is for this one."""
        coordinate, axis = self.places.coordinate(begun.actor, op.axis), op.axis
        if op.peer == coordinate:
            raise VerifyError(f"{self.name(begun)}: a rank sends nothing to itself; its peer must be another one")
        other = self.head(self.places.group(begun.actor, axis)[op.peer], op.queue)
        if other is None:
            return None
        if not isinstance(other.op, Message) or other.op.axis != axis:
            raise self._mismatch(begun, other, "one is a message, the other is none, or along another axis")
        if other.op.peer != coordinate:
            return None
        if type(other.op) is not op.other:
            return None  # both send, or both receive: they wait for ever
        sent, received = (begun, other) if isinstance(op, Send) else (other, begun)
        for what in ("number", "ranks", "order"):
            if getattr(op, what) != getattr(other.op, what):
                raise self._mismatch(begun, other, f"their {what} differs")
        if sent.types[0] != received.types[1]:
            raise self._mismatch(begun, other, f"{sent.types[0]} is sent, {received.types[1]} is received")
        return other

    def _agree(self, a: Begun, b: Begun) -> None:
        """VerifyError unless two members of a collective have the same operator with the same types."""
        if a.op == b.op and a.types == b.types:
            return
        if type(a.op) is not type(b.op):
            raise self._mismatch(a, b, "they are different operators")
        for f in dataclasses.fields(a.op):
            mine, theirs = getattr(a.op, f.name), getattr(b.op, f.name)
            if mine != theirs:
                raise self._mismatch(a, b, f"{f.name} is {mine!r} and {theirs!r}")
        raise self._mismatch(a, b, f"types are {' -> '.join(a.types)} and {' -> '.join(b.types)}")

    def _mismatch(self, a: Begun, b: Begun, why: str) -> VerifyError:
        return VerifyError(
            f"{self.name(a)} meets {self.name(b)}, and {why}: all ranks of a group must begin the same communications "
            "on a channel, in the same order"
        )

    def name(self, begun: Begun) -> str:
        """The rank and the operator."""
        return f"rank {self.places.rank(begun.actor)}: {begun}"

    def missing(self, begun: Begun) -> tuple[Begun, int]:
        """The head of the queue of a communication that is not done, and an actor for which it waits."""
        first = self.head(begun.actor, begun.op.queue)
        assert first is not None
        group = self.places.group(first.actor, first.op.axis)
        if isinstance(first.op, Message):
            return first, group[first.op.peer]
        return first, next(a for a in group if self.head(a, first.op.queue) is None)


def run_together(matcher: Matcher, actors: Mapping[int, Iterator[Begun]]) -> None:
    """Advances all actors to their ends.  An actor yields what it waits for.  VerifyError with the ranks that wait for
    each other if they never end, or for one that has ended."""
    waiting: dict[int, Begun | None] = dict.fromkeys(actors)
    while waiting:
        moved = False
        for actor in list(waiting):
            wanted = waiting[actor]
            if wanted is not None and not wanted.done:
                continue
            moved = True
            event = next(actors[actor], None)
            if event is None:
                del waiting[actor]
            else:
                waiting[actor] = event
        if not moved:
            raise _deadlock(matcher, waiting)


def _deadlock(matcher: Matcher, waiting: Mapping[int, Begun | None]) -> VerifyError:
    """The error for actors that all wait: the chain of who waits for whom, up to where it closes or ends."""
    lines: list[str] = []
    seen: set[int] = set()
    actor = next(iter(waiting))
    while actor in waiting and actor not in seen:
        seen.add(actor)
        wanted = waiting[actor]
        assert wanted is not None
        first, other = matcher.missing(wanted)
        behind = "" if first is wanted else f", which is behind {first}"
        rank, missed = matcher.places.rank(actor), matcher.places.rank(other)
        lines.append(f"rank {rank} waits for {wanted}{behind}, and rank {missed} does not take part in it")
        actor = other
    last = matcher.places.rank(actor)
    end = f"rank {last} waits already: a cycle" if actor in waiting else f"rank {last} has ended"
    return VerifyError("the ranks would wait for ever:\n  " + "\n  ".join([*lines, end]))
