"""What ranks compare before they run together."""

from __future__ import annotations

import pytest

import recompute as rc
from recompute.communication.mesh import Mesh
from recompute.runtime.communication.agreement import Card, agree, card
from recompute.runtime.communication.memory import ResidentGrowth

TEXT = """program p {
  input %x: f32[4]
  communicate %s: f32[4] = KIND(%x) {axis="dp", ranks=3, number=0, channel="c"}
  communicate %y: f32[4] = CommWait(%s, %x)
  output %y
}"""
MESH = Mesh.of(dp=3)


def of(rank: int, kind: str = "AllReduce", version: str = "1") -> Card:
    return card(rc.verify(rc.parse(TEXT.replace("KIND", kind))), {"numpy": version}, MESH, rank)


def test_ranks_that_fit() -> None:
    assert agree([of(r) for r in range(3)], MESH) == {"c": "dp"}


def test_programs_that_do_not_fit() -> None:
    with pytest.raises(
        rc.VerifyError, match=r"do not fit together \(digests: \w{12} on ranks 0, 2; \w{12} on rank 1\)"
    ):
        agree([of(0), of(1, "Broadcast"), of(2)], MESH)


def test_versions_that_differ() -> None:
    with pytest.raises(rc.UsageError, match=r"different versions of numpy: 1 on ranks 0, 2; 2 on rank 1; install"):
        agree([of(0), of(1, version="2"), of(2)], MESH)


def test_growth_of_the_resident_set() -> None:
    with ResidentGrowth() as growth:
        held = bytearray(b"1" * (32 << 20))
    assert len(held) == 32 << 20 and 30 << 20 <= growth.kept <= growth.peak
