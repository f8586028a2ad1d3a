"""Comparison of ranks before they run together: versions and programs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...communication.events import Event, check_mesh, digest, events
from ...communication.mesh import Mesh
from ...communication.replicated import HIDDEN
from ...communication.verify_ranks import verify_events
from ...errors import UsageError, VerifyError
from ...language.ir import Block
from .engine import Engine

#: why a difference between ranks is an error
_ONE_MODEL = "ranks train one model together: start all of them with the same files and options"


@dataclass(frozen=True)
class Card:
    """A rank's description of itself: the events of its program and their digest, and versions by name."""

    digest: str
    events: tuple[Event, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def channels(self) -> dict[str, str]:
        """Channel → axis."""
        return {e.op.queue: e.op.axis for e in self.events if e.op is not None}


def card(block: Block, versions: Mapping[str, str], mesh: Mesh, rank: int) -> Card:
    """The card of a verified block.  VerifyError where it communicates along an axis that the mesh lacks."""
    trace = events(block)
    check_mesh(trace, mesh, rank)
    return Card(digest(trace), trace, versions)


def agree(cards: Sequence[Card], mesh: Mesh) -> dict[str, str]:
    """Checks that the ranks fit together; gives all channels, with their axes.

    UsageError for different versions, VerifyError with the ranks for programs that do not match or wait for ever.
    """
    for name in cards[0].versions:
        versions_here = [c.versions.get(name, "none") for c in cards]
        if len(set(versions_here)) > 1:
            raise UsageError(
                f"the ranks have different versions of {name}: {_by_rank(versions_here)}; install the same one"
            )
    digests = [c.digest for c in cards]
    try:
        verify_events([(c.digest, c.events) for c in cards], mesh)
    except VerifyError as e:
        different = f" (digests: {_by_rank([d[:12] for d in digests])})" if len(set(digests)) > 1 else ""
        raise VerifyError(f"the programs of the ranks do not fit together{different}: {e}") from None
    return {channel: axis for c in cards for channel, axis in c.channels.items()}


def must_be_same(engine: Engine, what: str, facts: Mapping[str, str], values: Mapping[str, str] | None = None) -> None:
    """UsageError, on all ranks, that names the first fact that is not the same on all of them.

    `facts`: what every rank must have, by name; `values`: what those must have alike that have it (parts of values).
    Every rank calls it, with its own; `what` says what for, where one does not come.
    """
    hash_here = hashlib.sha256(repr((sorted(facts.items()), sorted((values or {}).items()))).encode()).digest()
    if len(set(engine.collect(what, hash_here))) > 1:
        check_same(engine.collect(what, (dict(facts), dict(values or {}))))


def check_same(entries: Sequence[tuple[Mapping[str, str], Mapping[str, str]]]) -> None:
    """UsageError for the first difference between ranks' facts and values (see `must_be_same`)."""
    for name in dict.fromkeys(n for facts, _ in entries for n in facts):
        texts = [facts.get(name, "none") for facts, _ in entries]
        if len(set(texts)) > 1:
            raise UsageError(f"the ranks do not have the same {name}: {_by_rank(texts)}; {_ONE_MODEL}")
    different = []
    for name in dict.fromkeys(n for _, values in entries for n in values):
        here = {rank: values[name] for rank, (_, values) in enumerate(entries) if name in values}
        if len(set(here.values())) > 1:
            different.append((name, here))
    if different:
        name, here = different[0]
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        name = name.partition(HIDDEN)[0]
        shown = _by_rank([f"digest {d}" for d in here.values()], list(here))
        raise UsageError(f"the ranks do not have the same contents of {name}{more}: {shown}; {_ONE_MODEL}")


def _by_rank(texts: Sequence[str], numbers: Sequence[int] | None = None) -> str:
    """`1.0 on ranks 0, 2; 1.1 on rank 1`."""
    ranks: dict[str, list[int]] = {}
    for rank, what in zip(numbers or range(len(texts)), texts, strict=True):
        ranks.setdefault(what, []).append(rank)
    return "; ".join(f"{what} on rank{'s' * (len(on) > 1)} {_listed(on)}" for what, on in ranks.items())


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
