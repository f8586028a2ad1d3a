"""Several real devices and NCCL (`pytest -m gpu`): the bits of one device, graphs, peaks, and a rank that dies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from distributed_cases import results, started, without_mpi

pytestmark = pytest.mark.gpu


def devices() -> int:
    """How many there are."""
    from recompute.runtime.cuda.device.device import count, unavailable

    return 0 if unavailable() else count()


@pytest.fixture(scope="module", autouse=True)
def several() -> None:
    """Skips where ranks cannot have a device each."""
    from recompute.errors import RecomputeError
    from recompute.runtime.cuda.nccl import load_nccl

    if devices() < 2:
        pytest.skip(f"needs 2 CUDA devices or more, and there is {devices()}")
    if why := without_mpi():
        pytest.skip(why)
    try:
        load_nccl()
    except RecomputeError as e:
        pytest.skip(str(e))


def sizes() -> list[int]:
    return [n for n in (2, 4) if n <= devices()]


def run(ranks: int, folder: Path, *options: str) -> list[dict[str, Any]]:
    """On the devices, with time for NVRTC."""
    return results("cuda", ranks, folder / "-".join([str(ranks), *options]), *options, timeout=900)


@pytest.mark.parametrize("network", ["mlp", "gpt2-tiny", "resnet18"])
@pytest.mark.parametrize("precision", [(), ("precision=bf16",)], ids=["f32", "bf16"])
def test_any_number_of_devices_gives_the_same_bits(network: str, precision: tuple[str, ...], tmp_path: Path) -> None:
    options = (f"network={network}", *precision)
    (one,) = run(1, tmp_path, *options)
    for ranks in sizes():
        for r in run(ranks, tmp_path, *options):
            assert (r["losses"], r["state"]) == (one["losses"], one["state"])
            assert r["peak"][0] == r["peak"][1]
            assert r["libraries"]["nccl"] > 0


@pytest.mark.parametrize("zero", ["zero=1", "zero=2", "zero=3"])
def test_state_in_parts_gives_the_same_losses(zero: str, tmp_path: Path) -> None:
    (one,) = run(1, tmp_path)
    for ranks in sizes():
        assert all(r["losses"] == one["losses"] for r in run(ranks, tmp_path, zero))


def test_graphs_give_the_bits_of_single_launches(tmp_path: Path) -> None:
    replayed, single = run(2, tmp_path, "steps=6"), run(2, tmp_path, "steps=6", "graphs=0")
    assert [(r["losses"], r["state"]) for r in replayed] == [(r["losses"], r["state"]) for r in single]


def test_a_rank_that_dies_ends_all(tmp_path: Path) -> None:
    """Its peers' kernels wait for it on their devices: NCCL gives up, and the processes end."""
    start = time.monotonic()
    run(2, tmp_path)
    whole = time.monotonic() - start
    start = time.monotonic()
    done = started("cuda", 2, tmp_path, "steps=1000000", "die=5", timeout=whole + 60)
    assert done.returncode and time.monotonic() - start < whole + 10


def test_more_ranks_than_devices_are_refused(tmp_path: Path) -> None:
    done = started("cuda", devices() + 1, tmp_path, timeout=300)
    assert done.returncode and f"{devices()} CUDA devices for {devices() + 1} ranks" in done.stderr
