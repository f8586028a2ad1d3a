"""`--mesh auto --ranks N`, and meshes with stages of a pipeline: what a step takes on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..errors import BudgetError, UsageError
from ..support.tables import human_bytes
from .job import Job
from .job import progress as progress_of
from .parsing import whole
from .values import input_shapes, loading_of, target_of, zoo_option

AUTO = "auto"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options to the group about ranks."""
    group.add_argument(
        "--ranks", type=whole, metavar="N", dest="rank_count", help="with --mesh auto: how many there are; finds the "
        "mesh, the schedule, and what is recomputed with which a step of --batch is fastest and fits each rank",
    )  # fmt: skip
    group.add_argument(
        "--schedule", choices=("gpipe", "1f1b", "interleaved", "zb"), help="of the stages along pp: 1f1b (default), "
        "interleaved (with --chunks), zb (gradients of weights fill the pauses), gpipe",
    )  # fmt: skip
    group.add_argument("--chunks", type=whole, metavar="V", help="parts of the network on each stage, interleaved")


def mesh_asked(args: argparse.Namespace) -> Any:
    """The mesh of a cluster, or "auto"; None for one without stages."""
    from ..communication.mesh import Mesh

    if args.mesh is None or args.mesh == AUTO:
        return args.mesh
    try:
        mesh = Mesh.parse(args.mesh)
    except UsageError as e:
        raise UsageError(f"--mesh: {e}; or give --mesh auto --ranks N") from None
    return mesh if dict(mesh.axes).get("pp", 1) > 1 else None


def check_arguments(args: argparse.Namespace) -> None:
    """Checks the values of the options before any work is done; parses the links."""
    from ..analysis.ranks import network_of
    from ..communication.mesh import Mesh

    auto = args.cluster == AUTO
    if auto and args.rank_count < 1:
        raise UsageError(f"--ranks must be at least 1, not {args.rank_count}")
    if args.budget is not None and args.budget.bytes is None:
        raise UsageError(f"--mesh auto needs an amount for each rank, such as --memory-budget 70GiB, not {args.budget}")
    mesh = Mesh.of(dp=args.rank_count) if auto else args.cluster
    try:
        args.network = None if args.link is None else network_of(args.link, mesh)
    except UsageError as e:
        raise UsageError(f"--link: {e}") from None


def answer(job: Job) -> bool:
    """Finds the mesh, or says what its stages take, if the options ask for it; True if the command is then done."""
    args = job.args
    if args.cluster is None:
        return False
    model = {
        "loss": args.loss,
        "options": dict(zoo_option(o) for o in args.option),
        "input_shapes": input_shapes(args.input_shapes),
        "loading": loading_of(args),
    }
    with progress_of(args) as update:
        stages = _found(job, model, update) if args.cluster == AUTO else _given(job, model, update)
    job.report.batch, job.report.optimizer = args.batch, args.optimizer.lower()
    if args.trace is not None:
        stages.save_trace(str(args.trace))
        job.report.pictures.append(str(args.trace))
        job.written.append((args.trace, ""))
    return True


def _found(job: Job, model: dict[str, Any], update: Callable[[str], None]) -> Any:
    """The stages of the best mesh.  BudgetError if nothing fits."""
    from ..analysis.cluster.search import find_mesh

    args = job.args
    budget = None if args.budget is None else args.budget.bytes
    meshes = find_mesh(
        args.model, args.rank_count, batch=args.batch, network=args.network, optimizer=job.optimizer(), budget=budget,
        target=target_of(args), progress=update, **model,
    )  # fmt: skip
    job.report.cluster = meshes.to_dict()
    job.say(str(meshes))
    if meshes.best is None:
        least = (
            f": the smallest that was compiled takes {human_bytes(meshes.rows[0].peak_bytes)}" if meshes.rows else ""
        )
        raise BudgetError(
            f"no way was found to train {meshes.model} at batch {args.batch:,} on {args.rank_count:,} ranks of "
            f"{human_bytes(meshes.budget)}{least}; give more ranks, a smaller batch, or a larger --memory-budget"
        )
    return meshes.best


def _given(job: Job, model: dict[str, Any], update: Callable[[str], None]) -> Any:
    """The stages of the mesh that was given."""
    from ..analysis.cluster.search import as_published
    from ..analysis.compiled_stages import compiled_stage
    from ..analysis.stages import estimate_stages
    from ..compiling.steps import Steps
    from ..passes.base import dumping

    args = job.args
    if (near := _near(args.cluster, args.network)) != args.cluster:
        job.say(f"ranks are numbered along {near}, so that neighbours along {near.axes[-1][0]} share a node")
        args.cluster = near
    target = target_of(args)
    target = target if args.device is None else as_published(target)
    optimizer, checkpoints = among_stages(args, job.optimizer()), job.checkpoint_patterns()
    estimate = estimate_stages(
        args.model, optimizer, checkpoints=checkpoints, network=args.network, target=target,
        progress=update, **model,
    )  # fmt: skip
    if args.dump_ir is not None:
        with dumping(args.dump_ir):
            steps = Steps(args.model, optimizer=optimizer, target=target, **model)
            compiled_stage(steps, optimizer.spec.parallel, 0, checkpoints)
    job.report.cluster = estimate.to_dict()
    job.say(str(estimate))
    return estimate


def _near(mesh: Any, network: Any) -> Any:
    """The mesh with stages of a pipeline before, and with tp behind the other axes, where nodes are smaller than it:
    what sends most has the shortest way."""
    from ..communication.mesh import Mesh

    if network is None or not 1 < network.node < mesh.ranks:
        return mesh
    order = {"dp": 0, "pp": 1, "tp": 3}
    return Mesh(tuple(sorted(mesh.axes, key=lambda axis: order.get(axis[0], 2))))


def among_stages(args: argparse.Namespace, optimizer: Any) -> Any:
    """The optimizer, on the mesh of a cluster that was given."""
    from ..training.parallel import DataParallel

    return DataParallel(
        optimizer, args.cluster, zero=args.zero or 0, micro_batches=args.micro_batches, batch=args.batch,
        schedule=args.schedule or "1f1b", chunks=args.chunks or 1, accumulate="running",
    )  # fmt: skip
