"""Divided operators on real processes: the losses of one rank, and the predicted peak."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from distributed_cases import results, without_mpi
from distributed_step import BATCH, NETWORKS, batches

import recompute as rc

pytestmark = pytest.mark.skipif(bool(without_mpi()), reason=without_mpi() or "MPI is there")


def losses_of_one_rank(name: str) -> list[float]:
    program = rc.load(rc.models.build(name, **NETWORKS[name]), batch=BATCH)
    loss = rc.losses.cross_entropy(program["logits"])
    rc.Adam(1e-2).minimize(loss)
    executor = rc.Executor()
    return [float(executor.run(program, feed, [loss])[0]) for feed in batches(program, 1, 0, 4)]


@pytest.mark.parametrize(("mesh", "ranks"), [("tp2", 2), ("dp2.tp2", 4)])
def test_processes(mesh: str, ranks: int, tmp_path: Path) -> None:
    found = results("cpu", ranks, tmp_path, "network=gpt2-tiny", f"mesh={mesh}")
    for one in found:
        assert one["losses"] == found[0]["losses"]
        np.testing.assert_allclose(one["losses"], losses_of_one_rank("gpt2-tiny"), rtol=1e-5)
        predicted, measured = one["peak"]
        assert predicted == measured
