"""Closed formulas for steps of many ranks, beside published tables."""

from __future__ import annotations

import pytest

import recompute as rc
from recompute.analysis.cluster.candidates import Candidate, candidates
from recompute.analysis.cluster.formulas import Transformer, activation_bytes, memory_bytes, state_bytes, step_time
from recompute.communication.links import Network
from recompute.cost import device

SELENE = Network(node=8, inside=300e9, across=25e9)
NET = Transformer(96, 12288, 96, 2048, 51200)


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "gibibytes"),
    [(False, "none", 51.8), (True, "none", 32.1), (False, "selective", 29.2), (True, "selective", 9.6)],
)
def test_activations_of_175b(sequence_parallel: bool, recompute: str, gibibytes: float) -> None:
    """The first stage of eight (arXiv 2205.05198, equations 2 to 6), without chunks; with three, 1 + 7/24 as much."""
    c = Candidate(1, 8, 8, 1, 0, "1f1b", 1, sequence_parallel, recompute)
    chunked = Candidate(1, 8, 8, 1, 0, "interleaved", 3, sequence_parallel, recompute)
    assert activation_bytes(NET, chunked) == pytest.approx(activation_bytes(NET, c) * (1 + 7 / 24))
    assert activation_bytes(NET, c) / 2**30 == pytest.approx(gibibytes, rel=0.005)


def test_full_recomputation_keeps_the_layers_inputs() -> None:
    c = Candidate(tp=8, pp=8, recompute="full")
    assert activation_bytes(NET, c) == 96 * 2 * 2048 * 12288


def test_zero_divides_its_terms() -> None:
    """2 + 4 + 12 bytes of a parameter: 12 are divided in stage 1, 16 in stage 2, 18 in stage 3."""
    net = Transformer(36, 4096, 32, 2048, 51200)
    found = [state_bytes(net, Candidate(dp=64, zero=zero)) / state_bytes(net, Candidate(dp=64)) for zero in range(4)]
    assert found == pytest.approx([1, (6 + 12 / 64) / 18, (2 + 16 / 64) / 18, 1 / 64])


@pytest.mark.parametrize(
    ("net", "pp", "chunks", "batch", "micro", "full", "selective"),
    [
        (Transformer(48, 6144, 64, 2048, 51200), 1, 1, 4, 4, 1.42, 1.10),
        (NET, 8, 3, 64, 1, 18.13, 13.75),
        (Transformer(105, 20480, 128, 2048, 51200), 35, 3, 280, 1, 49.05, 37.83),
        (Transformer(128, 25600, 160, 2048, 51200), 64, 1, 512, 1, 94.42, 71.49),
    ],
)
def test_steps_of_korthikanti(
    net: Transformer, pp: int, chunks: int, batch: int, micro: int, full: float, selective: float
) -> None:
    schedule = "interleaved" if chunks > 1 else "1f1b"
    for recompute, seconds in (("full", full), ("selective", selective)):
        c = Candidate(1, 8, pp, micro, 0, schedule, chunks, recompute == "selective", recompute)
        found = step_time(net, c, batch, device("a100-80"), SELENE)
        assert found.seconds == pytest.approx(seconds, rel=0.15)
        assert 0 <= found.bubble < found.seconds and 0.2 < found.mfu < 0.65


def test_candidates_divide_what_there_is() -> None:
    found = list(candidates(64, 64, layers=96, heads=96, vocab=51200))
    assert len(found) == len(set(found)) > 100
    for c in found:
        assert c.ranks == 64 == c.mesh.ranks and c.tp <= 8 and 96 % (c.pp * c.chunks) == 0
        assert 64 % (c.dp * c.micro_batch) == 0 and memory_bytes(NET, c) > 0
        assert step_time(NET, c, 64, device("h100"), SELENE).seconds > 0


def test_candidates_of_uneven_stages() -> None:
    even = {c.pp for c in candidates(64, 64, layers=126)}
    assert even == {1, 2}
    assert {c.pp for c in candidates(64, 64, layers=126, even=False)} == {1, 2, 4, 8, 16, 32, 64}


def test_mistakes_are_told() -> None:
    with pytest.raises(rc.UsageError, match="tp must be at least 1"):
        Candidate(tp=0)
    with pytest.raises(rc.UsageError, match="interleaved if it has several chunks"):
        Candidate(pp=2, chunks=2)
    with pytest.raises(rc.UsageError, match="give a multiple of 6"):
        step_time(NET, Candidate(dp=2, micro_batch=3), 64, device("h100"), SELENE)
    with pytest.raises(rc.UsageError, match="at least one rank"):
        next(candidates(0, 8, layers=1, heads=1, vocab=1))
