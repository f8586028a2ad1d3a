"""Options of many ranks: `--mesh`, `--zero`, `--micro-batches`, `--link`; what a step takes on each of them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ..errors import UsageError
from . import cluster
from .job import Job
from .parsing import whole


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Adds the options about ranks."""
    group = p.add_argument_group("what a step of many ranks takes")
    group.add_argument(
        "--mesh", metavar="dp=N", help="N ranks train together, each on its part of the batch (--batch: that of all); "
        "dp=2,tp=4: operators are divided along tp; dp=2,pp=4: ranks have stages of the network; auto: the fastest",
    )  # fmt: skip
    group.add_argument(
        "--zero", type=whole, metavar="N", help="stage of ZeRO: 0 (default): none; 1, 2: ranks have shards of "
        "parameters, optimizer state and gradients; 3: parameters are also gathered again for the backward pass",
    )  # fmt: skip
    group.add_argument(
        "--micro-batches", type=whole, metavar="M", help="micro-batches of a step, of all replicas (default: dp, with "
        "pp 2 * pp * dp)",
    )  # fmt: skip
    group.add_argument(
        "--link", metavar="node=N,nvlink=RATE,net=RATE", help="how fast a rank sends within a node of N ranks and "
        "between nodes, such as node=8,nvlink=450GB/s,net=50GB/s (latency=5us by default): estimates times",
    )  # fmt: skip
    cluster.add_arguments(group)


def check_arguments(args: argparse.Namespace) -> None:
    """Checks the options before any work is done; parses the mesh and the links, and counts micro-batches."""
    args.ranks, args.network, args.pieces = None, None, 1
    if args.cluster is not None:
        cluster.check_arguments(args)
        return
    if args.mesh is None:
        return
    from ..analysis.ranks import mesh_of, network_of
    from ..training.parallel import Parallel

    for part in args.slice:
        if part.partition(":")[0] in ("all", "micro"):
            raise UsageError(f"--mesh and --slice {part} both cut the batch: give --micro-batches in place of --slice")
    try:
        args.ranks = mesh_of(args.mesh)
        args.pieces = Parallel(args.ranks, 0, args.zero or 0, args.micro_batches).pieces(None)
    except UsageError as e:
        raise UsageError(f"--mesh: {e}") from None
    if args.link is not None:
        try:
            args.network = network_of(args.link, args.ranks)
        except UsageError as e:
            raise UsageError(f"--link: {e}") from None
    if args.batch is not None:
        check_batch(args, args.batch)


def check_batch(args: argparse.Namespace, batch: int | None) -> None:
    """UsageError for a batch that cannot be cut into the micro-batches."""
    if batch is not None and batch % args.pieces:
        raise UsageError(
            f"a batch of {batch} cannot be cut into {args.pieces} equal micro-batches, shared by {args.ranks.ranks} "
            f"ranks (--batch is that of all ranks): give a multiple of {args.pieces}"
        )


def among_ranks(args: argparse.Namespace, optimizer: Any) -> Any:
    """The optimizer, data parallel if there is a mesh."""
    if args.ranks is None:
        return optimizer
    from ..analysis.ranks import among_ranks as shared

    return shared(optimizer, args.ranks, args.zero or 0, args.micro_batches)


def sharing(args: argparse.Namespace, optimizer: Any, program: Any) -> Any:
    """The optimizer for a program that has the batch of all ranks."""
    if args.ranks is None:
        return optimizer
    from ..analysis.ranks import at_parallel
    from ..training.protocol import spec_of

    batch = program.block.batch
    if batch is None:
        raise UsageError(f"--mesh: {args.model} has no input with a batch that ranks could share")
    check_batch(args, batch)
    parallel = spec_of(optimizer).parallel
    assert parallel is not None
    return at_parallel(optimizer, dataclasses.replace(parallel, batch=batch))


def report_ranks(job: Job) -> None:
    """Prints what the step takes on all ranks, if there is a mesh."""
    if job.report.ranks is not None:
        from ..report.ranks_text import ranks_text

        job.say(ranks_text(job.estimated))


def estimate(job: Job, program: Any, loss: str, plain: Any, step: Any) -> None:
    """Estimates what the step takes on all ranks, if there is a mesh."""
    args = job.args
    if args.ranks is None:
        return
    from ..analysis.ranks import Makers, at_parallel, estimate_ranks
    from ..compiling.compiler import compile_step
    from ..training.protocol import spec_of
    from .values import target_of

    batch = program.block.batch
    parallel = spec_of(sharing(args, job.optimizer(), program)).parallel
    assert parallel is not None

    def made(other: Any, **kept: Any) -> Any:
        there = other if other.batch is not None else dataclasses.replace(other, batch=batch)
        return compile_step(program, loss, at_parallel(job.optimizer(), there), target=target_of(args), **kept)

    kept: dict[str, Any] = {}
    if step is not plain and step.planned is None:
        kept = {"checkpoints": job.report.checkpoints}
    elif step is not plain:
        slices = tuple(s for s in step.plan.slices if "@" not in s)
        kept = {"plan": dataclasses.replace(step.plan, slices=slices)} if step.plan.reruns or slices else {}
    make = Makers(made, lambda other: made(other, **kept))
    found = estimate_ranks(plain, step, parallel, args.pieces, make, args.network)
    job.report.ranks, job.estimated = found.to_dict(), found


def exchange(args: argparse.Namespace) -> Any:
    """How rank 0 communicates; None where that is not known."""
    if args.network is None:
        return None
    from ..passes.communication.clock import Exchange

    return Exchange(args.network, args.ranks)
