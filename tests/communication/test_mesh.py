"""The mesh of ranks."""

from __future__ import annotations

import pytest

import recompute as rc
from recompute.communication.mesh import Mesh


def test_coordinates_and_groups() -> None:
    mesh = Mesh.parse("dp=2, tp=3,pp=4")
    assert mesh == Mesh.of(dp=2, tp=3, pp=4) == Mesh.parse(str(mesh))
    assert mesh.ranks == 24 and mesh.size("tp") == 3
    assert [mesh.coordinate(17, a) for a in ("dp", "tp", "pp")] == [1, 1, 1]
    assert mesh.group(17, "pp") == (16, 17, 18, 19)
    assert mesh.group(17, "tp") == (13, 17, 21)
    assert mesh.group(17, "dp") == (5, 17)
    for axis, size in mesh.axes:
        groups = mesh.groups(axis)
        assert sorted(r for g in groups for r in g) == list(range(24)) and {len(g) for g in groups} == {size}
        assert all(
            mesh.group(g[i], axis) == g and mesh.coordinate(g[i], axis) == i for g in groups for i in range(size)
        )


def test_a_mesh_of_one() -> None:
    assert Mesh().ranks == Mesh.parse("").ranks == Mesh.of(dp=1).ranks == 1
    assert Mesh.of(dp=1).group(0, "dp") == (0,)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("dp", "give AXIS=RANKS"),
        ("dp=two", "give AXIS=RANKS"),
        ("dp=0", "at least 1"),
        ("dp=2,dp=2", "names two of them"),
        ("d-p=2", "cannot be the name"),
    ],
)
def test_meshes_that_cannot_be(text: str, why: str) -> None:
    with pytest.raises(rc.UsageError, match=why):
        Mesh.parse(text)


def test_an_unknown_axis() -> None:
    with pytest.raises(rc.UsageError, match=r"the mesh dp=2 has no axis 'db' \(did you mean dp\?\)"):
        Mesh.of(dp=2).group(0, "db")
