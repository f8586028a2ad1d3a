"""Vocabularies that are divided: embeddings by their rows, heads by their words, and cross entropy over parts.

A cross entropy of scores of which each rank has some classes is written out: the logarithm of the sum of exponentials
and the labels' scores are made in parts, one number a label, and combined; the scores are never gathered (Megatron's
vocabulary-parallel cross entropy, Shoeybi et al. 2019, arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...language.axes import Cut, of_operator
from ...language.builder import Builder
from ...language.factors import Place
from ...language.ir import Block, Operator, Value
from ...language.types import need
from ...ops.indexing.gather import Gather
from ...ops.linear.products import Gemm, MatMul
from ...ops.loss.cross_entropy import LabelLoss, SoftmaxCrossEntropyGrad, SoftmaxCrossEntropyLoss
from ...ops.shape.reshape import Transpose
from ..matching.graph import FORWARD, Graph
from .reshard import Division


def vocabularies(block: Block, how: Division) -> dict[str, Cut]:
    """Parameters to be cut along the words: tables of which inputs take rows, and the matrices of heads.

    A table is cut if it has more rows than a sample takes of it.
    """
    cuts: dict[str, Cut] = {}
    for _, w, axis in _heads(block):
        cut = how.cut(w.type, axis)
        if cut is not None:
            cuts[w.name] = cut
    parameters = {v.name: v for v in block.parameters}
    graph = Graph(block)
    inputs = {v.name: v for v in block.inputs}
    for o in block.operators:
        if not isinstance(o.op, Gather) or o.role not in FORWARD or o.inputs[0] is None or o.inputs[1] is None:
            continue
        w, source = (graph.above(v, "Cast", "Identity", "Reshape") for v in o.inputs[:2] if v is not None)
        if w.name not in parameters or w.ndim != 2 or o.op.axis % 2 or source.name not in inputs:
            continue
        cut = how.cut(w.type, 0)
        if cut is not None and w.shape[0] > o.inputs[1].size // max(source.shape[0] if source.ndim > 1 else 1, 1):
            cuts.setdefault(w.name, cut)
    return cuts


def has_heads(block: Block, how: Division) -> bool:
    """Whether ranks can have some of the words of a head each."""
    return any(how.cut(w.type, axis) is not None for _, w, axis in _heads(block))


def open_losses(block: Block, cuts: Mapping[str, Cut]) -> Block:
    """The block in which cross entropies of scores that are cut along the classes are written out."""
    heads = {o.outputs[0]: o for o, w, axis in _heads(block) if w.name in cuts and cuts[w.name].place.axis == axis}
    kept = {o.outputs[1].name: o for o in heads.values() if len(o.outputs) > 1 and o.outputs[1] is not None}
    b = Builder.on(block)
    sums: dict[str, Value] = {}
    for o in block.operators:
        b.role, b.prefix = o.role, next(o.writes()).name
        if isinstance(o.op, SoftmaxCrossEntropyLoss) and o.outputs[0] in heads:
            sums[next(o.writes()).name] = _opened(b, o)
        elif isinstance(o.op, SoftmaxCrossEntropyGrad) and o.inputs[0] is not None and o.inputs[0].name in kept:
            loss = kept[o.inputs[0].name]
            _opened_gradient(b, o, loss, sums[next(loss.writes()).name])
        else:
            b.operators.append(o)
    return block.with_operators(b.operators, constants=(*block.constants, *b.constants)) if heads else block


def _heads(block: Block) -> Iterator[tuple[Operator, Value, int]]:
    """Cross entropies that can be written out; the matrix that makes their scores, and its axis of words."""
    graph, parameters = Graph(block), {v.name for v in block.parameters}
    for o in block.operators:
        if not isinstance(o.op, SoftmaxCrossEntropyLoss) or o.role not in FORWARD or not _can_open(graph, o):
            continue
        assert o.inputs[0] is not None
        product = _product(o.inputs[0], 1, graph)
        if product is None or product.inputs[1] is None:
            continue
        w, axis = product.inputs[1], 0 if product.op.transB else 1  # type: ignore[attr-defined]
        while w.name not in parameters and (maker := graph.producer(w, "Transpose", "Cast", "Identity")) is not None:
            if isinstance(maker.op, Transpose):
                if maker.op.perm != (1, 0):
                    break
                axis = 1 - axis
            w = next(maker.reads())
        if w.name in parameters and w.ndim == 2:
            yield o, w, axis


def _can_open(graph: Graph, o: Operator) -> bool:
    """Whether a loss has no weights of classes, is no mean, and its log-probabilities are for its gradient alone."""
    assert isinstance(o.op, LabelLoss)
    if o.op.reduction == "mean" or (len(o.inputs) > 2 and o.inputs[2] is not None):
        return False
    if len(o.outputs) < 2 or o.outputs[1] is None:
        return True
    later = graph.readers(o.outputs[1])
    return o.outputs[1].name not in graph.outputs and all(
        isinstance(r.op, SoftmaxCrossEntropyGrad) and r.inputs[0] == o.outputs[1] for r in later
    )


def _product(v: Value, axis: int, graph: Graph) -> Operator | None:
    """The product whose columns are `axis` of v; None where something else makes it."""
    while (o := graph.producer(v)) is not None and o.inputs and (x := o.inputs[0]) is not None:
        if isinstance(o.op, (MatMul, Gemm)):
            return o if axis == v.ndim - 1 and o.inputs[1] is not None and o.inputs[1].ndim == 2 else None
        same = (f.inputs[0] for f in of_operator(o) if f.outputs[0] == Place(axis) and not f.whole)
        place = next((p for p in same if p is not None and p == Place(p.axis)), None)
        if place is None:
            return None
        v, axis = x, place.axis
    return None


# -- cross entropy over parts -----------------------------------------------------------------------------------------


def _opened(b: Builder, o: Operator) -> Value:
    """The loss from the logarithm of the sum of exponentials, which is returned, and the labels' scores."""
    scores, labels = need(o.inputs[0]), need(o.inputs[1])
    assert isinstance(o.op, LabelLoss)
    sums, label = o.op.row_scores(b, scores, labels)
    loss = o.op.expanded_loss(b, b.Sub(sums, label), labels, o.op.label_masks(b, scores, labels, None)[1])
    b.operators[-1] = b.operators[-1].renamed({loss.name: next(o.writes()).name})
    return sums


def _opened_gradient(b: Builder, o: Operator, loss: Operator, sums: Value) -> None:
    """(softmax - 1 at the label) times the gradient of each label's loss."""
    results = o.op.expand(b, b.Sub(need(loss.inputs[0]), sums), *o.inputs[1:])
    assert results is not None
    b.operators[-1] = b.operators[-1].renamed({need(results[0]).name: next(o.writes()).name})
