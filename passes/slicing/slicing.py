"""Slicing: a region of the step runs in pieces, so that what is inside it never exists whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...errors import UsageError, nearest
from ...language.axes import Cut, of_operator
from ...language.builder import Builder
from ...language.factors import Place
from ...language.ir import Block, Operator, Role
from ...ops.norm.batch_norm_train import BatchNormTrain
from ..base import Pass
from ..cleanup.dead_code import drop_unused_outputs
from ..cleanup.eager_updates import EagerUpdates
from ..pipelines.schedules import Pipe
from .open_batch_norms import OpenBatchNorms
from .open_means import open_means
from .partition import partitioned
from .pieces import Pieces, bounds, needed_again
from .ranks import RankPieces, Share
from .region import Graph, Region, around, at_once, backward_of, given_places, grown
from .staged import StagePieces, Stagewise
from .whole import MicroBatch, micro_batch, reads_sums, shared_once, whole_backward

T = TypeVar("T")
#: the region that is the whole forward pass; the same in micro-batches, each with batch statistics of its own
ALL, MICRO = "all", "micro"
#: the whole step, operator by operator, on the ranks of a mesh side by side (partition.py)
RANKS = "ranks"


@dataclass(frozen=True)
class Slicing:
    """A region of the forward pass that runs in `pieces` slices along an axis.

    The region: operators from the one that makes `first` to the one that makes `last`, in order of execution; `axis` is
    that of `first`.  `first` "all": the whole forward pass, with `axis` that of the inputs.  "micro": the same, where
    each slice takes batch statistics of its own (docs/training.md, gradient merge); with a `share`, the slices are
    those of all ranks along an axis of the mesh, and this is the program of one of them (ranks.py).  "ranks": the same,
    with all ranks side by side (partition.py).  With a `pipe`, the rank runs its stages of a pipeline (staged.py).
    """

    first: str
    last: str
    axis: int
    pieces: int
    share: Share | None = None
    pipe: Pipe | None = None

    def __str__(self) -> str:
        region = self.first if self.whole else f"{self.first}..{self.last}"
        share = "" if self.share is None else f"@{self.share}"
        pipe = "" if self.pipe is None else f"+{self.pipe}"
        return f"{region}:{self.axis}:{self.pieces}{share}{pipe}"

    @property
    def whole(self) -> bool:
        """Whether the whole step runs in slices."""
        return self.first in (ALL, MICRO, RANKS)


def parse_slicing(text: str) -> Slicing:
    """A slicing from FIRST..LAST:AXIS:PIECES or all:AXIS:PIECES.  UsageError for anything else."""
    match = re.fullmatch(
        r"(?:(?P<first>.+?)\.\.(?P<last>.+)|(?P<whole>all|micro|ranks)):(?P<axis>-?\d+):(?P<pieces>\d+)"
        r"(?:@(?P<mesh>\w+)=(?P<rank>\d+)/(?P<ranks>\d+)(?P<library>/library)?(?P<running>/running|/scattered)?"
        r"(?:\+(?P<pipe>\w+)=(?P<place>\d+)/(?P<places>\d+),(?P<schedule>\w+),(?P<chunks>\d+))?)?",
        text.strip(),
    )
    # ranks are of a mesh, micro-batches may be, other regions are not
    if not match or (match["whole"] != MICRO and (match["whole"] == RANKS) != bool(match["mesh"])):
        raise UsageError(
            f"invalid slice '{text}': give FIRST..LAST:AXIS:PIECES, such as fc_1..fc_2:0:8 for the "
            "operators from the one that makes fc_1 to the one that makes fc_2, or all:AXIS:PIECES"
        )
    whole = match["whole"]
    order = "library" if match["library"] else "tree"
    share = pipe = None
    if match["mesh"]:
        running = bool(match["running"]), match["running"] == "/scattered"
        share = Share(match["mesh"], int(match["ranks"]), int(match["rank"]), order, *running)
    if match["pipe"]:
        places = int(match["places"]), int(match["place"])
        pipe = Pipe(match["pipe"], *places, match["schedule"], int(match["chunks"]))
    first, last = (match[name] or whole for name in ("first", "last"))
    return Slicing(first, last, int(match["axis"]), int(match["pieces"]), share, pipe)


def whole_last(parts: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parts that are sliced before recomputation, and the one after it: slices of the whole step, if named last."""
    last = bool(parts) and parse_slicing(parts[-1]).whole
    return (tuple(parts[:-1]), tuple(parts[-1:])) if last else (tuple(parts), ())


class Slice(Pass):
    """Run regions in slices: only the inputs and outputs of a region exist whole.

    In the forward pass each slice is computed and dropped; in the backward pass it is computed again, differentiated
    and dropped before the next.  Slices of inputs are views, and slices of outputs are written in their place wherever
    they are contiguous.  Gradients of weights, and means, are added up in the order of the slices.

    Slices of the whole step come after recomputation, so that each repeats it; regions come before it (`whole_last`).
    """

    parts: tuple[str, ...] = ()

    def run(self, block: Block) -> Block:
        """The block itself without parts (see `parse_slicing`)."""
        block = open_means(block) if self.parts else block
        for part in self.parts:
            block = in_slices(block, parse_slicing(part))
        return block


def in_slices(block: Block, slicing: Slicing) -> Block:
    """A training step, or a forward pass, with one region in slices.  UsageError where it cannot be."""
    if not slicing.whole:
        graph = Graph(block)
        return rewritten(graph, region_of(graph, slicing), slicing.pieces, str(slicing))
    if slicing.first == RANKS:
        return _side_by_side(OpenBatchNorms().run(block), slicing)
    graph, forward, whole = whole_step(block, slicing)
    if slicing.share is not None:
        return _shared(graph, whole, slicing.share, slicing)
    if whole is None:
        return rewritten(graph, forward, slicing.pieces, str(slicing))
    wanted = _needed(graph, whole, whole.members)
    b = Builder.on(graph.block)
    groups = [(whole, Pieces(graph.block, b, whole, wanted).emit(slicing.pieces))]
    return _finished(graph.block, b, groups, str(slicing))


def _shared(graph: Graph, whole: Region | None, share: Share, slicing: Slicing) -> Block:
    """A rank's share of the slices of the whole step; side by side with other ranks where slices need each other."""
    if whole is None or not whole.members:
        if share.ranks == slicing.pieces and not any(isinstance(o.op, BatchNormTrain) for o in graph.operators):
            return _side_by_side(graph.block, slicing)
        raise UsageError(
            "data parallelism: the backward pass of a micro-batch cannot follow its forward pass, since something is "
            "computed from the whole batch in between. With one micro-batch a rank (and sync_batch_norm=True if there "
            "are batch normalisations) the ranks go through the step side by side"
        )
    if slicing.pipe is not None:
        return _staged(graph, whole, share, slicing)
    pieces = RankPieces(graph, Builder.on(graph.block), whole, _needed(graph, whole, whole.members), share)
    groups = [(whole, pieces.emit(slicing.pieces))]
    return pieces.with_rows(_finished(graph.block, pieces.b, groups, str(slicing)))


def _staged(graph: Graph, whole: Region, share: Share, slicing: Slicing) -> Block:
    """A rank's stages of a pipeline, for its share of the micro-batches."""
    pipe = slicing.pipe
    assert pipe is not None
    if any(o.role is Role.OPTIMIZE for o in graph.operators):
        raise UsageError("pipelines and budgets or plans are not combined yet: give checkpoints, or neither")
    plan = Stagewise(graph, whole, pipe.stages)
    pieces = StagePieces(graph, Builder.on(graph.block), plan, share, pipe)
    groups = [(plan.region, pieces.emit(slicing.pieces))]
    return pieces.own_part(pieces.with_rows(_finished(graph.block, pieces.b, groups, str(slicing))))


def _side_by_side(block: Block, slicing: Slicing) -> Block:
    """A rank's step, of which every operator runs beside those of the other ranks."""
    share = slicing.share
    assert share is not None
    if share.ranks == 1:
        return block
    graph = Graph(block)
    starts, size = _from_inputs(graph, slicing.axis, f"slicing '{slicing}'")
    return partitioned(graph, starts, size, share)


def whole_step(block: Block, slicing: Slicing) -> tuple[Graph, Region, Region | None]:
    """The step whose whole is to run in slices, without needless recomputation; its forward pass, and both passes.

    None for the latter if a slice's backward pass cannot follow its forward pass.  However many pieces there are, these
    are the same: the block remembers them.
    """
    key = f"whole step {slicing.first}:{slicing.axis}:{slicing.share}"
    step = block.facts.get(key)
    if step is None or not _least_pieces(slicing) <= slicing.pieces <= step[1].size:  # then the error is raised again
        step = block.facts[key] = _whole_step(block, slicing)
    return step


def _whole_step(block: Block, slicing: Slicing) -> tuple[Graph, Region, Region | None]:
    graph = Graph(block, own=slicing.first == MICRO, always=slicing.share is not None)
    forward = region_of(graph, slicing)
    backward = whole_backward(graph, forward) if forward.members else None
    whole = at_once(graph, forward, backward) if backward is not None else None
    if whole is None or reads_sums(graph, whole):
        return graph, forward, None
    once = shared_once(graph, whole)
    return (graph, forward, whole) if once is block else whole_step(once, slicing)


def micro_step(block: Block, slicing: Slicing) -> MicroBatch | None:
    """The step with one slice of the batch in place of all; None if a slice's backward pass needs all slices first.

    `block`: after `open_means`.
    """
    if slicing.first == RANKS:
        return None
    graph, _, whole = whole_step(block, slicing)
    if whole is None:
        return None
    ranks = 1 if slicing.share is None else slicing.share.ranks
    return micro_batch(graph, whole, _needed(graph, whole, whole.members), slicing.pieces, slicing.pieces // ranks)


def region_of(graph: Graph, slicing: Slicing) -> Region:
    """The region that a slicing describes.  UsageError for unknown names, other axes, too many pieces."""
    what = f"slicing '{slicing}'"
    if slicing.whole:
        positions = list(graph.forward)
        starts, size = _from_inputs(graph, slicing.axis, what)
    else:
        at = [_producer(graph, name, what) for name in (slicing.first, slicing.last)]
        if at[0] > at[1]:
            raise UsageError(f"{what}: '{slicing.last}' is made before '{slicing.first}': exchange them")
        positions = [i for i in range(at[0], at[1] + 1) if i in graph.forward]
        starts, size = _from_operator(graph, graph.operators[at[0]], slicing, what)
    if not _least_pieces(slicing) <= slicing.pieces <= size:
        raise UsageError(f"{what}: along this axis there are {size} values: give from 2 to {size} pieces")
    # the backward pass of the first slice of all needs the counts already
    region = grown(graph, positions, starts, size, share=1.0 if slicing.whole else 0.01)
    if not slicing.whole and positions[-1] not in region.members:
        cut = [i for i in positions if i not in region.members and _reads_cut(graph, region, i)]
        o = graph.operators[(cut or positions)[0]]
        name = next(o.writes()).name
        raise UsageError(f"{what}: {o.op.name}, which makes '{name}', cannot run in slices along this axis")
    return region


def _least_pieces(slicing: Slicing) -> int:
    return 2 if slicing.share is None else 1


def _reads_cut(graph: Graph, region: Region, i: int) -> bool:
    """Whether an operator reads a value that is cut."""
    return any(v.name in region.states for v in graph.operators[i].reads())


def _producer(graph: Graph, name: str, what: str) -> int:
    at = graph.producers.get(name)
    if at is None or at not in graph.forward:
        forward = [n for n, i in graph.producers.items() if i in graph.forward]
        raise UsageError(f"{what}: no operator of the forward pass makes '{name}'{nearest(name, forward)}")
    return at


def _from_inputs(graph: Graph, axis: int, what: str) -> tuple[dict[str, Place], int]:
    """The axis of all inputs that have as many values along it as the first."""
    inputs = [v for v in graph.block.inputs if -v.ndim <= axis < v.ndim]
    if not inputs:
        raise UsageError(f"{what}: no input has an axis {axis}")
    size = inputs[0].shape[axis]
    return {v.name: Place(axis % v.ndim) for v in inputs if v.shape[axis] == size}, size


def _from_operator(graph: Graph, o: Operator, slicing: Slicing, what: str) -> tuple[dict[str, Place], int]:
    """Where the inputs of the first operator have the axis of its output."""
    target = next(v for v in o.writes() if v.name == slicing.first)
    k = [None if v is None else v.name for v in o.outputs].index(target.name)
    if not -target.ndim <= slicing.axis < target.ndim:
        raise UsageError(f"{what}: '{target.name}' of type {target.type} has no axis {slicing.axis}")
    place = Place(slicing.axis % target.ndim)
    can: set[int] = set()
    for f in of_operator(o):
        at, places = f.outputs[k], given_places(graph, o, f)
        if not isinstance(at, Place) or f.whole or not places:
            continue
        if at == place:
            return places, f.size
        can.add(at.axis)
    axes = ", ".join(map(str, sorted(can))) or "none"
    raise UsageError(
        f"{what}: {o.op.name} cannot make '{target.name}' in slices along axis {slicing.axis}; it can along {axes}"
    )


def rewritten(graph: Graph, forward: Region, pieces: int, what: str) -> Block:
    """The block with a region of the forward pass, and what belongs to it in the backward pass, in slices."""
    b = Builder.on(graph.block)
    return _finished(graph.block, b, sliced_groups(graph, b, forward, pieces, lambda p: p.emit(pieces), what), what)


def sliced_groups(
    graph: Graph, b: Builder, forward: Region, pieces: int, emit: Callable[[Pieces], T], what: str
) -> list[tuple[Region, T]]:
    """Regions of both passes that belong to one of the forward pass, each with what `emit` makes of its slices.

    Where the backward pass of a slice can follow its forward pass, as it can if the loss is in the region, nothing runs
    twice: the step accumulates gradients over slices.
    """
    if not forward.members or len(bounds(forward.size, pieces)) < 2:
        raise UsageError(f"{what}: nothing runs in slices along this axis")
    block = graph.block
    backward = backward_of(graph, forward)
    whole = at_once(graph, forward, backward) if backward is not None else None
    if whole is not None:
        return [(whole, emit(Pieces(block, b, whole, _needed(graph, whole, whole.members))))]
    members = {*forward.members, *(backward.members if backward else ())}
    wanted = _needed(graph, forward, members)
    groups = [(forward, emit(Pieces(block, b, forward, wanted)))]
    if backward is not None:
        again = needed_again(block, forward, backward, wanted)
        needed = _needed(graph, backward, backward.members)
        groups.append((backward, emit(Pieces(block, b, backward, needed, again))))
    return groups


def _finished(block: Block, b: Builder, groups: Sequence[tuple[Region, list[Operator]]], what: str) -> Block:
    """The block with slices in place of regions, without unused outputs."""
    operators = _put_together(block, groups, what)
    read = {v.name for o in block.operators for v in o.reads()}
    kept = {v.name for o in block.operators for v in o.writes() if v.name not in read}  # are there to stay
    kept.update(block.outputs, (v.name for o in operators for v in o.reads()))
    operators = [drop_unused_outputs(o, kept) for o in operators]
    result = block.with_operators(operators, constants=(*block.constants, *b.constants))
    return EagerUpdates().run(result) if any(o.role is Role.OPTIMIZE for o in operators) else result


def _needed(graph: Graph, region: Region, members: Collection[int]) -> set[str]:
    """The values of a region that are needed whole: by others than `members`, or, of partial results, by any other."""
    mine, others = set(region.members), set(members)
    return {
        n
        for n in region.written(graph.block)
        if graph.read_outside(n, others if isinstance(region.states.get(n), Cut) else mine)
    }


def _put_together(block: Block, groups: Sequence[tuple[Region, list[Operator]]], what: str) -> list[Operator]:
    """All operators, those of each region replaced by its slices."""
    result: list[Operator] = []
    done = 0
    for region, operators in groups:
        low, high = region.members[0], region.members[-1]
        before, after, clash = around(block, set(region.members))
        if clash or low < done:
            raise UsageError(
                f"{what}: '{clash or next(block.operators[low].writes()).name}' is needed whole inside the region: end "
                "it before, or begin it behind"
            )
        result += block.operators[done:low]
        result += [block.operators[i] for i in before]
        result += operators
        result += [block.operators[i] for i in after]
        done = high + 1
    return [*result, *block.operators[done:]]
