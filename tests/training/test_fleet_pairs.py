"""Fleet's options in pairs: a program shows both, or an error names both."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from functools import cache

import pytest
from fleet_cases import at

import recompute as rc
from recompute import fleet
from recompute.errors import UsageError
from recompute.language.program import Program
from recompute.ops.communication.base import Communication
from recompute.ops.loss.scale import LossScaleUpdate
from recompute.ops.optimizer.norm_updates import LambUpdate, LarsUpdate
from recompute.passes.offloading.offload import offloaded
from recompute.training.fleet.combining import OPTIONS, REFUSED_PAIRS

pytestmark = pytest.mark.usefixtures("before_fleet")
RANKS, LOCAL, K = 2, 2, 2


@cache
def model():
    return rc.models.build("gpt2-tiny", layers=2, hidden=8, heads=2, vocab=20, seq=32, context=32)


def made(options: set[str], ranks: int = RANKS, rank: int = 0) -> Program:
    """A rank's program, with these options on."""
    at(rank, ranks)
    strategy = fleet.DistributedStrategy()
    for option in options - {"ranks"}:
        SWITCH[option](strategy)
    program = rc.load(model(), batch=LOCAL)
    loss = rc.losses.cross_entropy(program["logits"])
    inner = rc.Momentum(0.1) if "lars" in options else rc.Adam(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rc.RecomputeWarning)
        fleet.distributed_optimizer(inner, strategy).minimize(loss)
    return program


def recomputing(s: fleet.DistributedStrategy, offload: bool = False) -> None:
    s.recompute = True
    s.recompute_configs = {
        "checkpoints": ["h.0.out", "h.0.attn.out"],
        "enable_offload": offload or s.recompute_configs.get("enable_offload", False),
    }


def merging(s: fleet.DistributedStrategy) -> None:
    s.gradient_merge, s.gradient_merge_configs = True, {"k_steps": K}


SWITCH: dict[str, Callable[[fleet.DistributedStrategy], object]] = {
    "recompute": recomputing,
    "offload": lambda s: recomputing(s, offload=True),
    "amp": lambda s: setattr(s, "amp", True),
    "gradient_merge": merging,
    "sharding": lambda s: setattr(s, "sharding", True),
    "lars": lambda s: setattr(s, "lars", True),
    "lamb": lambda s: setattr(s, "lamb", True),
    "sync_batch_norm": lambda s: setattr(s, "sync_batch_norm", True),
    "sum": lambda s: setattr(s, "gradient_scale_configs", {"scale_strategy": "sum"}),
    "hybrid": lambda s: setattr(s, "hybrid_configs", {"dp_degree": RANKS}),
}


def has(program: Program, kind: type) -> bool:
    return any(isinstance(o.op, kind) for o in program.operators)


def names(program: Program) -> list[str]:
    return [v.name for o in program.operators for v in o.writes()]


#: option → whether a program shows it
SHOWS: dict[str, Callable[[Program], bool]] = {
    "recompute": lambda p: any("@" in n for n in names(p)),
    "offload": lambda p: bool(offloaded(p.block)),
    "amp": lambda p: has(p, LossScaleUpdate) and any(v.dtype == "f16" for o in p.operators for v in o.writes()),
    "gradient_merge": lambda p: p.block.inputs[0].shape[0] == K * LOCAL,
    "sharding": lambda p: len(p.sharded) == len(p.gradients) and all(len(p[n].shape) == 1 for n in p.sharded),
    "lars": lambda p: has(p, LarsUpdate),
    "lamb": lambda p: has(p, LambUpdate),
    "sync_batch_norm": lambda p: p.slices == ("ranks:0:2@dp=0/2",),
    "sum": lambda p: any(n.startswith("merged") for n in names(p)),
    "hybrid": lambda p: p.mesh == rc.Mesh.of(dp=RANKS),
    "ranks": lambda p: any(isinstance(o.op, Communication) and o.op.ranks == RANKS for o in p.operators),
}


def test_the_table_is_complete() -> None:
    assert set(SWITCH) | {"ranks"} == set(SHOWS) == set(OPTIONS)
    assert {name for pair in REFUSED_PAIRS for name in pair} <= set(OPTIONS)


@pytest.mark.parametrize("option", list(SWITCH))
def test_each_is_seen_where_it_is_on_alone(option: str) -> None:
    """Else pairs would say nothing."""
    found = {name for name, shows in SHOWS.items() if shows(made({option}))}
    implied = {"hybrid", "ranks"} | ({"recompute"} if option == "offload" else set())
    assert found == {option} | implied


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(OPTIONS, 2)))
def test_pairs(a: str, b: str) -> None:
    refused = next((pair for pair in REFUSED_PAIRS if set(pair) == {a, b}), None)
    if refused is None:
        program = made({a, b})
        assert SHOWS[a](program) and SHOWS[b](program)
        return
    with pytest.raises(UsageError) as e:
        made({a, b})
    assert re.match(re.escape(f"{OPTIONS[refused[0]]} and {OPTIONS[refused[1]]} are not combined"), str(e.value))
