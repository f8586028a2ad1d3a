"""The list of passes that make a forward pass a training step: what runs is what `pipeline` lists.

    for p in pipeline(Adam().spec, program, "loss"): print(p)

Optimizers run it in two parts, since gradients are their user's between them; `recompute.passes.sequence` has the
passes that follow: a plan, lowering and memory.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from ..errors import UsageError, nearest
from ..language.ir import Block, Role
from ..language.program import Program
from ..passes import Target
from ..passes.approximation.approximate import Approximate
from ..passes.approximation.base import parse_permissions
from ..passes.attention.find_attention import FindAttention
from ..passes.base import ForwardPass, Pass
from ..passes.cleanup.eager_updates import EagerUpdates
from ..passes.gradient.autodiff import Autodiff
from ..passes.gradient.precision import PURE, Precision, StoreParameters
from ..passes.inserting import Insertion, with_inserted
from ..passes.loss.find_head import FindHead
from ..passes.offloading.offload_checkpoints import OffloadCheckpoints
from ..passes.patterns.find_gates import FindGates
from ..passes.patterns.find_norms import FindNorms
from ..passes.pipelines.norms import NormsOverStages
from ..passes.recomputation.recompute import Recompute
from ..passes.sequence import cleanup_passes
from ..passes.sharding.norms import NormsOverRanks
from ..passes.sharding.norms_over_parts import NormsOverParts
from ..passes.sharding.zero import ShardParameters
from ..passes.slicing.open_means import OpenMeans
from ..passes.slicing.slicing import Slice
from ..planning.step import target_of
from .finite import unchecked_name
from .merge import AtWholeBatch, ScaleGradients
from .programs import names_of
from .scaling import ScaleLoss, UncastGradients, UpdateScale, state_names
from .shardings import axes_of, divisions
from .spec import Spec
from .stages import CutStages, DropStages
from .updates import AverageWeights, CountStep, Updates, WholeNormsOnly


class KeepForward(Pass):
    """Remember the forward pass and its loss, for evaluation, before a program is rewritten for training."""

    refuses = ("gradients",)

    loss: str = "loss"

    def run(self, block: Block) -> Block:
        return block

    def rewrite(self, program: Program) -> Block:
        program.begin_training(self.loss)
        return program.block


def pipeline(
    spec: Spec, program: Program, loss: str, *, parameters: Sequence[str] = (), no_grad: Sequence[str] = ()
) -> list[Pass]:
    """The passes that make `program`, a forward pass, a training step, before a planner or the lowering has it.

    `parameters`, `no_grad`: see `Autodiff`.  Names in `spec` are resolved in the program as it is; an empty program
    shows the list of any.
    """
    return [
        *backward_passes(spec, program, loss, parameters=parameters, no_grad=no_grad),
        *update_passes(spec, program),
    ]


def find_passes(program: Program, kept: Sequence[str], *, attention: bool = True) -> list[ForwardPass]:
    """The passes that make what is written out one operator; `kept`: values that stay."""
    if program.forward is not None:
        return []
    names = tuple(dict.fromkeys(kept))
    return [FindNorms(names), FindGates(names), *([FindAttention(names)] if attention else ())]


def backward_passes(
    spec: Spec, program: Program, loss: str, *, parameters: Sequence[str] = (), no_grad: Sequence[str] = ()
) -> list[Pass]:
    """The passes before the updates: gradients, and recomputation from checkpoints, among ranks and in slices."""
    target, low = spec.target or Target(), spec.precision not in (None, "fp32")
    losses = tuple(n for n in (loss, unchecked_name(program, loss)) if n)
    kept = (*losses, *no_grad, *spec.full) if spec.precision else (loss, *no_grad)
    attention = program.fuse_attention and target.fuse_attention
    merge = spec.micro_batches
    before: list[Pass] = []
    if merge is not None:
        before.append(AtWholeBatch(merge.k_steps, merge.batch or 0))
    if spec.parallel is not None and (pipe := spec.parallel.pipe) is not None:
        before.append(CutStages(pipe, spec.parallel.cuts))
    stored: list[Pass] = [StoreParameters()] if spec.precision == PURE else []
    passes: list[Pass] = [*find_passes(program, kept, attention=attention), *stored, KeepForward(loss)]
    if _fuses_head(spec, program) and (not low or target.on_device):  # a CPU has no products of 16-bit floats for it
        passes.append(FindHead(loss, (*program.fetched, *_named(program, spec.full))))
    if low:
        passes.append(Precision(spec.precision or "", spec.full, losses))
    scale = state_names(program)[0] if spec.scaling is not None else ""
    if spec.scaling is not None:
        passes.append(ScaleLoss(spec.scaling.initial))
    passes.append(Autodiff(loss, tuple(parameters), tuple(no_grad), scale))
    after = [*_recomputing(spec, program, loss), *_of_ranks(spec)]
    if merge is not None and merge.multiple != 1:
        after.append(ScaleGradients(merge.multiple))
    return with_inserted([*before, *passes, *after], _insertions(spec))


def _named(program: Program, patterns: Sequence[str]) -> list[str]:
    """The values whose names fit the patterns."""
    names = [v.name for o in program.block.operators for v in o.writes()]
    return [n for p in patterns for n in fnmatch.filter(names, p)]


def _fuses_head(spec: Spec, program: Program) -> bool:
    """Whether a large head becomes one operator: not where ranks have some of its words each."""
    fuses = program.fuse_head and (spec.target is None or spec.target.fuse_head)
    return fuses and (spec.parallel is None or not spec.parallel.divides_head(program.block))


def _recomputing(spec: Spec, program: Program, loss: str) -> list[Pass]:
    """Regions in slices and recomputation from checkpoints; then ranks divide what is left, or before.

    What is gathered among ranks is gathered again for the recomputation, and not kept for it.
    """
    parallel = spec.parallel
    divide = divisions(parallel.mesh, parallel.rank, parallel.reduce, sequence=parallel.sequence) if parallel else []
    divided: list[Pass] = [OpenMeans(), *divide] if divide else []
    regions: list[Pass] = [Slice(spec.regions)] if spec.regions else []
    if not spec.checkpoints:
        return [*divided, *regions]
    patterns = names_of(program, spec.checkpoints, "checkpoints")
    names = tuple(checkpoint_names(program, patterns) if program.operators else patterns)
    opened: list[Pass] = [OpenMeans()] if spec.whole else []
    return [*regions, *opened, Recompute(names, loss=loss, named=program.block), *divided]


def _of_ranks(spec: Spec) -> list[Pass]:
    """Shards of parameters, slices of the whole step, checkpoints in host memory."""
    passes: list[Pass] = []
    parallel, merge = spec.parallel, spec.micro_batches
    if parallel is not None and merge is not None and parallel.zero and parallel.ranks > 1:
        how = parallel.sharded(merge.k_steps)
        passes.append(ShardParameters(how.axis, how.ranks, how.rank, how.parts, how.again))
    if spec.whole and spec.request is None and not spec.later:
        passes.append(Slice(spec.whole))
        if parallel is not None and parallel.pipe is not None:
            passes.append(DropStages())
    if spec.offload and spec.request is None:
        passes.append(OffloadCheckpoints())
    return passes


def update_passes(spec: Spec, program: Program) -> list[Pass]:
    """The passes after the gradients: updates, averages, the count of steps, norms over ranks, approximations."""
    passes: list[Pass] = []
    if spec.precision and not spec.whole and not spec.rule.clips:
        passes.append(UncastGradients())
    scale = state_names(program)[0] if spec.scaling is not None else ""
    passes += [Updates(spec.rule, scale, spec.precision == PURE), EagerUpdates(), CountStep(spec.rule)]
    if spec.scaling is not None and spec.scaling.dynamic:
        passes.append(UpdateScale(spec.scaling.growth, spec.scaling.backoff, spec.scaling.interval))
    if spec.average is not None:
        passes += [AverageWeights(spec.average.decay, spec.average.thres_steps), EagerUpdates()]
    if spec.parallel is not None:
        passes += _norms(spec)
    if spec.allowed and spec.request is None:
        target = target_of(spec.target)
        permitted = tuple(map(str, parse_permissions(spec.allowed)))
        passes += [*cleanup_passes(target), Approximate(everywhere=permitted)]
    return with_inserted(passes, _insertions(spec))


def _insertions(spec: Spec) -> tuple[Insertion, ...]:
    """The insertions of the wrappers, then the user's own."""
    return (*spec.inserted, *(spec.target or Target()).insertions)


def _norms(spec: Spec) -> list[Pass]:
    """Norms and checks of gradients over all ranks."""
    parallel = spec.parallel
    assert parallel is not None
    divided = axes_of(parallel.mesh)
    how = parallel.sharded(parallel.pieces(spec.merge))
    sharded = bool(parallel.zero) and parallel.ranks > 1
    passes: list[Pass] = [WholeNormsOnly(str(parallel.mesh), parallel.zero)]
    if divided:
        axes, ranks = zip(*divided, strict=True)
        passes.append(NormsOverParts(axes, ranks, parallel.pipe is not None))
    passes.append(NormsOverRanks(how.axis, how.ranks, how.rank, how.parts, sharded))
    if parallel.pipe is not None:
        passes += [NormsOverStages(parallel.pipe), EagerUpdates()]
    return passes


def checkpoint_names(program: Program, patterns: Sequence[str]) -> list[str]:
    """The values that names and globs match, among forward values and aliases.  UsageError for a miss."""
    values = program.block.values()
    forward = [v.name for o in program.operators if o.role in (Role.FORWARD, Role.LOSS) for v in o.writes()]
    names: list[str] = []
    for name in patterns:
        matches = [name] if name in values else fnmatch.filter(forward, name)
        if not matches:
            matches = [program.aliases[a] for a in fnmatch.filter(program.aliases, name)]
        if not matches:
            raise UsageError(f"there is no value '{name}' to checkpoint{nearest(name, [*forward, *program.aliases])}")
        names += matches
    return list(dict.fromkeys(names))
