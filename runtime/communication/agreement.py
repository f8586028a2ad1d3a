"""What ranks compare before they run together: versions and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...communication.events import Event, check_mesh, digest, events
from ...communication.mesh import Mesh
from ...communication.verify_ranks import verify_events
from ...errors import UsageError, VerifyError
from ...language.ir import Block


@dataclass(frozen=True)
class Card:
    """What a rank says of itself: the events of its program and their digest, and versions by name."""

    digest: str
    events: tuple[Event, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def channels(self) -> dict[str, str]:
        """Channel → axis."""
        return {e.op.queue: e.op.axis for e in self.events if e.op is not None}


def card(block: Block, versions: Mapping[str, str], mesh: Mesh, rank: int) -> Card:
    """That of a verified block.  VerifyError where it communicates along an axis that the mesh lacks."""
    found = events(block)
    check_mesh(found, mesh, rank)
    return Card(digest(found), found, versions)


def agree(cards: Sequence[Card], mesh: Mesh) -> dict[str, str]:
    """Checks that the ranks fit together; gives all channels, with their axes.

    UsageError for different versions, VerifyError with the ranks for programs that do not match or wait for ever.
    """
    for name in cards[0].versions:
        found = [c.versions.get(name, "none") for c in cards]
        if len(set(found)) > 1:
            raise UsageError(f"the ranks have different versions of {name}: {_by_rank(found)}; install the same one")
    digests = [c.digest for c in cards]
    try:
        verify_events([(c.digest, c.events) for c in cards], mesh)
    except VerifyError as e:
        different = f" (digests: {_by_rank([d[:12] for d in digests])})" if len(set(digests)) > 1 else ""
        raise VerifyError(f"the programs of the ranks do not fit together{different}: {e}") from None
    return {channel: axis for c in cards for channel, axis in c.channels.items()}


def _by_rank(found: Sequence[str]) -> str:
    """`1.0 on ranks 0, 2; 1.1 on rank 1`."""
    ranks: dict[str, list[int]] = {}
    for rank, what in enumerate(found):
        ranks.setdefault(what, []).append(rank)
    return "; ".join(f"{what} on rank{'s' * (len(on) > 1)} {_listed(on)}" for what, on in ranks.items())


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
