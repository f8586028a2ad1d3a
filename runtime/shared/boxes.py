"""Data-movement operators as strided copies of boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ...language.ir import Operator
from ...ops.indexing.scatter import strides
from ...ops.shape.pad import inner

#: sizes, strides in x and in y, the first element in x and in y
Box = tuple[Sequence[int], Sequence[int], Sequence[int], int, int]


def grid(box: Box) -> list[tuple[int, int, int]]:
    """(size, stride in x, stride in y) of a box's axes, as few as possible; the run is the last."""
    result: list[tuple[int, int, int]] = []
    for n, a, b in zip(*box[:3], strict=True):
        if n == 1:
            continue
        if result and result[-1][1] == n * a and result[-1][2] == n * b:
            result[-1] = (result[-1][0] * n, a, b)
        else:
            result.append((n, a, b))
    return result or [(1, 1, 1)]


def merged(shape: Sequence[int], perm: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same permutation of as few axes as possible: axes of one element go, those that stay neighbours are one."""
    kept = [p for p in perm if shape[p] != 1]
    groups: list[list[int]] = []
    for p in kept:
        between = range(groups[-1][-1] + 1, p) if groups else ()
        if groups and p > groups[-1][-1] and all(shape[i] == 1 for i in between):
            groups[-1].append(p)
        else:
            groups.append([p])
    order = sorted(range(len(groups)), key=lambda i: groups[i][0])
    sizes = tuple(math.prod(shape[p] for p in groups[i]) for i in order)
    return sizes, tuple(order.index(i) for i in range(len(groups)))


def sliced(taken: Sequence[range], shape: Sequence[int]) -> tuple[list[int], list[int], int]:
    """Sizes, strides and offset of what a slice takes from a tensor of `shape`."""
    steps = strides(shape)
    return (
        [len(r) for r in taken],
        [r.step * s for r, s in zip(taken, steps, strict=True)],
        sum(r.start * s for r, s in zip(taken, steps, strict=True)),
    )


def boxes(op: Operator) -> Iterator[tuple[int, int, Box]]:
    """(input, output, box) of all copies."""
    rule: Any = op.op
    ins = [v.shape if v is not None else () for v in op.inputs]
    outs = [v.shape if v is not None else () for v in op.outputs]
    name, y, to = rule.name, outs[0], strides(outs[0])
    if name == "Concat":
        at, axis = 0, rule.axis % len(y)
        for i, shape in enumerate(ins):
            yield i, 0, (shape, strides(shape), to, 0, at * to[axis])
            at += shape[axis]
        return
    (x, at_x) = (ins[0], strides(ins[0])) if ins else ((), [])
    if name == "Split":
        at, axis = 0, rule.axis % len(x)
        for i, (n, out) in enumerate(zip(rule.sizes, op.outputs, strict=False)):
            if out is not None:
                yield 0, i, (out.shape, at_x, strides(out.shape), at * at_x[axis], 0)
            at += n
    elif name == "Slice":
        sizes, steps, start = sliced(rule.taken(x), x)
        yield 0, 0, (sizes, steps, to, start, 0)
    elif name == "SliceGrad":
        sizes, steps, start = sliced(rule.taken(rule.shape), y)
        yield 0, 0, (sizes, at_x, steps, 0, start)
    elif name == "Pad":
        there, here = inner(rule.pads, x)
        sizes = [s.stop - s.start for s in here]
        begins = [sum(s.start * d for s, d in zip(at, steps, strict=True)) for at, steps in ((here, at_x), (there, to))]
        yield 0, 0, (sizes, at_x, to, *begins)
    elif name == "Expand":
        more = len(y) - len(x)
        kept = [0] * more + [0 if n == 1 else s for n, s in zip(x, at_x, strict=True)]
        yield 0, 0, (y, kept, to, 0, 0)
    elif name == "Tile":
        sizes = [n for pair in zip(rule.repeats, x, strict=True) for n in pair]
        yield 0, 0, (sizes, [s for pair in zip([0] * len(x), at_x, strict=True) for s in pair], strides(sizes), 0, 0)
    elif name != "Fill":  # Identity, Reshape
        yield 0, 0, ((math.prod(x),), (1,), (1,), 0, 0)
