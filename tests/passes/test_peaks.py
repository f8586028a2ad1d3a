"""The predicted peak is the measured one, and the arena is as small as what is alive: over the zoo (narrowed), batches,
sets of checkpoints and element types."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from zoo_cases import narrow, zoo

import recompute as rc
from recompute import models
from recompute.analysis.strategies import spaced
from recompute.compiling.compiler import CompiledStep, checkpoint_candidates, compile_step
from recompute.data.batches import synthetic_batch
from recompute.passes.memory.storage import storages
from recompute.testing import in_float64

BATCHES = (1, 2, 3)
SETS = ("none", "all", "every second", "square root", "random 1", "random 2")
DTYPES = ("f32", "f64")
CASES = list(itertools.product(BATCHES, SETS))
#: networks that compile fast: every case is looked at
SMALL = ("mlp", "mlp4", "lenet", "lstm", "bert-tiny", "gpt2-tiny")
#: each network in each type runs one case; the cases take turns, so that all of them run
EACH = itertools.product(DTYPES, zoo())
TURNS = [(name, dtype, *CASES[i % len(CASES)]) for i, (dtype, name) in enumerate(EACH)]


@cache
def network(name: str, batch: int, dtype: str) -> tuple[rc.Program, str]:
    """A narrowed network with its loss, and the loss's name; its weights are zeros."""
    program = rc.load(models.build(name, batch=batch, weights=False, **narrow(name)))
    kind, _ = rc.losses.natural_loss(program)
    loss = kind if kind in program else getattr(rc.losses, kind)(program).name
    return (program if dtype == "f32" else in_float64(program)), loss


def checkpoints(program: rc.Program, kind: str) -> list[str] | None:
    """The names of a set."""
    if kind == "none":
        return None
    if kind.startswith("random"):
        names = [v.name for op in program.operators for v in op.writes() if not op.op.updates]
        g = np.random.default_rng(int(kind.split()[1]))
        return [str(n) for n in g.choice(names, min(len(names), 6), replace=False)]
    found, _ = checkpoint_candidates(program.block)
    if kind == "square root":
        return list(spaced(found, round(len(found) ** 0.5)))
    return [c.value.name for c in found[:: 2 if kind == "every second" else 1]]


def compiled(name: str, batch: int, kind: str, dtype: str) -> tuple[CompiledStep, str]:
    program, loss = network(name, batch, dtype)
    return compile_step(program, loss, rc.Momentum(learning_rate=0.01), checkpoints=checkpoints(program, kind)), loss


def check_arena(step: CompiledStep) -> None:
    """Live bytes ≤ arena ≤ 1.01 · live bytes; small programs are allowed what aligning each allocation costs."""
    f = step.figures
    live = f.live_peak_bytes - f.persistent_bytes
    assert f.peak_bytes == f.arena_bytes + f.persistent_bytes
    assert live <= f.arena_bytes <= 1.01 * live + 64 * len(storages(step.program.block))


@pytest.mark.parametrize(
    ("name", "dtype", "batch", "kind"),
    TURNS,
    ids=["-".join(map(str, t)) for t in TURNS],
)
def test_measured_is_predicted(name: str, dtype: str, batch: int, kind: str) -> None:
    step, loss = compiled(name, batch, kind, dtype)
    check_arena(step)
    entry, executor = models.info(name, **narrow(name)), rc.Executor()
    feed = synthetic_batch(step.program, 0, {s.name: s for s in entry.inputs})
    (value,) = executor.run(step.program, feed, [loss])
    assert value.dtype == rc.TensorType.parse(f"{dtype}[]").numpy
    assert executor.session(step.program, [loss]).measured_peak_bytes == step.figures.peak_bytes


def test_every_case_has_its_turn() -> None:
    assert {(dtype, batch, kind) for _, dtype, batch, kind in TURNS} == {
        (dtype, *case) for dtype in DTYPES for case in CASES
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_arenas_of_every_case(name: str, dtype: str) -> None:
    for batch, kind in CASES:
        step, _ = compiled(name, batch, kind, dtype)
        check_arena(step)
