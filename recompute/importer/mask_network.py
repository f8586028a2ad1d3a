"""Rules of products, normalisations and losses: each entry is a row, or it is one of a sum."""

from __future__ import annotations

from .mask_elementwise import broadcast
from .mask_selection import Marks
from .mask_work import Work
from .node import NodeContext

#: operators that treat each sample, entry of the first axis, alone
SAMPLES = (
    "AveragePool", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool", "GlobalMaxPool", "GroupNormalization",
    "InstanceNormalization", "LRN", "MaxPool", "SpaceToDepth",
)  # fmt: skip


def matmul(work: Work) -> None:
    """MatMul: rows and columns are kept apart; what does not count adds nothing to a sum."""
    a, b = work.type(0), work.type(1)
    inner = {0: a.ndim - 1, 1: max(b.ndim - 2, 0)}
    sums = [work.marks(i).get(axis) for i, axis in inner.items()]
    _same_sum(work, sums[0] == sums[1])
    ins = [work.filled(work.name(i), {x: s for x, s in work.marks(i).items() if x == inner[i]}, 0) for i in (0, 1)]
    ndim = max(a.ndim, b.ndim, 2)
    marks: Marks = {}
    if a.ndim > 2 or b.ndim > 2:
        batches = broadcast(work, (0, 1), last=2)
        marks.update(batches)
    if a.ndim > 1 and a.ndim - 2 in work.marks(0):
        marks[ndim - 2] = work.marks(0)[a.ndim - 2]
    if b.ndim > 1 and b.ndim - 1 in work.marks(1):
        marks[ndim - 1] = work.marks(1)[b.ndim - 1]
    work.whole(ins)
    if a.ndim == 1:
        marks = {x - (x == ndim - 1): s for x, s in marks.items()}
    work.mark(marks)


def _same_sum(work: Work, same: bool) -> None:
    if not same:
        i = 0 if work.marks(0) else 1
        raise work.fail(i, f"{work.node.op_type} sums products of its entries with others")


def gemm(work: Work) -> None:
    """Gemm, of matrices that may be transposed."""
    turned = [bool(work.attributes.get(name, 0)) for name in ("transA", "transB")]
    outer, inner = (int(turned[0]), 1 - int(turned[1])), (1 - int(turned[0]), int(turned[1]))
    _same_sum(work, work.marks(0).get(inner[0]) == work.marks(1).get(inner[1]))
    ins = list(work.node.input)
    for i in (0, 1):
        ins[i] = work.filled(ins[i], {x: s for x, s in work.marks(i).items() if x == inner[i]}, 0)
    marks = {i: work.marks(i)[outer[i]] for i in (0, 1) if outer[i] in work.marks(i)}
    if work.name(2):
        for axis, s in work.marks(2).items():
            if marks.get(axis + 2 - work.type(2).ndim) != s:
                raise work.fail(2, "Gemm adds it to other entries")
        for axis in marks:
            place = axis - (2 - work.type(2).ndim)
            if place >= 0 and place not in work.marks(2) and work.type(2).shape[place] != 1:
                raise work.fail(axis, f"Gemm joins it with all entries of '{work.name(2)}'")
    work.whole(ins)
    work.mark(marks)


def einsum(work: Work) -> None:
    """Einsum without an ellipsis: letters that are summed over leave out what does not count."""
    left, arrow, right = str(work.attributes.get("equation", "")).replace(" ", "").partition("->")
    terms = left.split(",")
    if "." in left or not arrow or len(terms) != len(work):
        raise work.fail(next(i for i in range(len(work)) if work.marks(i)), "Einsum names no axes of it")
    letters = {c: s for i, term in enumerate(terms) for a, s in work.marks(i).items() for c in term[a]}
    ins = []
    for i, term in enumerate(terms):
        here = dict(enumerate(term))
        if any(letters.get(c) != work.marks(i).get(a) for a, c in here.items()):
            raise work.fail(next(j for j in range(len(work)) if work.marks(j)), "Einsum joins it with other entries")
        summed = {a: letters[c] for a, c in here.items() if c in letters and c not in right}
        ins.append(work.filled(work.name(i), summed, 0))
    work.whole(ins)
    work.mark({a: letters[c] for a, c in enumerate(right) if c in letters})


def samples(work: Work) -> None:
    """Operators on each sample alone; weights hold no selection."""
    work.unmarked(0, range(1, work.type(0).ndim), f"{work.node.op_type} looks along it")
    for i in range(1, len(work)):
        work.unmarked(i, range(9), f"{work.node.op_type} takes it for weights")
    if work.node.op_type == "BatchNormalization" and NodeContext(work.importer, work.node, work.attributes).training:
        raise work.fail(0, "batch normalisation that trains takes statistics of all entries; put it before the mask")
    work.whole()
    for i in range(len(work.node.output)):
        work.mark(work.marks(0), i)


def layer_norm(work: Work) -> None:
    """Normalisation of each entry over the last axes."""
    axis = work.axis(0, -1)
    work.unmarked(0, range(axis, work.type(0).ndim), f"{work.node.op_type} normalises over it")
    work.whole()
    for i in range(len(work.node.output)):
        work.mark(work.marks(0), i)


def label_loss(work: Work) -> None:
    """SoftmaxCrossEntropyLoss, NegativeLogLikelihoodLoss: labels that do not count are ignored."""
    scores, labels = work.marks(0), work.marks(1)
    if 1 in scores:
        raise work.fail(0, "its axis is that of the classes")
    if {a - (a > 1): s for a, s in scores.items()} != labels:
        raise work.fail(0 if scores else 1, "labels and scores are of different entries")
    ignored = int(work.attributes.get("ignore_index", -(1 << 30)))
    ins = [work.filled(work.name(0), scores, 0), work.filled(work.name(1), labels, ignored), *work.node.input[2:]]
    work.whole(ins, ignore_index=ignored)
    if work.attributes.get("reduction", "mean") == "none":
        work.mark(labels)
    work.mark(scores, 1)
