"""Emulated devices in several processes: kernels for CUDA, communication by MPI."""

from __future__ import annotations

from pathlib import Path

import cuda_cases
import pytest
from distributed_cases import results

pytestmark = [cuda_cases.needs_compiler, pytest.mark.usefixtures("mpi")]


def test_ranks_on_emulated_devices_give_the_bits_of_one(tmp_path: Path) -> None:
    one, *_ = results("emulated", 1, tmp_path / "1")
    both = results("emulated", 2, tmp_path / "2")
    assert [r["state"] for r in both] == [one["state"]] * 2
    assert all(r["losses"] == one["losses"] and r["peak"][0] == r["peak"][1] and not r["on_host"] for r in both)
