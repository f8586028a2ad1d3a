"""The steps of a pipeline's stages, compiled side by side in as many processes as there are processors."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from ..compiling.compiler import CompiledStep, StepFigures
from ..compiling.steps import Steps
from ..language.ir import Block
from ..language.verify import trusted, verify
from ..support.children import as_worker
from ..training.parallel import PIPELINE, Parallel
from ..training.stages import cuts_of, with_own_layers


@dataclass(frozen=True)
class CompiledStage:
    """The program and the figures of a rank of a stage, that which takes longest."""

    block: Block
    figures: StepFigures


def compiled_stage(
    steps: Steps, parallel: Parallel, place: int, checkpoints: Sequence[str] | None = None
) -> CompiledStep:
    """The step of a rank at a coordinate of the pipeline, which has all layers of its own and few others: of the first
    one that has the end of the sequence, whose causal attention takes longest."""
    mesh = parallel.mesh
    rank = mesh.last(next(r for r in range(mesh.ranks) if mesh.coordinate(r, PIPELINE) == place), "cp")
    rank_options = dataclasses.replace(parallel, rank=rank)
    steps = steps.for_ranks(rank_options)
    if rank_options.pipe is None or steps.is_step:
        return steps.compile(steps.batch(rank_options.batch), checkpoints)
    program, loss = steps.program(steps.batch(rank_options.batch))
    cuts = cuts_of(program, rank_options.pipe, rank_options.cuts)
    return steps.for_ranks(dataclasses.replace(rank_options, cuts=cuts)).compile_program(
        with_own_layers(program, rank_options.pipe, cuts), loss, steps.resolved(checkpoints, rank_options.batch)
    )


def compiled_stages(
    steps: Steps,
    parallel: Parallel,
    places: Iterable[int],
    checkpoints: Sequence[str] | None = None,
    done: Callable[[int], object] = lambda count: None,
) -> dict[int, CompiledStage]:
    """The stages at several coordinates of the pipeline, by coordinate.

    The first is verified after each pass, the others at the end.
    `done` is called with the number of those that are compiled.
    """
    wanted = sorted(places)
    steps.program(steps.batch(parallel.batch))  # made once, for all
    stages: dict[int, CompiledStage] = {}
    with _made(_Work(steps, parallel, wanted[0], checkpoints), wanted) as results:
        for place, stage in zip(wanted, results, strict=True):
            stages[place] = stage
            done(len(stages))
    return stages


@dataclass(frozen=True)
class _Work:
    """The arguments with which a process compiles a stage."""

    steps: Steps
    parallel: Parallel
    verified: int
    checkpoints: Sequence[str] | None

    def stage(self, place: int) -> CompiledStage:
        with contextlib.nullcontext() if place == self.verified else trusted():
            step = compiled_stage(self.steps, self.parallel, place, self.checkpoints)
        return CompiledStage(verify(step.program.block), step.figures)


#: the work of this process, if it is one of several
_work: _Work | None = None


def _begin(work: _Work, parent: int) -> None:
    global _work
    as_worker(parent)
    _work = work


def _stage(place: int) -> CompiledStage:
    assert _work is not None
    return _work.stage(place)


@contextlib.contextmanager
def _made(work: _Work, places: Sequence[int]) -> Iterator[Iterable[CompiledStage]]:
    """The stages, in order, by processes that begin as copies of this one, or by this one."""
    count = min(len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1, len(places))
    if count < 2:
        yield map(work.stage, places)
        return
    copies = multiprocessing.get_context("fork")
    others = set(multiprocessing.active_children())
    with warnings.catch_warnings(), ProcessPoolExecutor(count, copies, _begin, (work, os.getpid())) as pool:
        warnings.simplefilter("ignore", DeprecationWarning)  # copies run Python alone, whatever threads there are
        try:
            # Not by map: the futures that it cancels at an error make the pool's thread fail when its workers end.
            each = [pool.submit(_stage, place) for place in places]
            yield (future.result() for future in each)
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()  # else the end of this process would wait for what it compiles
            pool.shutdown(wait=False)
            raise
