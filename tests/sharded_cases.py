"""Steps that axes of a mesh divide, beside one rank's: programs of all ranks, in lock-step, and what they end with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from distributed_cases import own_arrays

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.communication.verify_ranks import verify_ranks
from recompute.language.ir import Block
from recompute.language.program import Program
from recompute.training.parallel import DataParallel
from recompute.training.parts import parts_of

#: makes a program and its loss
Make = Callable[[], tuple[Program, Any]]


def adam(**options: Any) -> Any:
    """Adam, whose epsilon is so large that gradients that are zeros but for rounding stay so."""
    return rc.Adam(1e-2, epsilon=1e-3, **options)


def ranks_of(make: Make, mesh: str, optimizer: Callable[[], Any] = adam, **options: Any) -> list[tuple[Program, str]]:
    """The minimized programs of all ranks, and the loss's name."""
    found = []
    for rank in range(Mesh.parse(mesh).ranks):
        program, loss = make()
        DataParallel(optimizer(), Mesh.parse(mesh), rank, batch=program.block.batch, **options).minimize(loss)
        found.append((program, loss.name))
    return found


def feed_of(program: Program, high: int = 2) -> dict[str, np.ndarray]:
    """Inputs of one batch: normal numbers, and integers below `high`."""
    g = np.random.default_rng(3)
    return {
        v.name: (g.standard_normal(v.shape) if v.type.is_float else g.integers(0, high, v.shape)).astype(v.type.numpy)
        for v in program.block.inputs
    }


def same_as_one_rank(
    make: Make, mesh: str, optimizer: Callable[[], Any] = adam, steps: int = 3, **options: Any
) -> list[Program]:
    """Asserts that losses, parameters and state after a few steps are those of one rank, to 1e-5; the programs."""
    program, loss = make()
    feed = feed_of(program)
    optimizer().minimize(loss)
    alone = LockStep(program.block, Mesh(), own_arrays(program))
    made, shape = ranks_of(make, mesh, optimizer, **options), Mesh.parse(mesh)
    programs = [p for p, _ in made]
    verify_ranks([p.block for p in programs], shape)
    machine = LockStep([p.block for p in programs], shape, [own_arrays(p) for p in programs])
    feeds = [rows(feed, shape, r) for r in range(shape.ranks)]
    for _ in range(steps):
        want = float(alone.run(feed, [loss.name])[0][loss.name])
        for found in machine.run(feeds, [made[0][1]]):
            np.testing.assert_allclose(float(found[made[0][1]]), want, rtol=1e-5)
    for name, whole in alone.state[0].items():
        part = parts_of(programs[0]).get(name)
        mine = [s[name] for s in machine.state]
        got = part.joined(mine) if part is not None else mine[0]
        assert part is not None or all(np.array_equal(m, mine[0]) for m in mine), name
        np.testing.assert_allclose(
            got, whole, rtol=1e-5, atol=1e-5 * max(1e-3, np.abs(whole).max(initial=0)), err_msg=name
        )
    return programs


def rows(feed: Mapping[str, np.ndarray], mesh: Mesh, rank: int) -> dict[str, np.ndarray]:
    """The rows of a rank: all ranks of a row of dp have the same."""
    n = dict(mesh.axes).get("dp", 1)
    at = mesh.coordinate(rank, "dp") if n > 1 else 0
    return {k: a[at * len(a) // n : (at + 1) * len(a) // n] for k, a in feed.items()}


def communications(block: Block, least: int = 0) -> Counter[tuple[str, str]]:
    """How many communications of at least `least` bytes there are, by role and operator."""
    begins = [o for o in block.operators if o.op.communicates == "begin"]
    return Counter((o.role.value, o.op.name) for o in begins if next(o.reads()).nbytes >= least)
